"""Steps among n residual streams: the write, the coefficients and the read, in one call where the kernels compute them.

    X' = A X + B W               finish, add_write
    R  = N_in(C P(X'))           step_streams, read_streams

The streams are a tuple of n tensors `(*, d_model)`, where A, B and C are mostly constants, or one tensor `(*, n, d_model)`,
where a module computes them for each token. Sums are in float32 at least and rounded once, to the dtype of the streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from addnorm import functional
from addnorm.boundary import add_norm_streams
from addnorm.nn.executor import FUNCTIONS, Options, StreamState, add_and_normalize, is_plain, normalize
from addnorm.nn.norm import NormKind
from addnorm.nn.residual import is_distributed
from addnorm.nn.untouched import is_untouched, methods_of
from addnorm.ops import dtensor
from addnorm.wirings.coefficients import HyperConnection, IndependentConnection, ManifoldConnection, SigmoidRead
from addnorm.wirings.coefficients.base import CoefficientModule, widen, widen_dtype
from addnorm.wirings.stage import Head, Stage, identity, unit

__all__ = [
    "StreamWrite",
    "Streams",
    "add_write",
    "begin",
    "collapse",
    "finish",
    "mask_write",
    "read_streams",
    "step_streams",
]

# Modules whose coefficients `add_norm_streams` computes from their gates, or that do not depend on the streams.
GATED = methods_of(
    HyperConnection, IndependentConnection, ManifoldConnection, SigmoidRead,
    names=("compute", "gates", "is_constant"),
)  # fmt: skip
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


def begin(x: Tensor, embedding: Sequence[float], *, stacked: bool) -> Streams:
    """Return the streams at the start: x times each number."""
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


def step_streams(
    module: Any, spec: Stage | Head, state: StreamState, norms: Sequence[Any]
) -> tuple[Streams, tuple[Tensor, ...], Any, tuple[Any, Any, Any, Any]]:
    """Return the streams after the pending write, and what `read_streams` returns for them; in one call where that can be."""
    x, write, computed = state.x, state.pending, module.coefficients
    plan = _plan(module, spec, x, write, norms)
    if plan is None:
        streams = finish(state)
        return streams, *read_streams(module, spec, streams, state.collapse, norms, state.dtype)
    pending, gates, is_constant = plan
    norm = norms[0]
    dtype = state.dtype or x.dtype
    used, mix, inject, bias, carried = (None,) * 5
    if gates is None and computed is not None:
        if write is not None and not is_constant:  # the coefficients need the streams
            x, pending = add_norm_streams(x, **pending).streams, {}
        used, mix, inject, bias = computed(x)
    if spec.delayed:
        carried, used = used, unit(spec.n, 0) if state.collapse is None else state.collapse
    elif computed is None:
        used = module.entries["collapse"][0]
    if isinstance(used, tuple):
        used = dtensor.spread(x.new_tensor(used, dtype=widen_dtype(x.dtype)), x)
    step = add_norm_streams(
        x, **pending, collapse=used, gates=gates, out_dtype=dtype, **_norm_arguments(norm, module.norm, x)
    )
    if gates is not None:
        mix, inject = step.mix, step.inject
        if spec.delayed:
            carried = step.collapse
        else:
            used = step.collapse
    if isinstance(spec, Stage):
        mix, inject = _resolve_write(module, spec, mix, inject)
    if is_distributed():
        mix, inject, bias = (_copy_parameters(value) for value in (mix, inject, bias))
    read: Any = step.read
    return step.streams, (read,), used, (mix, inject, bias, carried)


def _plan(module: Any, spec: Stage | Head, x: Any, write: StreamWrite | None, norms: Sequence[Any]) -> Any:
    """Return the arguments of the write, the gates or None, and whether the coefficients are constant; or None.

    None means that `add_norm_streams` does not compute this step. Without gates the module is called for its coefficients.
    """
    computed = module.coefficients
    if not isinstance(x, Tensor) or len(norms) != 1 or any(spec.norm_streams) or spec.learned:
        return None
    norm = norms[0]
    if norm is not None and not (module.norm in FUNCTIONS and is_plain(norm, module.norm, x)):
        return None
    if computed is not None and (
        not isinstance(computed, CoefficientModule) or computed.appends or "collapse" not in computed.computes
    ):
        return None
    pending: dict[str, Any] = {}
    if write is not None:
        mix, inject = write.mix, write.inject
        if isinstance(mix, tuple) or write.bias is not None:
            return None
        if isinstance(inject, tuple):
            if any(isinstance(entry, Tensor) and entry.numel() != 1 for entry in inject):
                return None
            wide = widen_dtype(x.dtype)
            entries = [dtensor.spread(torch.as_tensor(entry, dtype=wide, device=x.device), x) for entry in inject]
            inject = torch.stack([entry.reshape(()) for entry in entries])
        dtype = write.options.get("residual_dtype") or x.dtype
        pending = {"branch": mask_write(write), "mix": mix, "inject": inject, "streams_dtype": dtype}
    if computed is None or not is_untouched(computed, GATED):
        return pending, None, False
    with _without_autocast(x):  # as in the module's own call
        return pending, computed.gates(), computed.is_constant


def _norm_arguments(norm: Any, kind: NormKind, x: Tensor) -> dict[str, Any]:
    """Return weight, bias, eps and kind of a norm as `add_norm_streams` takes them."""
    if norm is None:
        return {"norm": "none"}
    table, eps = norm._parameters, norm.eps
    if eps is None:
        eps = torch.finfo(widen_dtype(x.dtype)).eps
    return {"norm": kind, "weight": table["weight"], "bias": table.get("bias"), "eps": eps}


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
        mix, inject = _resolve_write(module, spec, mix, inject)
    if is_distributed():
        mix, inject, bias = (_copy_parameters(value) for value in (mix, inject, bias))
    states = streams
    if any(spec.norm_streams):
        each = streams.unbind(-2) if isinstance(streams, Tensor) else streams
        own = [module.norm_streams[str(j)] if flag else None for j, flag in enumerate(spec.norm_streams)]
        states = tuple(
            x if norm is None else normalize(x, norm, module.norm, 1.0, widen_dtype(x.dtype))
            for x, norm in zip(each, own, strict=True)
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
    return (mixed + inject * widen(mask_write(write)).unsqueeze(-2)).to(dtype)


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
        total = _sum_terms([*terms, *[(inject, mask_write(write))] * writes])
        total = (total if bias is None else total + bias).to(dtype)
    return total if norm is None else normalize(total, norm, kind, 1.0, dtype)


def mask_write(write: StreamWrite) -> Tensor:
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


def _resolve_write(module: Any, spec: Stage, mix: Any, inject: Any) -> tuple[Any, Any]:
    """Return A and B, where they are not computed the stage's own."""
    if inject is None:
        inject = _resolve(module, module.entries["inject"])[0]
    if mix is None and spec.mix is not None:
        mix = _resolve(module, module.entries["mix"])
    return mix, inject


def _resolve(module: Any, matrix: Any) -> Any:
    """Return the entries with names as the parameters of `module`."""
    if not module.has_learned:
        return matrix
    return tuple(tuple(getattr(module, entry) if entry.__class__ is str else entry for entry in row) for row in matrix)


def _copy_parameters(value: Any) -> Any:
    """Return coefficients whose parameters are copies: the next layer uses them, when a sharded module may have freed them."""
    if isinstance(value, tuple):
        return tuple(_copy_parameters(entry) for entry in value)
    return value.clone() if isinstance(value, nn.Parameter) else value


@contextmanager
def _without_autocast(streams: Tensor) -> Iterator[None]:
    """Compute in the dtypes of the operands."""
    device = streams.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # torch has no autocast on meta
        yield
        return
    with torch.autocast(device, enabled=False):
        yield
