"""A norm as a model computed it: which kind, of what, with which eps, weight and bias; and its formula."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.find.replay import whole

__all__ = ["Kind", "Norm"]

Kind = Literal["layer", "rms", "scale"]


@dataclass(eq=False)
class Norm:
    """A norm as it was computed: y = Norm(x)."""

    kind: Kind
    eps: float | None
    x: Value
    y: Value
    weight: Value | None = None
    bias: Value | None = None
    weight_offset: float = 0.0
    unbiased: bool = False  # divided by d - 1, as Tensor.std does
    eps_outside: bool = False  # added to the root
    length: bool = False  # of an rms: by the length of x, eps its lower bound
    ops: set[Op] = field(default_factory=set)
    error: float = 0.0

    @property
    def path(self) -> str:
        """The module that computed it."""
        assert self.y.op is not None
        return self.y.op.frame.path

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest in which it was computed."""
        values = [self.x, self.y, *(out for op in self.ops for out in op.outputs)]
        dtypes = {value.tensor.dtype for value in values if value.tensor.is_floating_point()}
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def whole(self) -> bool:
        """Whether it is of all features, not of parts of them as of the heads of attention."""
        return whole(self.x)

    def denominator(self, x: Tensor) -> Tensor:
        """What the (centred) features are divided by, `(*, 1)`, in the dtype of x."""
        d = x.shape[-1]
        if self.kind == "scale" or self.length:
            size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            size = size.clamp_min(self.eps) if self.eps else size
            length: Tensor = size / d**0.5 if self.length else size
            return length
        if self.kind == "layer":
            var = x.var(-1, correction=int(self.unbiased), keepdim=True)
        else:
            var = x.square().sum(-1, keepdim=True) / (d - self.unbiased)
        eps = self.eps or 0.0
        return var.sqrt() + eps if self.eps_outside else (var + eps).sqrt()

    def gain(self, dtype: torch.dtype) -> Tensor | float:
        """What the normalized features are multiplied by."""
        return 1.0 if self.weight is None else self.weight.tensor.detach().to(dtype) + self.weight_offset

    def linear(self, x: Tensor, denominator: Tensor) -> Tensor:
        """The norm without its bias and with its denominator given: linear in x."""
        if self.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        return x / denominator * self.gain(x.dtype)

    def shift(self, dtype: torch.dtype) -> Tensor | float:
        """The bias."""
        return 0.0 if self.bias is None else self.bias.tensor.detach().to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """The formula, in the dtype of x."""
        return self.linear(x, self.denominator(x)) + self.shift(x.dtype)

    def to_dict(self) -> dict[str, Any]:
        """What is known of it."""
        found: dict[str, Any] = {"kind": self.kind, "eps": self.eps, "path": self.path, "weight": self.weight is not None,
                                 "bias": self.bias is not None}  # fmt: skip
        for name in ("unbiased", "eps_outside"):
            if getattr(self, name):
                found[name] = True
        return found
