"""One sublayer with its residual connection and its norms: a `Row`, its parameters, and the equation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from addnorm import wirings
from addnorm._util.arguments import check_choice, check_dtype, check_int, is_number
from addnorm.nn.executor import NOTHING, Pass
from addnorm.nn.norm import LayerNorm, NormKind, RMSNorm
from addnorm.wirings.spec import Factor, Learned, Place, Row, Wiring

__all__ = ["Norms", "Routed", "SublayerConnection"]

ALONE = Place(0, 0, 1, 1)


@dataclass(frozen=True)
class Norms:
    """How the norms of a stack are made, all alike; eps None is torch's default for its kind, bias None is what its kind has."""

    d_model: int
    kind: NormKind
    eps: float | None
    affine: bool
    bias: bool | None
    device: Any
    dtype: Any

    def __post_init__(self) -> None:
        check_int("d_model", self.d_model, 1)
        check_choice("norm", self.kind, ("layer", "rms"))
        if self.eps is not None and not (is_number(self.eps) and self.eps >= 0):
            raise ValueError(f"eps is {self.eps!r}, expected None or a number that is not negative.")
        if self.kind == "rms" and self.bias:
            raise ValueError("bias is True with norm 'rms', expected None or False: RMSNorm has none.")

    def make(self, present: bool) -> LayerNorm | RMSNorm | None:
        """A norm, where one stands."""
        if not present:
            return None
        if self.kind == "rms":
            return RMSNorm(self.d_model, self.eps, self.affine, device=self.device, dtype=self.dtype)
        eps, bias = 1e-5 if self.eps is None else self.eps, self.bias is not False
        return LayerNorm(self.d_model, eps, self.affine, bias, device=self.device, dtype=self.dtype)


class Routed:
    """What passes keyword arguments on, and tells which in `takes` (None: any)."""

    takes: frozenset[str] | None


