"""Sublayers among n residual streams: the read, the write, and the coefficients of each.

    R  = N_in(C P(X))            read_streams
    W  = N_branch(f(R))          SublayerConnection._branch
    X' = N_out(A X + B W)        add_write

The streams are a tuple of n tensors `(*, d_model)`, where A, B and C are mostly constants, or one tensor `(*, n, d_model)`,
where a module computes them for each token. Sums are in float32 at least and rounded once, to the dtype of the streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from addnorm import functional
from addnorm.nn.executor import Options, Site, StreamState, add_and_normalize, normalize, with_seed
from addnorm.nn.norm import NormKind
from addnorm.nn.residual import (
    FIRST,
    NormFactory,
    SublayerConnection,
    check_kwargs,
    check_reads,
    check_tensor,
    is_distributed,
    to_dtype,
)
from addnorm.wirings.coefficients.base import keep_wide, widen, widen_dtype
from addnorm.wirings.row import Place, Row
from addnorm.wirings.stage import Head, Stage, identity, name_entries, unit

__all__ = ["StreamHead", "StreamWrite", "StreamsConnection", "add_write", "begin", "collapse", "finish", "read_streams"]

Streams = Any  # a tensor (*, n, d_model), or a tuple of n tensors (*, d_model)


class StreamWrite(NamedTuple):
    """A write that is not added to the streams yet, with its coefficients.

    Attributes:
        branch: N_branch(f(R)), `(*, d_model)`.
        mix, inject, bias: A, B and the bias, as in `Coefficients`.
        options: dropout, stochastic depth and the dtype of the streams, as keyword arguments of `addnorm.add_residual`.
    """

    branch: Tensor
    mix: Any
    inject: Any
    bias: Any
    options: Options


class _Reader(nn.Module):
    """Base of modules whose own parameters, the learned entries of a stage or head, stay in float32."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for child in self.children() if recurse else ():
            child._apply(fn)
        return super()._apply(keep_wide(fn), False)  # type: ignore[no-untyped-call]


class StreamHead(_Reader):
    """The read of n streams after the last sublayer, N_final(C P(X)); the stack has the final norm."""

    def __init__(self, head: Head, place: Place, norms: NormFactory) -> None:
        super().__init__()
        self.head, self.norm = head, norms.kind
        _register_reads(self, head, 1, place, norms)

    def reset_parameters(self) -> None:
        """Set coefficients and norms to their initial values."""
        _reset_reads(self, self.head)

    def forward(self, state: StreamState, final_norm: Any, *, dtype: torch.dtype | None) -> tuple[Streams, Tensor]:
        """Return the streams after the last write, and the output."""
        streams = finish(state)
        reads, _, _ = read_streams(self, self.head, streams, state.collapse, (final_norm,), dtype)
        return streams, reads[0]

    def extra_repr(self) -> str:
        """Return the head's data."""
        return repr(self.head)


