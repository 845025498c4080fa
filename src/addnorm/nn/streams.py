"""Sublayers among n residual streams, and the head that makes them one again.

R  = N_in(C P(X))            the read of a sublayer
W  = N_branch(f(R))          SublayerConnection._branch
X' = N_out(A X + B W)        done by the next reader, in one call with its own read (`stream_step.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.nn.executor import Site, StreamState, with_seed
from addnorm.nn.residual import (
    FIRST,
    NormFactory,
    SublayerConnection,
    check_kwargs,
    check_output,
    check_reads,
    check_tensor,
    to_dtype,
)
from addnorm.nn.stream_step import Streams, StreamWrite, add_write, finish, mask_write, step_streams
from addnorm.wirings.coefficients.base import keep_wide, widen_dtype
from addnorm.wirings.factors import Place
from addnorm.wirings.stage import Head, Row, Stage

__all__ = ["StreamHead", "StreamsConnection"]

ASSIGNED = ("norm_streams", "norm_outs", "has_norm_out")  # attributes that a module gets after its learned entries


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
        streams, reads, _, _ = step_streams(self, self.head, state._replace(dtype=dtype), (final_norm,))
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
        streams, reads, used, (mix, inject, bias, carried) = step_streams(self, stage, state, norms)
        branch = self._branch(reads[0], context, reads[1:])
        check_output(self, branch, reads[0])
        write = StreamWrite(branch, mix, inject, bias, self.options(reads[0]))
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
                Site(mask_write(write), mix, inject, bias, used, total, tuple(norms_out) if has_norm_out else None),
            )
        if has_norm_out:
            streams = add_write(streams, write, norms_out, self.norm)
        return StreamState(streams, None if has_norm_out else write, None, None, sites, state.dtype, carried)

    def extra_repr(self) -> str:
        """Return the stage's equations."""
        return str(self.stage)


def _register_reads(module: Any, spec: Stage | Head, reads: int, place: Place, norms: NormFactory) -> None:
    """Give a module the parameters and norms that its reads need."""
    factory = {"device": norms.device, "dtype": norms.dtype}
    computed = spec.coefficients
    module.coefficients = None if computed is None else computed.make(norms.d_model, spec.n, reads, place, **factory)
    module.entries, module.has_learned = spec.entries, bool(spec.learned)
    for name, entry in spec.learned.items():
        if hasattr(module, name) or name in ASSIGNED:
            raise ValueError(
                f"name is {name!r} in {entry!r}, expected another, such as {name + '_factor'!r}: the module of the sublayer "
                "has an attribute of that name."
            )
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
