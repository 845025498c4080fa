"""One sublayer with its residual connection, its norms and its factors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, NoReturn, overload

import torch
from torch import Tensor, nn

from addnorm._util.arguments import check_choice, check_dtype, check_int, check_probability, is_number
from addnorm._util.norms import KINDS
from addnorm.nn.executor import (
    PendingWrite,
    Site,
    StreamState,
    add,
    add_and_normalize,
    keep_write,
    normalize,
    read_stream,
    with_seed,
    without_views,
)
from addnorm.nn.norm import LayerNorm, NormKind, RMSNorm
from addnorm.wirings.spec import Factor, Learned, Place, Row, Wiring, as_wiring

__all__ = ["NormFactory", "SublayerConnection", "check_kwargs", "check_reads", "is_distributed"]

FIRST = Place(0, 0, 1, 1)
NO_OPTIONS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class NormFactory:
    """The settings of a stack's norms; eps None and bias None mean torch's default for the kind of norm."""

    d_model: int
    kind: NormKind
    eps: float | None
    affine: bool
    bias: bool | None
    device: Any
    dtype: Any

    def __post_init__(self) -> None:
        check_int("d_model", self.d_model, 1)
        check_choice("norm", self.kind, KINDS)
        if self.eps is not None and not (is_number(self.eps) and self.eps >= 0):
            raise ValueError(f"eps is {self.eps!r}, expected None or a number that is not negative.")
        if self.kind == "rms" and self.bias:
            raise ValueError("bias is True with norm 'rms', expected None or False: RMSNorm has none.")

    def make(self, present: bool) -> LayerNorm | RMSNorm | None:
        """Return a norm, or None if there is none at this place."""
        if not present:
            return None
        if self.kind == "rms":
            return RMSNorm(self.d_model, self.eps, self.affine, device=self.device, dtype=self.dtype)
        eps, bias = 1e-5 if self.eps is None else self.eps, self.bias is not False
        return LayerNorm(self.d_model, eps, self.affine, bias, device=self.device, dtype=self.dtype)


class SublayerConnection(nn.Module):
    r"""Residual connection and norms around one sublayer.

        x' = N_out(a * x + b * dropout(N_branch(f(c * N_in(x)))))

    The wiring's `Row` states which norms and factors there are. Use a `ResidualStack` for several sublayers: it also fuses the
    add of each with the norm of the next.

    Args:
        sublayer: f, a module or any callable, from `(*, d_model)` to the same shape. Of a call's keyword arguments it receives
            those that its signature names.
        d_model: the width of the stream.
        wiring: a `Wiring`, a `Row`, or the name of a wiring without required options.
        place: the position in a stack, for wirings that depend on it.
        norm: "layer" or "rms".
        eps: epsilon of the norms; None means 1e-5 for LayerNorm and the machine epsilon for RMSNorm, as in torch.
        elementwise_affine: whether the norms have weights.
        bias: whether the norms have biases; None means True for LayerNorm and False for RMSNorm.
        dropout: dropout probability of the sublayer's output.
        stochastic_depth: the probability p that a sample's branch is dropped in training; the others are divided by 1 - p.
        residual_dtype: dtype of the stream; None means that of x.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        norm_in, norm_branch, norm_out: `LayerNorm`, `RMSNorm` or None. They are computed in one call with the add. A norm that
            has hooks, is compiled, or is replaced by another module, is called as a module after the add.
        a, b, c: a float, or a parameter if the factor is learned, a scalar or `(d_model,)`.

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
        place: Place = FIRST,
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
        if not callable(sublayer) or isinstance(sublayer, type):
            raise TypeError(
                f"sublayer is {sublayer!r}, expected a module or another callable from (*, d_model) to (*, d_model)."
            )
        wiring = as_wiring(wiring)
        if not wiring.has_rows:
            raise ValueError(
                f"wiring is {wiring.name!r}, expected one of rows: the sublayers of {wiring.name} have stages, several "
                "streams or computed coefficients; use ResidualStack."
            )
        self.row = wiring.row(*place)
        self.shares_state = bool(self.row.shares)  # with the sublayer before
        self.keeps_state = False  # for the next sublayer, which shares the state
        self.place = place
        self.d_model = d_model
        self.norm = norm
        self.dropout = check_probability("dropout", dropout)
        self.stochastic_depth = check_probability("stochastic_depth", stochastic_depth)
        self.residual_dtype = check_dtype("residual_dtype", residual_dtype)
        self.sublayer = sublayer
        self._accepted: tuple[Any, frozenset[str] | None] | None = None
        norms = NormFactory(d_model, norm, eps, elementwise_affine, bias, device, dtype)

        def factor(value: Factor) -> nn.Parameter | float:
            if not isinstance(value, Learned):
                return value
            return nn.Parameter(torch.empty((d_model,) if value.per_feature else (), device=device, dtype=dtype))

        for name in ("norm_in", "norm_branch", "norm_out"):  # None is registered too: the table is read
            self.register_module(name, norms.make(getattr(self.row, name)))
        self.a, self.b, self.c = (factor(value) for value in (self.row.a, self.row.b, self.row.c))
        self.reset_parameters()

    reads = 1  # inputs of the sublayer

    @property
    def accepted_kwargs(self) -> frozenset[str] | None:
        """The keyword arguments that the sublayer receives; None means all."""
        sublayer = self.sublayer
        if self._accepted is None or self._accepted[0] is not sublayer:
            self._accepted = sublayer, accepted_kwargs(sublayer, self.reads)
        return self._accepted[1]

    def reset_parameters(self) -> None:
        """Reset norms to ones and zeros and learned factors to their initial values; the sublayer does not change."""
        norms: tuple[Any, ...] = (self.norm_in, self.norm_branch, self.norm_out)
        for module in norms:
            if module is not None:
                module.reset_parameters()
        for name in ("a", "b", "c"):
            value, factor = getattr(self, name), getattr(self.row, name)
            if isinstance(factor, Learned):
                nn.init.constant_(value, factor.init)

    def options(self, x: Tensor) -> Mapping[str, Any]:
        """Return the coefficients of this sublayer's add as options of `addnorm.add_residual`; this draws the random numbers."""
        a, b, dtype = self.a, self.b, self.residual_dtype
        draws = self.training and (self.dropout or self.stochastic_depth)
        if a.__class__ is float and b.__class__ is float and a == b == 1.0 and dtype is None and not draws:
            return NO_OPTIONS
        options: dict[str, Any] = {}
        for name, factor in (("residual_scale", a), ("layer_scale", b)):
            if isinstance(factor, Tensor):
                # The next layer uses it, when a sharded module may have freed the memory of its parameters.
                options[name] = factor.clone() if is_distributed() else factor
            elif factor != 1.0:
                options[name] = factor
        if dtype is not None:
            options["residual_dtype"] = dtype
        if self.training and self.dropout:
            options["dropout_p"] = self.dropout
        if self.training and self.stochastic_depth:
            options["row_scale"] = self._row_scale(x)
        return options

    def _row_scale(self, x: Tensor) -> Tensor:
        """Return 0 for the samples (first dimension of x) whose branch is dropped, 1 / (1 - p) for the others."""
        keep = 1.0 - self.stochastic_depth
        shape = (x.shape[0], *(1,) * (x.dim() - 2)) if x.dim() > 1 else ()
        dtype = torch.promote_types(x.dtype, torch.float32)
        mask = torch.empty(shape, device=x.device, dtype=dtype).bernoulli_(keep)
        return mask / keep if keep else mask

    @overload
    def forward(self, x: Tensor, **context: Any) -> Tensor: ...

    @overload
    def forward(self, x: StreamState, **context: Any) -> StreamState: ...

    def forward(self, x: Tensor | StreamState, **context: Any) -> Tensor | StreamState:
        """Return x', `(*, d_model)`; the keyword arguments are the sublayer's.

        In a stack, x is the `StreamState` of the sublayer before, and so is the result: its write is added by the next reader.
        """
        if isinstance(x, StreamState):
            state = self._advance(x, context)
            return without_views(state) if self._forward_hooks else state
        check_tensor(x)
        check_kwargs(context, self.accepted_kwargs)
        dtype = None if self.residual_dtype is None else x.dtype
        state = self._advance(StreamState(to_dtype(x, self.residual_dtype), dtype=dtype), context)
        total = state.x if state.pending is None else add(state.x, state.pending)
        return to_dtype(total, dtype)

    def _advance(self, state: StreamState, context: Mapping[str, Any]) -> StreamState:
        """Return the state after this sublayer."""
        if self.shares_state:
            x, read = self._read_shared(state)
        else:
            x, read = read_stream(state, self._modules["norm_in"], self.norm, self.c)
        write = PendingWrite(self._branch(read, context), self.options(x))
        if self._modules["norm_out"] is None and state.sites is None and not self.keeps_state:
            return StreamState(x, write, None, None, None, state.dtype)
        return self._write(state, x, read, write)

    def _read_shared(self, state: StreamState) -> tuple[Tensor, Tensor]:
        """Return the stream with the write of the sublayer before, and the read of the state without it."""
        base, read = state.base, state.read
        if base is None or read is None:
            raise RuntimeError(
                f"the row {self.row!r} shares what the sublayer before it reads, and there is none: use ResidualStack."
            )
        if self.row.shares == "state":
            read = read_stream(StreamState(base, dtype=state.dtype), self._modules["norm_in"], self.norm, self.c)[1]
        return add(state.x, state.pending), read

    def _write(self, state: StreamState, x: Tensor, read: Tensor, write: PendingWrite) -> StreamState:
        """Return the state after a write, which is still pending if no norm of this connection follows."""
        sites, norm_out = state.sites, self._modules["norm_out"]
        if sites is not None:
            write = PendingWrite(write.branch, with_seed(write.options, x))
            total = None if norm_out is None else add(x, write)
            site = Site(keep_write(x, write), self.a, 1.0, None, self.c, total, norm_out)
            sites = (*sites, site)
        pending: PendingWrite | None = write
        base, read_again = (None, None)
        if self.keeps_state:
            base, read_again = (state.base if self.row.shares else x), read
        if norm_out is not None:
            x, _ = add_and_normalize(x, *write, norm_out, self.norm, 1.0, self.residual_dtype, return_residual=False)
            pending = None
        return StreamState(x, pending, read_again, base, sites, state.dtype)

    def _branch(self, read: Tensor, context: Mapping[str, Any], others: Sequence[Tensor] = ()) -> Tensor:
        """Return N_branch(f(read)), in the shape of `read`; a sublayer with several inputs has others."""
        modules: Any = self._modules
        sublayer: Any = modules.get("sublayer")
        if sublayer is None:  # a callable that is no module
            sublayer = self.sublayer
        if context:
            accepted = self.accepted_kwargs
            context = {name: t for name, t in context.items() if accepted is None or name in accepted}
        if others and (names := getattr(sublayer, "read_names", ())):
            context, others = {**context, **dict(zip(names[1:], others, strict=True))}, ()
        branch: Tensor = sublayer(read, *others, **context)
        if branch.__class__ is not Tensor and not isinstance(branch, Tensor):
            refuse_output(self, branch, read)
        if branch.shape != read.shape:
            refuse_output(self, branch, read)
        norm = modules["norm_branch"]
        if norm is None:
            return branch
        check_output(self, branch, read)
        return normalize(branch, norm, self.norm)

    def extra_repr(self) -> str:
        """Return the equation and the options that differ from their defaults."""
        parts = [str(self.row)]
        parts += [f"dropout={self.dropout}"] if self.dropout else []
        parts += [f"stochastic_depth={self.stochastic_depth:g}"] if self.stochastic_depth else []
        return ", ".join(parts)


