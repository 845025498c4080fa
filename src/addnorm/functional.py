r"""Add & Norm as functions: residual connection and normalization, in one pass over memory forward and one backward.

    z = residual_scale * residual + row_scale * layer_scale * dropout(branch + branch_bias)
    y = norm(z) * (weight + weight_offset) + bias

`residual` comes first and `branch` (the sublayer's output) second, as in x + Sublayer(x). Some kernel libraries put the branch
first; dropout, branch_bias and layer_scale act on the branch only, so the two must not be swapped. `ops/options.py` declares the
options. The functions have many parameters: one for each option of the operation, as in torch. The in-place functions are in
`inplace.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from addnorm._util.norms import Norm
from addnorm.ops import out as out_ops
from addnorm.ops import validation
from addnorm.ops.dispatch import default_rms_eps, fast_path, run
from addnorm.ops.options import NORMS
from addnorm.reference import Casting

__all__ = ["add_layer_norm", "add_residual", "add_rms_norm", "layer_norm", "rms_norm"]

Scale = Tensor | float
Shape = int | Sequence[int]


class AddOptions(TypedDict, total=False):
    """Keyword options of the add; see `add_layer_norm`."""

    residual_scale: Scale | None
    row_scale: Tensor | None
    layer_scale: Scale | None
    branch_bias: Tensor | None
    dropout_p: float
    training: bool
    seed: Tensor | None
    offset: int
    residual_dtype: torch.dtype | None


class NormOptions(AddOptions, total=False):
    """Keyword options of the add and of the norm; see `add_layer_norm`."""

    normalized_shape: Shape | None
    weight_offset: float
    out_dtype: torch.dtype | None


@overload
def add_layer_norm(
    residual: Tensor, branch: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    *, return_residual: Literal[False] = False, out: Tensor | None = None, **options: Unpack[NormOptions],
) -> Tensor: ...  # fmt: skip


@overload
def add_layer_norm(
    residual: Tensor, branch: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    *, return_residual: Literal[True], out: tuple[Tensor, Tensor] | None = None, **options: Unpack[NormOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def add_layer_norm(
    residual: Tensor, branch: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    *, return_residual: bool, out: Tensor | tuple[Tensor, Tensor] | None = None,
    **options: Unpack[NormOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def add_layer_norm(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    return_residual: bool = False,
    normalized_shape: Shape | None = None,
    residual_scale: Scale | None = None,
    row_scale: Tensor | None = None,
    layer_scale: Scale | None = None,
    branch_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    offset: int = 0,
    weight_offset: float = 0.0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Return LayerNorm(residual + branch), and with `return_residual=True` the sum as well.

        z = residual_scale * residual + row_scale * layer_scale * dropout(branch + branch_bias)
        y = (z - mean) / sqrt(var + eps) * (weight + weight_offset) + bias

    mean and var (biased: divided by d) are those of one token over its d features.

    Args:
        residual: x, the residual stream, `(*, d)`, of dtype float32, bfloat16, float16 or float64.
        branch: Sublayer(x), `(*, d)`, of the same shape; it is not broadcast.
        weight: gamma, `(d,)`, in any of these dtypes; None means ones.
        bias: beta, `(d,)`; None means zeros.
        eps: added to the variance, inside the square root.
        return_residual: also return z, the updated residual stream, which a pre-LN stack needs. Other libraries call it
            `prenorm`.
        normalized_shape: the last dimensions to normalize over, as in `torch.nn.functional.layer_norm`; weight, bias and
            branch_bias then have this shape. None means the last one.
        residual_scale: a number, a 0-d tensor or `(d,)` (DeepNorm's alpha).
        row_scale: a tensor that broadcasts to `(*)`, one factor per token or sample (stochastic depth).
        layer_scale: a number, a 0-d tensor or `(d,)` (LayerScale's gamma).
        branch_bias: `(d,)`, the bias of the sublayer's last projection.
        dropout_p: probability that an element of the branch is dropped; the others are divided by 1 - p.
            In modules it is `dropout`, as in torch's.
        training: False disables dropout.
        seed: seed of the dropout mask, a 0-d int64 tensor; None means a seed from torch's generator.
        offset: number of blocks of four elements to skip in the mask's random sequence.
        weight_offset: added to weight (1.0 for weights that are stored as weight - 1).
        residual_dtype: dtype of z; None means the dtype of residual.
        out_dtype: dtype of y; None means the dtype of branch (under autocast, that of `F.layer_norm(z)` on the device).
        out: tensor for y, or tensors for `(y, z)` with `return_residual=True`; they are returned. They must have the shape of the
            result and decide its dtype, so out_dtype and residual_dtype can be left out. Each may be exactly residual or
            exactly branch, and must share no other memory with an argument. Results for strided tensors are computed out of
            place and copied. For inference: no argument may require a gradient.

    Returns:
        y `(*, d)`, or `(y, z)`.

    The arithmetic is float32 (float64 for float64). z is rounded once to its dtype, and y is the norm of that z. Every
    differentiable input has a gradient, to any order; the gradients of parameters are accumulated in float32 in a fixed order.
    If the squares of a row overflow float32 (values from about 1e18 to 1e37), then rstd = 0 and y is the bias. A constant row
    gives the bias. A NaN makes its whole row NaN. So does an infinity in LayerNorm; in RMSNorm, which has no mean, it makes only
    its own element NaN.

    Raises:
        ValueError: shapes, devices, values or memory do not fit together.
        TypeError: an argument is not a tensor, or its dtype is not a supported or the requested one.
        RuntimeError: `out` is passed and an argument requires a gradient.

    Source: Ba, Kiros, Hinton, "Layer Normalization" (arXiv 1607.06450); Vaswani et al., "Attention Is All You Need"
    (arXiv 1706.03762). Equals `torch.nn.functional.layer_norm(residual + branch, (d,), weight, bias, eps)`.

    Example:
        >>> x, sublayer = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -1.0, 1.5])
        >>> y, z = addnorm.add_layer_norm(x, sublayer, return_residual=True)
        >>> z
        tensor([1.5000, 1.0000, 4.5000])
        >>> y
        tensor([-0.5392, -0.8627,  1.4018])
    """
    return add_norm(  # type: ignore[no-any-return]
        "layer", residual, branch, weight, bias, eps, "float32", normalized_shape, residual_scale, row_scale, layer_scale,
        branch_bias, dropout_p, training, seed, offset, weight_offset, residual_dtype, out_dtype, return_residual,
        None if out is None else out_ops.split_out(out, return_residual), False,
    )  # fmt: skip