class StreamsConnection(_Reader, SublayerConnection):
    """A sublayer among n streams: R = N_in(C P(X)), W = N_branch(f(R)), X' = N_out(A X + B W), as its `Stage` states.

    Args:
        sublayer: f, from its reads, each `(*, d_model)`, to one tensor of that shape.
        d_model: width of the streams.
        stage: the matrices and norms.
        place, norm, dropout, stochastic_depth, residual_dtype, eps and so on: as in `SublayerConnection`.

    Attributes:
        stage: the `Stage`.
        coefficients: the module that computes the coefficients, or None.
        norm_in: the norm of the read, or an `nn.ModuleList` with one for each read.
        norm_streams, norm_outs: an `nn.ModuleDict` with the norms of the streams that have one, by the stream's number from 0.
    """

    def __init__(
        self, sublayer: Callable[..., Tensor], d_model: int, stage: Stage, *, place: Place = FIRST, dropout: float = 0.0,
        stochastic_depth: float = 0.0, residual_dtype: torch.dtype | None = None, norms: NormFactory,
    ) -> None:  # fmt: skip
        super().__init__(
            sublayer, d_model, Row(norm_branch=stage.norm_branch), place=place, norm=norms.kind, eps=norms.eps,
            elementwise_affine=norms.affine, bias=norms.bias, dropout=dropout, stochastic_depth=stochastic_depth,
            residual_dtype=residual_dtype, device=norms.device, dtype=norms.dtype,
        )  # fmt: skip
        self.stage, self.reads = stage, stage.reads
        if stage.reads > 1:
            check_reads(sublayer, stage.reads)
        _register_reads(self, stage, stage.reads, place, norms)
        if stage.norm_in:
            made: list[Any] = [norms.make(True) for _ in range(stage.reads)]
            self.norm_in = made[0] if stage.reads == 1 else nn.ModuleList(made)
        self.norm_outs = _make_norms(stage.norm_out, norms)
        self.has_norm_out = any(stage.norm_out)

    def reset_parameters(self) -> None:
        """Set norms, factors and coefficients to their initial values; the sublayer does not change."""
        if "stage" not in self.__dict__:
            return  # the base class's constructor calls this before there are any
        _reset_reads(self, self.stage)
        norm_in: Any = self._modules["norm_in"]
        norms: tuple[Any, ...] = (norm_in, self._modules["norm_branch"], *self.norm_outs.values())
        for norm in norms:
            each: Any = norm if isinstance(norm, nn.ModuleList) else (norm,)
            for module in each:
                if module is not None:
                    module.reset_parameters()

    def forward(self, x: Any, **context: Any) -> Any:
        """Return the `StreamState` after this sublayer, with its write pending; or x' of a single stream, `(*, d_model)`."""
        if isinstance(x, StreamState):
            return super().forward(x, **context)
        check_tensor(x)
        check_kwargs(context, self.accepted_kwargs)
        stage = self.stage
        if stage.n > 1 or stage.n_out > 1 or stage.is_stacked:
            raise ValueError(
                f"x is a tensor and the sublayer has {max(stage.n, stage.n_out)} streams, expected a StreamState: a tensor has "
                "one of them only; call the stack."
            )
        stream = to_dtype(x, self.residual_dtype)
        state = self._advance(StreamState((stream,), dtype=None if stream is x else x.dtype), context)
        return to_dtype(finish(state)[0], state.dtype)

    def _advance(self, state: StreamState, context: Mapping[str, Any]) -> StreamState:
        """Return the state after this sublayer, with its write pending unless a norm follows it."""
        stage, norm_in = self.stage, self._modules["norm_in"]
        norms = tuple(norm_in) if isinstance(norm_in, nn.ModuleList) else (norm_in,) * self.reads
        streams = finish(state)  # A X + B W of the sublayer before
        reads, used, (mix, inject, bias, carried) = read_streams(
            self, stage, streams, state.collapse, norms, state.dtype
        )
        write = StreamWrite(self._branch(reads[0], context, reads[1:]), mix, inject, bias, self.options(reads[0]))
        sites = state.sites
        if len(stage.norm_out) > 1 or sites is not None:
            write = write._replace(options=with_seed(write.options, reads[0]))
        has_norm_out = self.has_norm_out
        norms_out = (
            [self.norm_outs[str(k)] if flag else None for k, flag in enumerate(stage.norm_out)] if has_norm_out else ()
        )
        if sites is not None:
            total = add_write(streams, write, (), self.norm) if has_norm_out else None
            sites = (
                *sites,
                Site(_masked(write), mix, inject, bias, used, total, tuple(norms_out) if has_norm_out else None),
            )
        if has_norm_out:
            streams = add_write(streams, write, norms_out, self.norm)
        return StreamState(streams, None if has_norm_out else write, None, None, sites, state.dtype, carried)

    def extra_repr(self) -> str:
        """Return the stage's equations."""
        return str(self.stage)


def begin(x: Tensor, embedding: Sequence[float], d_model: int, *, stacked: bool) -> Streams:
    """Return the streams at the start: x times each number."""
    if x.dim() == 0 or x.shape[-1] != d_model:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, expected (*, {d_model}), the streams' width: build the stack with that d_model."
        )
    if not x.is_floating_point():
        raise TypeError(f"x has dtype {x.dtype}, expected a real floating-point dtype: convert it with x.float().")
    if not stacked:
        return tuple(x if factor == 1.0 else x * factor for factor in embedding)
    if all(factor == 1.0 for factor in embedding):
        return x.unsqueeze(-2).expand(*x.shape[:-1], len(embedding), x.shape[-1])
    return torch.stack([x * factor for factor in embedding], -2)


def finish(state: StreamState) -> Streams:
    """Return the streams after the pending write."""
    return state.x if state.pending is None else add_write(state.x, state.pending, (), "layer")


