"""LayerNorm and RMSNorm without an add: subclasses of torch's modules that call this library's kernels.

`isinstance`, state dicts and initialization are torch's own. Only the arithmetic of `forward` and `backward` differs. It keeps
the contract of `addnorm.functional`: bfloat16 parameter gradients are accumulated in float32, and tokens are independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from addnorm import functional
from addnorm._util.arguments import check_choice, check_int, check_not_negative
from addnorm._util.norms import KINDS, Norm

Device = torch.device | str | None
Dtype = torch.dtype | None


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


MODULES: dict[Norm, Any] = {"layer": LayerNorm, "rms": RMSNorm}


@dataclass(frozen=True)
class NormFactory:
    """The settings of a stack's norms. `eps` None and `bias` None mean torch's default for the kind of norm."""

    d_model: int
    norm: Norm
    eps: float | None
    elementwise_affine: bool
    bias: bool | None
    device: Any
    dtype: Any

    def __post_init__(self) -> None:
        check_int("d_model", self.d_model, 1)
        check_choice("norm", self.norm, KINDS)
        if self.eps is not None:
            check_not_negative("eps", self.eps)
        if self.bias and not KINDS[self.norm].has_bias:
            title = KINDS[self.norm].title
            raise ValueError(f"bias is True with norm {self.norm!r}, expected None or False: {title} has none.")

    def make(self, present: bool = True) -> Any:
        """Return a new norm with these settings, or None if it is not `present`."""
        if not present:
            return None
        factory = {"device": self.device, "dtype": self.dtype}
        kind = KINDS[self.norm]
        if kind.has_bias:
            factory["bias"] = self.bias is not False
        eps = kind.eps if self.eps is None else self.eps
        return MODULES[self.norm](self.d_model, eps, self.elementwise_affine, **factory)

    def make_each(self, flags: Sequence[bool]) -> nn.ModuleDict:
        """Return a new norm for each stream whose flag is True, by the stream's number from 0."""
        return nn.ModuleDict({str(k): self.make() for k, flag in enumerate(flags) if flag})


def as_leaf(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Record the call of a module as one node of a `torch.fx` graph, as the tracer does for torch's own modules.

    The tracer itself would trace into the module, since `__module__` of its class is not in torch.
    """
    tracer = args[0].tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)


def norm_shape(normalized_shape: tuple[int, ...], weight: Tensor | None) -> tuple[int, ...] | None:
    """Return the `normalized_shape` that the functions need: None if a one-dimensional weight implies it."""
    return None if len(normalized_shape) == 1 and weight is not None else normalized_shape