def is_distributed() -> bool:
    """Return whether there is a process group, without which no parameter is sharded."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def to_dtype(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return x in a dtype; None means its own."""
    return x if dtype is None else x.to(dtype)


def check_tensor(x: Any) -> None:
    """Check the stream's type."""
    if isinstance(x, tuple):  # a `StreamState` that torch has made plain, since it is no tensor
        raise TypeError(
            f"x is {type(x).__name__}, expected a tensor of shape (*, d_model), or a StreamState inside a stack: a reentrant "
            "checkpoint accepts tensors only; pass use_reentrant=False, or put it around the whole stack."
        )
    if not isinstance(x, Tensor):
        raise TypeError(f"x is {type(x).__name__}, expected a tensor of shape (*, d_model).")


def accepted_kwargs(sublayer: Callable[..., Any], reads: int = 1) -> frozenset[str] | None:
    """Return the keyword arguments that a sublayer's signature names besides its inputs; None if it accepts any."""
    while hasattr(sublayer, "_orig_mod"):  # a compiled module accepts what its module does
        sublayer = sublayer._orig_mod
    if hasattr(sublayer, "accepted_kwargs"):
        return sublayer.accepted_kwargs  # type: ignore[no-any-return]  # a stack's or a connection's
    try:
        signature = inspect.signature(sublayer.forward if isinstance(sublayer, nn.Module) else sublayer)
    except ValueError:  # a C function without signature
        return frozenset()
    parameters = list(signature.parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    names = getattr(sublayer, "read_names", ()) if reads > 1 else ()  # inputs that are passed by name
    parameters = [p for p in parameters if p.name not in names] if names else parameters[reads:]
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def check_reads(sublayer: Callable[..., Any], reads: int) -> None:
    """Check that a sublayer takes that many inputs, by position or by the names in its `read_names`."""
    number: float = len(getattr(sublayer, "read_names", ()))
    if not number:
        try:
            signature = inspect.signature(sublayer.forward if isinstance(sublayer, nn.Module) else sublayer)
        except ValueError:  # a C function without signature
            return
        kinds = [p.kind for p in signature.parameters.values()]
        number = sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
        number = math.inf if Parameter.VAR_POSITIONAL in kinds else number
    if number < reads:
        raise TypeError(
            f"sublayer is {type(sublayer).__name__} with {number} positional arguments, expected {reads} inputs, as many as its "
            "stage has reads: as in forward(self, query, key, value)."
        )


def check_kwargs(context: Mapping[str, Any], accepted: frozenset[str] | None) -> None:
    """Check that a sublayer accepts every keyword argument."""
    if accepted is not None:
        for name in context:
            if name not in accepted:
                raise TypeError(
                    f"no sublayer takes the keyword argument {name!r}, expected "
                    f"{', '.join(map(repr, sorted(accepted))) or 'none'}: name it in the signature of the sublayer it is for."
                )


def format_path(connection: SublayerConnection) -> str:
    """Return the place of a sublayer in its stack, and its name."""
    place, name = connection.place, getattr(connection.sublayer, "__name__", type(connection.sublayer).__name__)
    return f"sublayers[{place.layer * place.sublayers_per_layer + place.sublayer}] ({name})"


def check_output(connection: SublayerConnection, output: Tensor, read: Tensor) -> None:
    """Check the dtype and the device of an output that no call of the operation checks as its branch."""
    if output.dtype is not read.dtype and not output.is_floating_point():
        raise TypeError(
            f"{format_path(connection)} returned dtype {output.dtype}, expected a real floating-point dtype: let the sublayer "
            "return output.float()."
        )
    if output.device != read.device:
        raise ValueError(
            f"{format_path(connection)} returned a tensor on {output.device}, expected {read.device}, the device of its input: "
            "move the sublayer there."
        )


def refuse_output(connection: SublayerConnection, output: Any, read: Tensor) -> NoReturn:
    """Raise an error for a sublayer whose output is not a tensor in the shape of its input."""
    path = format_path(connection)
    if isinstance(output, Tensor):
        raise ValueError(
            f"{path} returned shape {tuple(output.shape)}, expected {tuple(read.shape)}, the shape of its input: the output "
            "is added to the stream element by element; let the sublayer's last projection have the stream's width."
        )
    if isinstance(output, Sequence) and output and isinstance(output[0], Tensor):
        raise TypeError(
            f"{path} returned a {type(output).__name__} of {len(output)}, expected one tensor: wrap the sublayer so that it "
            "returns the tensor to add, as in lambda x, **kw: module(x, **kw)[0]."
        )
    raise TypeError(f"{path} returned {type(output).__name__}, expected a tensor of shape {tuple(read.shape)}.")