def read_streams(
    module: Any,
    spec: Stage | Head,
    streams: Streams,
    carried: Any,
    norms: Sequence[Any],
    dtype: torch.dtype | None,
) -> tuple[tuple[Tensor, ...], Any, tuple[Any, Any, Any, Any]]:
    """Return the reads N_in(C P(X)), C, and what is left: A, B, the bias, and the C that the next stage reads with.

    Args:
        module: it has the parameters and norms of `spec`.
        spec: the constants, and what is computed.
        streams: X.
        carried: the C that the stage before computed.
        norms: N_in for each read, or None.
        dtype: dtype of the reads; None means that of the streams.
    """
    computed = module.coefficients
    used, mix, inject, bias = (None,) * 4 if computed is None else computed(streams)
    next_used = None
    if spec.delayed:
        first = unit(spec.n, 0) if carried is None else carried
        used, next_used = first, used
    if used is None:
        used = _resolve(module, module.entries["collapse"])
    if isinstance(spec, Stage):
        if inject is None:
            inject = _resolve(module, module.entries["inject"])[0]
        if mix is None and spec.mix is not None:
            mix = _resolve(module, module.entries["mix"])
    if is_distributed():
        mix, inject, bias = (_copy_parameters(value) for value in (mix, inject, bias))
    states = streams
    if any(spec.norm_streams):
        each = streams.unbind(-2) if isinstance(streams, Tensor) else streams
        own = [module.norm_streams[str(j)] if flag else None for j, flag in enumerate(spec.norm_streams)]
        states = tuple(
            x if norm is None else normalize(x, norm, module.norm) for x, norm in zip(each, own, strict=True)
        )
    out = dtype or (streams if isinstance(streams, Tensor) else streams[0]).dtype
    rows = used if isinstance(used, tuple) and isinstance(used[0], tuple) else (used,)
    reads = tuple(_read(row, states, norm, module.norm, out) for row, norm in zip(rows, norms, strict=True))
    return reads, used, (mix, inject, bias, next_used)


def _read(row: Any, streams: Streams, norm: Any, kind: NormKind, dtype: torch.dtype) -> Tensor:
    """Return N(sum over j of row_j X_j); the sum is not rounded before the norm."""
    total = collapse(row, streams)
    return total.to(dtype) if norm is None else normalize(total, norm, kind, 1.0, dtype)


def collapse(row: Any, streams: Streams) -> Tensor:
    """Return the sum over j of row_j X_j, in float32 at least unless it is one stream as it is."""
    if isinstance(row, Tensor):
        if not isinstance(streams, Tensor):
            streams = torch.stack(streams, -2)
        gates = row if row.dim() == streams.dim() else row.unsqueeze(-1)
        return (gates * widen(streams)).sum(-2)
    each = streams.unbind(-2) if isinstance(streams, Tensor) else streams
    terms = [(entry, x) for entry, x in zip(row, each, strict=True) if not _is(entry, 0.0)]
    if len(terms) == 1 and _is(terms[0][0], 1.0):
        read: Tensor = terms[0][1]
        return read
    return _sum_terms(terms)


def add_write(streams: Streams, write: StreamWrite, norms: Sequence[Any], kind: NormKind) -> Streams:
    """Return N_out(A X + B W): streams in the form of `streams`; `norms` has a norm or None for each, or is empty."""
    if isinstance(streams, Tensor):
        with _without_autocast(streams):
            return _add_stacked(streams, write)
    mix = identity(len(streams)) if write.mix is None else write.mix
    added = []
    for k, row in enumerate(mix):
        bias = None if write.bias is None else write.bias[k]
        norm = norms[k] if norms else None
        added.append(_add_row(row, write.inject[k], bias, streams, write, norm, kind))
    return tuple(added)


def _add_stacked(streams: Tensor, write: StreamWrite) -> Tensor:
    x, dtype = widen(streams), write.options.get("residual_dtype") or streams.dtype
    mixed = x if write.mix is None else torch.matmul(write.mix.to(x.dtype), x)
    if isinstance(write.inject, tuple):  # constants and learned factors
        entries = [torch.as_tensor(entry, dtype=x.dtype, device=x.device) for entry in write.inject]
        inject = torch.stack([entry.expand(x.shape[-1]) for entry in entries])
    else:
        inject = write.inject.unsqueeze(-1)
    return (mixed + inject * widen(_masked(write)).unsqueeze(-2)).to(dtype)


