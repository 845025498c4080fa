"""LayerNorm and RMSNorm of tensors, with gradients by the C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from ._ops import ops

_LAYER, _RMS = 0, 1
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_GRADIENTS = (0, 2, 3)  # places of those of x, weight and bias in the backward kernel's results


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Compute `F.layer_norm(x, shape, weight, bias, eps)`.

    Args:
        x: `(*, *shape)`.
        shape: sizes of the last dimensions, over which each row is normalized.
        weight, bias: `shape` each, in the dtype of x.
        eps: is added to the variance.
    """
    if not _is_supported(x, shape, weight, bias):
        return F.layer_norm(x, shape, weight, bias, eps)
    return _normalize(x, shape, weight, bias, eps, _LAYER, 0)


def rms_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    casting: Literal["float32", "llama"] = "float32",
) -> Tensor:
    """Compute `F.rms_norm(x, shape, weight, eps)`.

    Args:
        x: `(*, *shape)`.
        shape: sizes of the last dimensions, over which each row is normalized.
        weight: `shape`, in the dtype of x.
        eps: is added to the mean of the squares; None: the machine epsilon of the arithmetic.
        casting: "llama" rounds to the dtype of x before the product with weight, as transformers' LlamaRMSNorm does.
    """
    if not _is_supported(x, shape, weight, None):
        if casting == "float32":
            return F.rms_norm(x, shape, weight, eps)
        y = F.rms_norm(x.float(), shape, None, eps).to(x.dtype)
        return y if weight is None else weight * y
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return _normalize(x, shape, weight, None, eps, _RMS, int(casting == "llama"))


def _is_supported(x: Tensor, shape: Sequence[int], *parameters: Tensor | None) -> bool:
    """Return whether the kernels compute it: plain CPU tensors of one floating dtype, no forward gradient, no torch.func."""
    tensors = [x, *(parameter for parameter in parameters if parameter is not None)]
    shape = tuple(shape)
    return (
        x.dtype in _DTYPES
        and len(shape) > 0
        and 0 not in shape
        and tuple(x.shape[-len(shape) :]) == shape
        and all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
        and all(tensor.dtype == x.dtype and tensor.device.type == "cpu" for tensor in tensors)
        and all(tuple(tensor.shape) == shape for tensor in tensors[1:])
        and (torch.compiler.is_compiling() or not _is_transformed())
    )


def _is_transformed() -> bool:
    """Return whether torch.func or forward differentiation is active, of which the kernels know nothing."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _normalize(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, norm: int, casting: int
) -> Tensor:
    rows = x.flatten(-len(shape)) if len(shape) > 1 else x
    weight = weight if weight is None else weight.flatten()
    bias = bias if bias is None else bias.flatten()
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        y = _Norm.apply(rows, weight, bias, eps, norm, casting)
    else:
        y, _, _ = ops.add_norm_forward(rows, None, weight, bias, eps, norm, casting=casting, outputs=1)
    return y.view(x.shape)


class _Norm(torch.autograd.Function):
    """Norm of rows, whose backward is one call too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, norm: int, casting: int
    ) -> Tensor:
        y, _, stats = ops.add_norm_forward(x, None, weight, bias, eps, norm, casting=casting)
        ctx.save_for_backward(x, stats, weight)
        ctx.norm = norm
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, stats, weight = ctx.saved_tensors
        mask = sum(is_needed << place for is_needed, place in zip(ctx.needs_input_grad, _GRADIENTS, strict=False))
        gradients = ops.add_norm_backward(dy, None, x, stats, weight, ctx.norm, x.dtype, x.dtype, x.dtype, mask)
        return *(gradients[place] if mask >> place & 1 else None for place in _GRADIENTS), None, None, None
