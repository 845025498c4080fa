"""One sublayer with its residual connection, its norms and its coefficients, and the head of a stack of several streams.

R  = N_in(C P(X))            the sublayer's input
W  = N_branch(f(R))          SublayerConnection._branch
X' = N_out(A X + B W)        computed by the next connection in one call with its own R, or here if there is an N_out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, is_tensor, nn

from addnorm._util.arguments import check_dtype, check_probability
from addnorm._util.norms import Norm
from addnorm.nn.checks import (
    accepted_kwargs,
    check_kwargs,
    check_output,
    check_reads,
    check_tensor,
    list_accepted,
    refuse_output,
)
from addnorm.nn.norm import Device, Dtype, NormFactory
from addnorm.nn.state import (
    NO_OPTIONS,
    Options,
    PendingWrite,
    Site,
    StreamState,
    is_distributed,
    is_state,
    with_seed,
    without_views,
)
from addnorm.nn.step import Reading, Streams, add_and_norm, add_write, finish, mask_write, normalize, read
from addnorm.wirings.coefficients.base import keep_wide, widen_dtype
from addnorm.wirings.spec import FACTORS, Learned, Place, Row, Stage, Wiring, as_wiring
from addnorm.wirings.stage import Head

FIRST = Place(0, 0, 1, 1)
PARTS = ("coefficients", "norm_streams", "norm_in", "norm_branch", "norm_out", "norm_outs")
ASSIGNED = ("norm_streams", "norm_outs")  # attributes that a module gets after its learned entries


class _Reader(nn.Module):
    """Base of `SublayerConnection` and `StreamHead`: the parameters of a stage or head.

    Learned entries of a `Stage` or `Head` stay in float32 when the module is cast. The factors of a `Row` are cast.
    """

    stage: Any

    def _register_reads(self, reads: int, place: Place, norms: NormFactory) -> None:
        """Create the coefficients, parameters and norms of the stage's or head's reads."""
        stage, factory = self.stage, {"device": norms.device, "dtype": norms.dtype}
        computed = stage.coefficients
        self.coefficients = None if computed is None else computed.make(norms.d_model, stage.n, reads, place, **factory)
        self.entries, self.has_learned = stage.entries, bool(stage.learned)
        for name, entry in stage.learned.items():
            if hasattr(self, name) or name in ASSIGNED:
                raise ValueError(
                    f"name is {name!r} in {entry!r}, expected another, such as {name + '_factor'!r}: the module of the sublayer "
                    "has an attribute of that name."
                )
            self._register_factor(name, entry, norms, widen_dtype(norms.dtype))
        self.norm_streams = norms.make_each(stage.norm_streams)

    def _register_factor(self, name: str, entry: Learned, norms: NormFactory, dtype: torch.dtype | None) -> None:
        shape = (norms.d_model,) if entry.per_feature else ()
        value = torch.full(shape, entry.init, device=norms.device, dtype=dtype)
        self.register_parameter(name, nn.Parameter(value))

    def reset_parameters(self) -> None:
        """Set norms, factors and coefficients to their initial values. The sublayer's parameters do not change."""
        for name, entry in self.stage.learned.items():
            nn.init.constant_(getattr(self, name), entry.init)
        for name in PARTS:
            part: Any = self._modules.get(name)
            modules: list[Any] = [*part.children()] if isinstance(part, nn.ModuleDict | nn.ModuleList) else [part]
            for module in modules:
                if module is not None:
                    module.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if isinstance(self.stage, Row):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        for child in self.children() if recurse else ():
            child._apply(fn)
        return super()._apply(keep_wide(fn), False)  # type: ignore[no-untyped-call]


class StreamHead(_Reader):
    """Last read of a stack with n streams, N_final(C P(X)). The norm N_final is a module of the stack."""

    def __init__(self, head: Head, place: Place, norms: NormFactory) -> None:
        super().__init__()
        self.stage = head
        self.norm = norms.norm
        self._register_reads(1, place, norms)

    def forward(self, state: StreamState, final_norm: Any) -> tuple[Streams, Tensor]:
        """Return the streams after the last write, and the output."""
        reading = read(self, self.stage, state, (final_norm,))
        return reading.streams, reading.reads[0]

    def extra_repr(self) -> str:
        """Return the `Head` as text."""
        return repr(self.stage)