def _add_row(
    row: Sequence[Any], inject: Any, bias: Any, streams: Sequence[Tensor], write: StreamWrite, norm: Any, kind: NormKind
) -> Tensor:
    """Return one new stream, sum over j of row_j X_j + inject * W + bias, and its norm if there is one."""
    terms = [(entry, x) for entry, x in zip(row, streams, strict=True) if entry.__class__ is not float or entry != 0.0]
    writes, dtype = (
        inject.__class__ is not float or inject != 0.0,
        write.options.get("residual_dtype") or streams[0].dtype,
    )
    if writes and terms and bias is None and _is_scale(inject) and (len(terms) > 1 or _is_scale(terms[0][0])):
        factor, x = terms[0] if len(terms) == 1 else (1.0, _sum_terms(terms))
        options: dict[str, Any] = dict(write.options)
        if not _is(factor, 1.0):
            options["residual_scale"] = factor
        if not _is(inject, 1.0):
            options["layer_scale"] = inject
        if x.dtype != dtype:
            options["residual_dtype"] = dtype  # the sum of several streams is rounded here, once
        if norm is None:
            return functional.add_residual(x, write.branch, **options)
        out_dtype = options.get("residual_dtype")
        return add_and_normalize(x, write.branch, options, norm, kind, 1.0, out_dtype, return_residual=False)[0]
    if not writes and bias is None and len(terms) == 1 and _is(terms[0][0], 1.0):
        total = terms[0][1]
    else:
        total = _sum_terms([*terms, *[(inject, _masked(write))] * writes])
        total = (total if bias is None else total + bias).to(dtype)
    return total if norm is None else normalize(total, norm, kind, 1.0, dtype)


def _masked(write: StreamWrite) -> Tensor:
    """Return W after dropout and stochastic depth, in float32 at least where they act."""
    options = {name: value for name, value in write.options.items() if name != "residual_dtype"}
    if not options:
        return write.branch
    zeros = torch.zeros_like(write.branch, dtype=torch.promote_types(write.branch.dtype, torch.float32))
    return functional.add_residual(zeros, write.branch, **options)


def _sum_terms(terms: Sequence[tuple[Any, Tensor]]) -> Tensor:
    """Return the sum of entry * x in float32 at least."""
    total: Any = None
    for entry, x in terms:
        term = widen(x) if _is(entry, 1.0) else entry * widen(x)
        total = term if total is None else total + term
    return total  # type: ignore[no-any-return]  # there is a term


def _is(entry: Any, number: float) -> bool:
    return entry.__class__ is float and bool(entry == number)


def _is_scale(entry: Any) -> bool:
    """Return whether an entry is the same for all tokens."""
    return entry.__class__ is float or (isinstance(entry, Tensor) and entry.dim() <= 1)


def _resolve(module: Any, matrix: Any) -> Any:
    """Return the entries with names as the parameters of `module`."""
    if not module.has_learned:
        return matrix
    table = module._parameters
    return tuple(tuple(table[entry] if entry.__class__ is str else entry for entry in row) for row in matrix)


def _copy_parameters(value: Any) -> Any:
    """Return coefficients whose parameters are copies: the next layer uses them, when a sharded module may have freed them."""
    if isinstance(value, tuple):
        return tuple(_copy_parameters(entry) for entry in value)
    return value.clone() if isinstance(value, nn.Parameter) else value


def _register_reads(module: Any, spec: Stage | Head, reads: int, place: Place, norms: NormFactory) -> None:
    """Give a module the parameters and norms that its reads need."""
    factory = {"device": norms.device, "dtype": norms.dtype}
    computed = spec.coefficients
    module.coefficients = None if computed is None else computed.make(norms.d_model, spec.n, reads, place, **factory)
    module.entries, module.has_learned = name_entries(spec), bool(spec.learned)
    for name, entry in spec.learned.items():
        shape = (norms.d_model,) if entry.per_feature else ()
        value = torch.full(shape, entry.init, device=norms.device, dtype=widen_dtype(norms.dtype))
        module.register_parameter(name, nn.Parameter(value))
    module.norm_streams = _make_norms(spec.norm_streams, norms)


def _make_norms(flags: Sequence[bool], norms: NormFactory) -> nn.ModuleDict:
    return nn.ModuleDict({str(k): norms.make(True) for k, flag in enumerate(flags) if flag})  # type: ignore[misc]  # never None


def _reset_reads(module: Any, spec: Stage | Head) -> None:
    if module.coefficients is not None:
        module.coefficients.reset_parameters()
    for name, entry in spec.learned.items():
        nn.init.constant_(getattr(module, name), entry.init)
    for norm in module.norm_streams.values():
        norm.reset_parameters()


@contextmanager
def _without_autocast(streams: Tensor) -> Iterator[None]:
    """Compute in the dtypes of the operands."""
    device = streams.device.type
    if not torch.is_autocast_enabled(device):
        yield
        return
    with torch.autocast(device, enabled=False):
        yield