@overload
def add_rms_norm(
    residual: Tensor, branch: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float | None = None,
    *, return_residual: Literal[False] = False, casting: Casting = "float32", out: Tensor | None = None,
    **options: Unpack[NormOptions],
) -> Tensor: ...  # fmt: skip


@overload
def add_rms_norm(
    residual: Tensor, branch: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float | None = None,
    *, return_residual: Literal[True], casting: Casting = "float32", out: tuple[Tensor, Tensor] | None = None,
    **options: Unpack[NormOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def add_rms_norm(
    residual: Tensor, branch: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float | None = None,
    *, return_residual: bool, casting: Casting = "float32", out: Tensor | tuple[Tensor, Tensor] | None = None,
    **options: Unpack[NormOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def add_rms_norm(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    return_residual: bool = False,
    casting: Casting = "float32",
    normalized_shape: Shape | None = None,
    residual_scale: Scale | None = None,
    row_scale: Tensor | None = None,
    layer_scale: Scale | None = None,
    branch_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    offset: int = 0,
    weight_offset: float = 0.0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Return RMSNorm(residual + branch), and with `return_residual=True` the sum as well.

        z = residual_scale * residual + row_scale * layer_scale * dropout(branch + branch_bias)
        y = z / sqrt(mean(z^2) + eps) * (weight + weight_offset) + bias

    Arguments, shapes, dtypes, gradients and errors are those of `add_layer_norm`, except:

    Args:
        eps: None means the machine epsilon of the arithmetic, as in `torch.nn.functional.rms_norm` (1.19e-7 for float32).
        casting: where the normalized value is rounded. A model in low precision needs the value that matches its own code:
            "float32" rounds once, at the end (Gemma, OLMo 2, PyTorch); "llama" also to the dtype of z, before the weight
            (Llama, Mistral, Qwen); "t5" also to the dtype of weight, before the weight (T5).
        weight_offset: 1.0 for Gemma, whose weights are stored as weight - 1. Other libraries call it
            `zero_centered_weight`, `offset` or `unit_offset`.

    Returns:
        y `(*, d)`, or `(y, z)`.

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).

    Example:
        >>> x, sublayer = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -1.0, 1.5])
        >>> addnorm.add_rms_norm(x, sublayer)
        tensor([0.5359, 0.3573, 1.6078])
    """
    if eps is None:
        z_dtype = residual_dtype if out is None else out_ops.residual_dtype(out) or residual_dtype
        eps = default_rms_eps(residual, branch, z_dtype)
    return add_norm(  # type: ignore[no-any-return]
        "rms", residual, branch, weight, bias, eps, casting, normalized_shape, residual_scale, row_scale, layer_scale,
        branch_bias, dropout_p, training, seed, offset, weight_offset, residual_dtype, out_dtype, return_residual,
        None if out is None else out_ops.split_out(out, return_residual), False,
    )  # fmt: skip


def add_residual(
    residual: Tensor,
    branch: Tensor,
    *,
    residual_scale: Scale | None = None,
    row_scale: Tensor | None = None,
    layer_scale: Scale | None = None,
    branch_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    offset: int = 0,
    residual_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    r"""Return the sum z, `(*, d)`, without a norm.

        z = residual_scale * residual + row_scale * layer_scale * dropout(branch + branch_bias)

    Options, dtypes, gradients and errors are those of `add_layer_norm`; `out` is a tensor for z. branch is not broadcast.

    Example:
        >>> x, sublayer = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -1.0, 1.5])
        >>> addnorm.add_residual(x, sublayer, layer_scale=0.1)
        tensor([1.0500, 1.9000, 3.1500])
    """
    return add_norm(  # type: ignore[no-any-return]
        "none", residual, branch, None, None, 0.0, "float32", None, residual_scale, row_scale, layer_scale, branch_bias,
        dropout_p, training, seed, offset, 0.0, residual_dtype, None, True,
        None if out is None else out_ops.split_out(out, False, add_only=True),
    )  # fmt: skip


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    *, normalized_shape: Shape | None = None, weight_offset: float = 0.0, out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return LayerNorm(x), by the same kernels as `add_layer_norm`.

    A pre-LN stack needs it for its first norm, which follows no add.
    `out` is a tensor for y, as in `add_layer_norm`, and may be x itself.

    Example:
        >>> addnorm.layer_norm(torch.tensor([1.5, 1.0, 4.5]))
        tensor([-0.5392, -0.8627,  1.4018])
    """
    return add_norm(  # type: ignore[no-any-return]
        "layer", x, None, weight, bias, eps, normalized_shape=normalized_shape, weight_offset=weight_offset,
        out_dtype=out_dtype, targets=None if out is None else out_ops.split_out(out, False), norm_only=True,
    )  # fmt: skip


