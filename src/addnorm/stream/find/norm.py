"""A norm of a captured run: its kind, input, eps, weight and bias, and its formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from addnorm._util.norms import KINDS
from addnorm._util.norms import Norm as KnownNorm
from addnorm.stream.dataflow.arithmetic import list_views
from addnorm.stream.dataflow.graph import PARAMETER, Op, Value
from addnorm.stream.layout.dimensions import find_axis

Kind = KnownNorm | Literal["scale", "own"]
CENTRED = {name for name, kind in KINDS.items() if kind.is_centred}
# How eps is applied: added to the mean square ("square"), added to its root ("root"), or as lower bound of the root ("bound").
EpsRole = Literal["square", "root", "bound"]


def add_eps(square: Tensor, eps: float, role: EpsRole) -> Tensor:
    """Return the root of the mean square `square`, with `eps` applied as `role` says (`EpsRole`)."""
    if role == "square":
        return (square + eps).sqrt()
    return square.sqrt() + eps if role == "root" else square.sqrt().clamp_min(eps)


def centre(x: Tensor, is_centred: bool = True) -> Tensor:
    """Return x minus the mean of each token; x itself unless `is_centred`."""
    return x - x.mean(-1, keepdim=True) if is_centred else x


@dataclass(eq=False)
class Norm:
    """Norm of a captured run: y = Norm(x).

    Attributes:
        kind: a kind of `KINDS`, or "scale"; "own" for x / D(x) and (x - mean) / D(x) with another function D of each token.
        eps: the constant in the denominator; None if there is none.
        x: the input.
        y: the output.
        weight, bias: the parameters, or None.
        unbiased: whether the sum of squares is divided by d - 1, as in Tensor.std.
        eps_role: how eps is applied (`EpsRole`). For "scale" and with `uses_length`, the root is |x|.
        uses_length: for "rms" and "layer", whether the root is computed as |x| / sqrt(d), with eps applied to |x|.
        is_centred: whether the mean is subtracted.
        divisor: for "own", the function D: `(*, d)` -> `(*, 1)`.
        ops: the operators that compute the norm.
        error: error of the formula divided by the tolerance.
    """

    kind: Kind
    eps: float | None
    x: Value
    y: Value
    weight: Value | None = None
    bias: Value | None = None
    unbiased: bool = False
    eps_role: EpsRole = "square"
    uses_length: bool = False
    is_centred: bool = False
    divisor: Callable[[Tensor], Tensor] | None = None
    ops: set[Op] = field(default_factory=set)
    error: float = 0.0

    def __post_init__(self) -> None:
        self.is_centred |= self.kind in CENTRED

    @property
    def eps_outside(self) -> bool:
        """Whether eps is added to the root, not to the mean square."""
        return self.eps_role == "root"

    @property
    def path(self) -> str:
        """Path of the module that computed the norm."""
        assert self.y.op is not None
        return self.y.op.frame.path

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest dtype in which the norm was computed."""
        values = [self.x, self.y, *(out for op in self.ops for out in op.outputs)]
        dtypes = {value.tensor.dtype for value in values if value.tensor.is_floating_point()}
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def is_whole(self) -> bool:
        """Whether the norm covers all features of a token, not only those of one attention head, for example."""
        return self.y.norm is self

    @property
    def is_projected(self) -> bool:
        """Whether a product with a parameter sums over all the normalized features."""
        products = [(view, op) for view in list_views(self.y) for op in view.users if op.traits & {"linear", "product"}]
        summed = [
            (view, len(view.shape) - (2 if op.name != "linear" and op.args[-1] is view else 1))
            for view, op in products if any(v.kind == PARAMETER for v in op.inputs)
        ]  # fmt: skip
        return any(find_axis(view, self.y, axis) == len(self.y.shape) - 1 for view, axis in summed)

    def denominator(self, x: Tensor) -> Tensor:
        """Return the number by which the (centred) features of each token are divided: `(*, d)` -> `(*, 1)`."""
        if self.divisor is not None:
            return self.divisor(x)
        d, eps, centred = x.shape[-1], self.eps or 0.0, centre(x, self.is_centred)
        if self.kind not in ("layer", "rms", "scale"):
            kind = KINDS[cast(KnownNorm, self.kind)]
            return 1.0 / kind.rstd(kind.term(centred).mean(-1, keepdim=True), eps)
        total = centred.square().sum(-1, keepdim=True)
        if self.kind == "scale" or self.uses_length:
            length = add_eps(total, eps, self.eps_role)
            return length / d**0.5 if self.uses_length else length
        return add_eps(total / (d - self.unbiased), eps, self.eps_role)

    def gain(self, dtype: torch.dtype) -> Tensor | float:
        """Return the factor of the normalized features: the weight, or 1."""
        return 1.0 if self.weight is None else self.weight.tensor.detach().to(dtype)

    def linear(self, x: Tensor, denominator: Tensor) -> Tensor:
        """Return the norm of x without its bias. `denominator` is the divisor; for a fixed divisor the result is linear in x."""
        return centre(x, self.is_centred) / denominator * self.gain(x.dtype)

    def shift(self, dtype: torch.dtype) -> Tensor | float:
        """Return the bias in this dtype, or 0 if there is none."""
        return 0.0 if self.bias is None else self.bias.tensor.detach().to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x, computed by its formula in the dtype of x."""
        return self.linear(x, self.denominator(x)) + self.shift(x.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the kind, eps, path and options as JSON types."""
        options = {name: True for name in ("unbiased", "eps_outside") if getattr(self, name)}
        return {
            "kind": self.kind, "eps": self.eps, "path": self.path, "weight": self.weight is not None,
            "bias": self.bias is not None, **options,
        }  # fmt: skip