class SublayerConnection(_Reader):
    r"""Residual connection and norms around one sublayer.

        x' = N_out(a * x + b * dropout(N_branch(f(c * N_in(x)))))

    The wiring's `Row` states which norms and factors there are; a `Stage` also has several streams or computed coefficients. Use
    a `ResidualStack` for several sublayers: it also fuses the add of each with the norm of the next.

    Args:
        sublayer: f, a module or any callable, from `(*, d_model)` to the same shape. It receives the keyword arguments of a call
            that its signature names.
        d_model: the width of the stream.
        wiring: a `Row`, a `Stage`, a `Wiring` of `Row`s, or the name of such a wiring without required options.
        place: the position in a stack, for wirings that depend on it.
        norm: "layer" or "rms".
        eps: epsilon of the norms; None means 1e-5 for LayerNorm and the machine epsilon for RMSNorm, as in torch.
        elementwise_affine: whether the norms have weights.
        bias: whether the norms have biases; None means True for LayerNorm and False for RMSNorm.
        dropout: dropout probability of the sublayer's output.
        stochastic_depth: the probability p that a sample's branch is dropped in training. Kept branches are divided by 1 - p.
        residual_dtype: dtype of the stream; None means the dtype of x.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        norm_in, norm_branch, norm_out: `LayerNorm`, `RMSNorm` or None. They are computed in one call with the add. A norm that
            has hooks, is compiled, or is replaced by another module, is called as a module after the add.
        a, b, c: the factors: floats, or parameters if they are learned, of shape `()` or `(d_model,)`.
        stage: the `Row`, or the `Stage` in a stack of several streams. With a `Stage`, `coefficients` is the module that computes
            the coefficients, `norm_in` may be an `nn.ModuleList` with a norm for each read, and `norm_streams` and `norm_outs`
            have the norms of the streams by the stream's number.

    The constructor has many parameters, since each option is a parameter, as in torch.nn.

    Example:
        >>> feed_forward = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> connection = addnorm.SublayerConnection(feed_forward, 8, "pre_ln")
        >>> x = torch.randn(2, 5, 8)
        >>> torch.testing.assert_close(connection(x), x + feed_forward(connection.norm_in(x)))
    """

    a: Any
    b: Any
    c: Any

    def __init__(
        self,
        sublayer: Callable[..., Tensor],
        d_model: int,
        wiring: Wiring | Stage | str = "pre_ln",
        *,
        place: Place = FIRST,
        norm: Norm = "layer",
        eps: float | None = None,
        elementwise_affine: bool = True,
        bias: bool | None = None,
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        residual_dtype: Dtype = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        if not callable(sublayer) or isinstance(sublayer, type):
            raise TypeError(
                f"sublayer is {sublayer!r}, expected a module or another callable from (*, d_model) to (*, d_model)."
            )
        if not isinstance(wiring, Stage):
            wiring = as_wiring(wiring)
            if not wiring.has_rows:
                raise ValueError(
                    f"wiring is {wiring.name!r}, expected one of rows: the sublayers of {wiring.name} have stages, several "
                    "streams or computed coefficients; use ResidualStack."
                )
            wiring = wiring.row(*place)
        self.stage = stage = wiring
        self.is_row = isinstance(stage, Row)
        self.reads = stage.reads  # inputs of the sublayer
        self.shares_state = bool(stage.shares)  # with the sublayer before
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
        if stage.reads > 1:
            check_reads(sublayer, stage.reads)
        norms_in = norms.make(stage.norm_in)
        if stage.norm_in and stage.reads > 1:
            norms_in = nn.ModuleList(norms.make() for _ in range(stage.reads))
        self.register_module("norm_in", norms_in)  # None is registered too: `_modules` is read directly
        self.register_module("norm_branch", norms.make(stage.norm_branch))
        self.register_module("norm_out", norms.make(self.is_row and stage.norms_out[0]))
        for name in FACTORS:
            value = getattr(stage, name, 1.0)
            if isinstance(value, Learned):  # a parameter in the dtype of the norms
                self._register_factor(name, value, norms, norms.dtype)
            else:
                setattr(self, name, value)
        if not self.is_row:
            self._register_reads(stage.reads, place, norms)
            self.norm_outs = norms.make_each(stage.norms_out)

    @property
    def accepted_kwargs(self) -> frozenset[str] | None:
        """The keyword arguments that the sublayer accepts. None means any keyword argument."""
        sublayer = self.sublayer
        if self._accepted is None or self._accepted[0] is not sublayer:
            self._accepted = sublayer, accepted_kwargs(sublayer, self.reads)
        return self._accepted[1]

    def adds_plainly(self) -> bool:
        """Return whether the add of a `Row` is x + branch: no factor, dropout, stochastic depth or other dtype of the stream."""
        a, b = self.a, self.b
        return (
            a.__class__ is float
            and b.__class__ is float
            and bool(a == b == 1.0)
            and self.residual_dtype is None
            and not (self.training and (self.dropout or self.stochastic_depth))
        )

    def options(self, x: Tensor) -> Options:
        """Return the factors, dropout and dtype of this sublayer's add as options of `addnorm.add_residual`.

        The random numbers of stochastic depth are drawn here, those of dropout in the add.
        """
        if self.adds_plainly():
            return NO_OPTIONS
        a, b, dtype = self.a, self.b, self.residual_dtype
        options: dict[str, Any] = {}
        for name, factor in (("residual_scale", a), ("layer_scale", b)):
            if isinstance(factor, Tensor):
                # The next layer uses the factor. By then a sharded module may have freed the memory of its parameters.
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
        """Return x', `(*, d_model)`. The keyword arguments are passed to the sublayer.

        In a stack, x and the result are `StreamState`s: the next connection adds the write of this sublayer to the stream.
        """
        if is_state(x):
            state = self._advance(x, context)
            return without_views(state) if self._forward_hooks else state
        return call_with_tensor("x", "sublayer", x, context, [self], self._advance)

    def _advance(self, state: StreamState, context: Mapping[str, Any]) -> StreamState:
        """Return the state after this sublayer. Its write is still pending unless this connection has an N_out."""
        if self.is_row:
            norm_in = self._modules["norm_in"]
            if self.shares_state:
                x, own = self._read_shared(state, norm_in)
            else:
                branch, options = (None, NO_OPTIONS) if state.pending is None else state.pending[:2]
                x, own = add_and_norm(state.x, branch, norm_in, self.norm, self.c, state.dtype, options)
            write = PendingWrite(self._branch(own, context), self.options(x))
            if state.sites is None and not self.keeps_state:
                norm_out = self._modules["norm_out"]
                if norm_out is None:
                    return StreamState(x, write, None, None, None, state.dtype)
                _, x = add_and_norm(
                    x, write.branch, norm_out, self.norm, 1.0, self.residual_dtype, write.options, return_stream=False
                )
                return StreamState(x, None, None, None, None, state.dtype)
            return self._write(state, Reading(x, (own,), self.c), write)
        norm: Any = self._modules["norm_in"]
        norms = tuple(norm) if isinstance(norm, nn.ModuleList) else (norm,) * self.reads
        reading = read(self, self.stage, state, norms)
        branch = self._branch(reading.reads[0], context, reading.reads[1:])
        check_output(self, branch, reading.reads[0])
        options = self.options(reading.reads[0])
        if self.stage.n_out > 1:
            options = with_seed(options, reading.reads[0])
        return self._write(state, reading, PendingWrite(branch, options, *reading.write))

    def _read_shared(self, state: StreamState, norm_in: Any) -> tuple[Tensor, Tensor]:
        """Return the stream with the write of the sublayer before, and this sublayer's input, computed without that write."""
        base, own = state.base, state.read
        if base is None or own is None:
            raise RuntimeError(
                f"the row {self.stage!r} shares what the sublayer before it reads, and there is none: use ResidualStack."
            )
        if self.stage.shares == "state":
            own = normalize(base, norm_in, self.norm, self.c, state.dtype)
        return finish(state), own

    def _write(self, state: StreamState, reading: Reading, write: PendingWrite) -> StreamState:
        """Return the state after `write`. The write is still pending unless this connection has an N_out."""
        streams, sites, norms = reading.streams, state.sites, self._list_norms_out()
        if sites is not None:
            write = write._replace(options=with_seed(write.options, reading.reads[0]))
            total = add_write(streams, write, (), self.norm) if norms else None
            coefficients = (write.mix, write.inject, write.bias)
            if self.is_row:
                coefficients, total = (((self.a,),), (1.0,), None), None if total is None else (total,)
            sites = (*sites, Site(mask_write(write), *coefficients, reading.collapse, total, norms or None))
        base = own = None
        if self.keeps_state:
            base, own = (state.base if self.stage.shares else streams), reading.reads[0]
        if norms:
            streams = add_write(streams, write, norms, self.norm)
        return StreamState(streams, None if norms else write, own, base, sites, state.dtype, reading.carried)

    def _list_norms_out(self) -> tuple[Any, ...]:
        """Return N_out of each new stream, None for a stream without a norm, or an empty tuple if no stream has a norm."""
        if self.is_row:
            norm = self._modules["norm_out"]
            return () if norm is None else (norm,)
        norms: Any = self._modules["norm_outs"]
        return tuple(norms[str(k)] if flag else None for k, flag in enumerate(self.stage.norms_out)) if norms else ()

    def _branch(self, own: Tensor, context: Mapping[str, Any], others: Sequence[Tensor] = ()) -> Tensor:
        """Return N_branch(f(own, *others)), in the shape of `own`. A sublayer with several reads receives `others` too."""
        modules: Any = self._modules
        sublayer: Any = modules.get("sublayer")
        if sublayer is None:  # a callable that is no module
            sublayer = self.sublayer
        if context:
            accepted = self.accepted_kwargs
            context = {name: t for name, t in context.items() if accepted is None or name in accepted}
        if others and (names := getattr(sublayer, "read_names", ())):
            context, others = {**context, **dict(zip(names[1:], others, strict=True))}, ()
        branch: Tensor = sublayer(own, *others, **context)
        if not is_tensor(branch):
            refuse_output(self, branch, own)
        if branch.shape != own.shape:
            refuse_output(self, branch, own)
        norm = modules["norm_branch"]
        if norm is None:
            return branch
        check_output(self, branch, own)
        return normalize(branch, norm, self.norm)

    def extra_repr(self) -> str:
        """Return the equation and the options that differ from their defaults."""
        parts = [str(self.stage)]
        parts += [f"dropout={self.dropout}"] if self.dropout and self.is_row else []
        parts += [f"stochastic_depth={self.stochastic_depth:g}"] if self.stochastic_depth and self.is_row else []
        return ", ".join(parts)


def call_with_tensor(
    name: str, kind: str, x: Any, context: Mapping[str, Any], connections: Sequence[SublayerConnection],
    advance: Callable[[StreamState, Mapping[str, Any]], StreamState],
) -> Tensor:  # fmt: skip
    """Run `connections` by `advance` on a tensor, outside a stack, and return the stream after the last write as a tensor."""
    check_tensor(x)
    ends = [connection.stage for connection in (*connections[:1], *connections[-1:])]
    n = max(ends[0].n, ends[-1].n_out) if ends else 1
    if n > 1 or any(stage.is_stacked for stage in ends):
        raise ValueError(
            f"{name} is a tensor and the {kind} has {n} streams, expected a StreamState: a tensor has one of them only; call "
            "the stack."
        )
    check_kwargs(context, list_accepted(connections))
    residual_dtype = connections[0].residual_dtype if connections else None
    stream = to_dtype(x, residual_dtype)
    is_row = not connections or connections[0].is_row
    dtype = None if residual_dtype is None else x.dtype
    streams = finish(advance(StreamState(stream if is_row else (stream,), dtype=dtype), context))
    return to_dtype(streams if is_row else streams[0], dtype)


def to_dtype(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return `x` in `dtype`, or `x` itself if `dtype` is None."""
    return x if dtype is None else x.to(dtype)