class SublayerConnection(Routed, nn.Module):
    r"""A sublayer in its wrapper: x' = N_out(a * x + b * dropout(N_branch(f(c * N_in(x))))), norms and factors as a `Row` says.

    Args:
        sublayer: f, a module or any callable, from `(*, d_model)` to the same shape. Of a call's keyword arguments it receives
            those that its signature names.
        d_model: the width of the stream.
        wiring: a `Wiring`, a `Row`, or the name of a wiring that needs no options.
        place: where in a stack it stands, for wirings that depend on it.
        norm: "layer" or "rms".
        eps: of the norms; None is 1e-5 for LayerNorm and the machine epsilon for RMSNorm, as in torch.
        elementwise_affine: whether the norms have weights.
        bias: whether the norms have biases; None: LayerNorm has, RMSNorm has not.
        dropout: of what is added.
        stochastic_depth: the probability that a sample's branch is left out while training (those kept are divided by the rest).
        residual_dtype: of the stream; None: that of x.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        norm_in, norm_branch, norm_out: `LayerNorm`, `RMSNorm` or None. They are computed in one call with the add; one that
            is replaced by another module, or has hooks, is called as a module, after the add.
        a, b, c: a float, or a parameter where it is learned, a scalar or `(d_model,)`.

    A stack of several is a `ResidualStack`, which also fuses the add of each with the norm of the next.

    Example:
        >>> feed_forward = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> connection = addnorm.SublayerConnection(feed_forward, 8, "pre_ln")
        >>> x = torch.randn(2, 5, 8)
        >>> torch.testing.assert_close(connection(x), x + feed_forward(connection.norm_in(x)))
    """

    def __init__(
        self,
        sublayer: Callable[..., Tensor],
        d_model: int,
        wiring: Wiring | Row | str = "pre_ln",
        *,
        place: Place = ALONE,
        norm: NormKind = "layer",
        eps: float | None = None,
        elementwise_affine: bool = True,
        bias: bool | None = None,
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        residual_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not callable(sublayer):
            raise TypeError(
                f"sublayer is {sublayer!r}, expected a module or another callable from (*, d_model) to (*, d_model)."
            )
        wiring = wirings.given(wiring)
        if wiring.flow != "rows":
            raise ValueError(
                f"wiring is {wiring.name!r}, expected one whose sublayers each have a row of their own: {wiring.name} needs a "
                "whole layer, use ResidualStack."
            )
        self.row = wiring.row(*place)
        self.place = place
        self.d_model = d_model
        self.norm = norm
        self.dropout = probability("dropout", dropout)
        self.stochastic_depth = probability("stochastic_depth", stochastic_depth)
        self.residual_dtype = check_dtype("residual_dtype", residual_dtype)
        self.sublayer = sublayer
        self._takes: tuple[Any, frozenset[str] | None] | None = None
        norms = Norms(d_model, norm, eps, elementwise_affine, bias, device, dtype)

        def factor(value: Factor) -> nn.Parameter | float:
            if not isinstance(value, Learned):
                return value
            return nn.Parameter(torch.empty((d_model,) if value.per_feature else (), device=device, dtype=dtype))

        for name in ("norm_in", "norm_branch", "norm_out"):  # None too is registered: `Pass` looks into the table
            self.register_module(name, norms.make(getattr(self.row, name)))
        self.a, self.b, self.c = (factor(value) for value in (self.row.a, self.row.b, self.row.c))
        self.reset_parameters()

    @property
    def takes(self) -> frozenset[str] | None:  # type: ignore[override]  # found out when it is asked for
        """The keyword arguments that the sublayer gets."""
        sublayer = self.sublayer
        if self._takes is None or self._takes[0] is not sublayer:
            self._takes = sublayer, keywords(sublayer)
        return self._takes[1]

    def reset_parameters(self) -> None:
        """Norms ones and zeros, learned factors their initial values; the sublayer is left alone."""
        norms: tuple[Any, ...] = (self.norm_in, self.norm_branch, self.norm_out)
        for module in norms:
            if module is not None:
                module.reset_parameters()
        for name in ("a", "b", "c"):
            value, factor = getattr(self, name), getattr(self.row, name)
            if isinstance(factor, Learned):
                nn.init.constant_(value, factor.init)

    def options(self, x: Tensor) -> Mapping[str, Any]:
        """What the add of this sublayer is told besides its tensors; random numbers are drawn here."""
        factors = {"residual_scale": self.a, "layer_scale": self.b}
        options: dict[str, Any] = {
            name: factor for name, factor in factors.items() if isinstance(factor, Tensor) or factor != 1.0
        }
        if self.residual_dtype is not None:
            options["residual_dtype"] = self.residual_dtype
        if self.training and self.dropout:
            options["dropout_p"] = self.dropout
        if self.training and self.stochastic_depth:
            options["row_scale"] = self._kept(x)
        return options

    def _kept(self, x: Tensor) -> Tensor:
        """0 for the samples (x's first dimension) that lose their branch, 1 / (1 - p) for the others."""
        keep = 1.0 - self.stochastic_depth
        shape = (x.shape[0], *(1,) * (x.dim() - 2)) if x.dim() > 1 else ()
        dtype = torch.promote_types(x.dtype, torch.float32)
        kept = torch.empty(shape, device=x.device, dtype=dtype).bernoulli_(keep)
        return kept / keep if keep else kept

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        """x', `(*, d_model)`; the keyword arguments are the sublayer's."""
        refuse_unknown(context, self.takes)
        run = Pass(self.norm, x, self.residual_dtype, context)
        stream = run.begin(x)
        read = run.read(stream, self)
        return run.finish(run.join(self, stream, run.branch(self, read), NOTHING)[0])

    def extra_repr(self) -> str:
        """The equation, and what is not at rest."""
        parts = [str(self.row)]
        parts += [f"dropout={self.dropout}"] if self.dropout else []
        parts += [f"stochastic_depth={self.stochastic_depth:g}"] if self.stochastic_depth else []
        return ", ".join(parts)


def keywords(sublayer: Callable[..., Any]) -> frozenset[str] | None:
    """The keyword arguments that a sublayer's signature names besides what it reads; None: it takes any."""
    while hasattr(sublayer, "_orig_mod"):  # a compiled module takes what the module does
        sublayer = sublayer._orig_mod
    if isinstance(sublayer, Routed):
        return sublayer.takes
    try:
        signature = inspect.signature(sublayer.forward if isinstance(sublayer, nn.Module) else sublayer)
    except ValueError:  # a function in C that does not tell
        return frozenset()
    parameters = list(signature.parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def refuse_unknown(context: Mapping[str, Any], *takes: frozenset[str] | None) -> None:
    """TypeError for a keyword that no sublayer takes."""
    if context and None not in takes:
        known: set[str] = set().union(*(names for names in takes if names is not None))
        for name in context:
            if name not in known:
                raise TypeError(
                    f"no sublayer takes the keyword argument {name!r}, expected "
                    f"{', '.join(map(repr, sorted(known))) or 'none'}: name it in the signature of the sublayer it is for."
                )


def probability(name: str, value: Any) -> float:
    """The value, if it is one."""
    if not (is_number(value) and 0.0 <= value <= 1.0):
        raise ValueError(f"{name} is {value!r}, expected a probability: a number from 0 to 1.")
    return float(value)
