"""LayerNorm and RMSNorm without an add: subclasses of torch's modules that call this library's kernels.

`isinstance`, state dicts and initialization are torch's own. Only the arithmetic of `forward` and `backward` differs. It keeps
the contract of `addnorm.functional`: bfloat16 parameter gradients are accumulated in float32, and rows are independent.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Proxy

from addnorm import functional

NormKind = Literal["layer", "rms"]


class LayerNorm(torch.nn.LayerNorm):
    r"""`torch.nn.LayerNorm` by this library's kernels: y = (x - mean) / sqrt(var + eps) * weight + bias.

    Statistics are over the last dimensions, `normalized_shape`, as in torch.

    Example:
        >>> norm = addnorm.LayerNorm(3)
        >>> norm.load_state_dict(torch.nn.LayerNorm(3).state_dict())
        <All keys matched successfully>
        >>> norm(torch.tensor([1.5, 1.0, 4.5])).detach()
        tensor([-0.5392, -0.8627,  1.4018])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return y, in the dtype of `input`."""
        if isinstance(input, Proxy):
            return as_leaf(self, input)
        return functional.layer_norm(
            input,
            self.weight,
            self.bias,
            self.eps,
            normalized_shape=norm_shape(self.normalized_shape, self.weight),
        )


class RMSNorm(torch.nn.RMSNorm):
    r"""`torch.nn.RMSNorm` by this library's kernels: y = x / sqrt(mean(x^2) + eps) * weight.

    The mean is over the last dimensions, `normalized_shape`, as in torch.

    Example:
        >>> addnorm.RMSNorm(3)(torch.tensor([1.5, 1.0, 4.5])).detach()
        tensor([0.5359, 0.3573, 1.6078])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return y, in the dtype of `x`."""
        if isinstance(x, Proxy):
            return as_leaf(self, x)
        return functional.rms_norm(
            x, self.weight, eps=self.eps, normalized_shape=norm_shape(self.normalized_shape, self.weight)
        )


def as_leaf(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the call of a module as one node of a graph of `torch.fx`, as its tracer does for torch's own modules.

    A tracer asks for the module's `__module__`, which is not torch's here.
    """
    tracer = args[0].tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)


def norm_shape(normalized_shape: tuple[int, ...], weight: Tensor | None) -> tuple[int, ...] | None:
    """Return the `normalized_shape` that the functions need: None if a one-dimensional weight implies it."""
    return None if len(normalized_shape) == 1 and weight is not None else normalized_shape