def rms_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float | None = None,
    *, normalized_shape: Shape | None = None, weight_offset: float = 0.0, casting: Casting = "float32",
    out_dtype: torch.dtype | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return RMSNorm(x), by the same kernels as `add_rms_norm`; `out` is as in `layer_norm`.

    Example:
        >>> addnorm.rms_norm(torch.tensor([1.5, 1.0, 4.5]))
        tensor([0.5359, 0.3573, 1.6078])
    """
    eps = default_rms_eps(x, None) if eps is None else eps
    return add_norm(  # type: ignore[no-any-return]
        "rms", x, None, weight, bias, eps, casting, normalized_shape, weight_offset=weight_offset, out_dtype=out_dtype,
        targets=None if out is None else out_ops.split_out(out, False), norm_only=True,
    )  # fmt: skip


# The functions above pass all arguments by position: a dictionary of them takes a good part of the time of a call on one row.
def add_norm(
    norm: Norm | Literal["none"], residual: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, casting: Casting = "float32", normalized_shape: Shape | None = None, residual_scale: Scale | None = None,
    row_scale: Tensor | None = None, layer_scale: Scale | None = None, branch_bias: Tensor | None = None,
    dropout_p: float = 0.0, training: bool = True, seed: Tensor | None = None, offset: int = 0, weight_offset: float = 0.0,
    residual_dtype: torch.dtype | None = None, out_dtype: torch.dtype | None = None, return_residual: bool = False,
    targets: out_ops.Targets | None = None, norm_only: bool = False,
) -> Any:  # fmt: skip
    """Return y, or `(y, z)` with `return_residual`; for the norm "none" return z.

    These are new tensors, or the tensors of `targets`, which the call writes.
    """
    if (
        residual_scale is None
        and layer_scale is None
        and row_scale is None
        and branch_bias is None
        and residual_dtype is None
        and normalized_shape is None
        and out_dtype is None
        and casting == "float32"
        # `is True`: a value that is not a number goes to the path with argument checks.
        and (dropout_p == 0.0) is True
        and (weight_offset == 0.0) is True
        and (branch is not None or norm_only)
        and (norm != "none" or targets is not None)
    ):
        if targets is None:
            return fast_path(residual, branch, weight, bias, eps, NORMS[norm], return_residual)
        out_ops.fast_path(residual, branch, weight, bias, eps, norm, targets)
        y, z = targets[:2]
    else:
        if not norm_only:
            validation.check_branch(branch)
        compute = run if targets is None else functools.partial(out_ops.run, targets=targets)
        y, z = compute(
            residual, branch, weight, bias, eps, norm, return_residual,
            normalized_shape=normalized_shape, residual_scale=residual_scale, row_scale=row_scale, layer_scale=layer_scale,
            branch_bias=branch_bias, dropout_p=dropout_p, training=training, seed=seed, offset=offset,
            weight_offset=weight_offset, casting=casting, residual_dtype=residual_dtype, out_dtype=out_dtype,
        )  # fmt: skip
    return z if norm == "none" else (y, z) if return_residual else y


# For each kind of norm: the function of the norm alone, and the function of the add and the norm.
FUNCTIONS: dict[Norm, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "layer": (layer_norm, add_layer_norm),
    "rms": (rms_norm, add_rms_norm),
}
