"""The equations of a sublayer: the write before it is added to the streams, and the sublayer's input is read from the streams.

    X' = N_out(A X + B W)        add_write
    R  = N_in(C P(X'))           read

A sublayer without N_out hands its write on as pending. The next reader owns the norm that follows, so it does the add and the
norm in one call, and needs no parameter of another module. That keeps modules separate (hooks, compilation, sharding,
checkpoints, pipeline stages) and each add fused. For one stream that call is `add_and_norm`, for streams in one tensor
`addnorm.add_norm_streams`; sums of a tuple of streams are computed term by term.

A step of a small stack takes a few microseconds. So the usual step (one stream, no factor, no dropout) calls the operator
directly, and modules and parameters are read from `_modules` and `_parameters`: one `nn.Module.__getattr__` takes a tenth of the
operation's time. A norm is called as a module if it may compute more than its formula: another class, parametrized, or with
hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_tensor, nn

from addnorm._util.norms import KINDS, Norm
from addnorm.boundary import add_norm_streams
from addnorm.functional import FUNCTIONS, add_residual
from addnorm.nn.checks import refuse_norm
from addnorm.nn.norm import MODULES
from addnorm.nn.state import NO_OPTIONS, Options, PendingWrite, StreamState, is_distributed
from addnorm.nn.unmodified import Methods, is_unmodified, methods_of
from addnorm.ops.autocast import disable_autocast
from addnorm.ops.dispatch import fast_path
from addnorm.ops.dtensor import spread
from addnorm.wirings import coefficients
from addnorm.wirings.coefficients.base import CoefficientModule, widen, widen_dtype
from addnorm.wirings.stage import Head, Stage, identity, unit

Scale = Tensor | float
Streams = Any  # a tensor (*, d_model) or (*, n, d_model), or a tuple of n tensors (*, d_model)
ONE = 1.0
# The classes of norms that compute exactly the formula.
PLAIN: dict[Norm, Methods] = {kind: methods_of(module, *module.__bases__) for kind, module in MODULES.items()}
# Modules whose coefficients `add_norm_streams` computes from their gates, or that do not depend on the streams.
GATED = methods_of(
    coefficients.HyperConnection, coefficients.IndependentConnection, coefficients.ManifoldConnection, coefficients.SigmoidRead,
    names=("compute", "gates", "is_constant"),
)  # fmt: skip
ATTENDING = methods_of(coefficients.SourceAttention, names=("compute", "read"))  # one operator computes their reads


# One stream.


def add_and_norm(
    x: Tensor,
    branch: Tensor | None,
    norm: Any,
    kind: Norm,
    c: Scale = ONE,
    dtype: torch.dtype | None = None,
    options: Options = NO_OPTIONS,
    *,
    return_stream: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the stream after the write, a * x + b * branch, and c * N(stream) in `dtype`. Without `norm`, N is the identity.

    `options` are those of the write, with its factors. Without `return_stream` the returned stream may lack the write, which
    saves memory traffic.
    """
    if branch is None:
        return x, normalize(x, norm, kind, c, dtype)
    if norm is None or not is_plain(norm, kind, x):
        x = add_residual(x, branch, **options)
        return x, normalize(x, norm, kind, c, dtype)
    if not options and c.__class__ is float and c == ONE and dtype is None and norm.eps is not None:
        table = norm._parameters
        y: Any = fast_path(x, branch, table["weight"], table.get("bias"), norm.eps, KINDS[kind].code, return_stream)
        return (y[1], y[0]) if return_stream else (x, y)
    weight, bias, factor = _scaled_affine(norm, c)
    result = FUNCTIONS[kind][1](
        x, branch, weight, bias, norm.eps, return_residual=return_stream, out_dtype=dtype, **options
    )
    y, z = result if return_stream else (result, x)
    return z, _scaled(y, factor)


def normalize(x: Tensor, norm: Any, kind: Norm, c: Scale = ONE, dtype: torch.dtype | None = None) -> Tensor:
    """Return c * N(x). Without `norm`, N is the identity."""
    if norm is None:
        x = _scaled(x, c)
        return x if dtype is None else x.to(dtype)
    if not is_plain(norm, kind, x):
        y: Tensor = norm(x)
        if not is_tensor(y):
            refuse_norm(norm, y, x)
        return _scaled(y if dtype is None else y.to(dtype), c)
    weight, bias, factor = _scaled_affine(norm, c)
    dtype = None if dtype == x.dtype else dtype  # a call without options is faster
    return _scaled(FUNCTIONS[kind][0](x, weight, bias, eps=norm.eps, out_dtype=dtype), factor)


def is_plain(norm: Any, kind: Norm, x: Tensor) -> bool:
    """Return whether a norm computes exactly its formula, so that the module need not be called."""
    return is_unmodified(norm, PLAIN[kind]) and fits_formula(norm, kind, x)


def fits_formula(norm: Any, kind: Norm, x: Tensor) -> bool:
    """Return whether the operation normalizes the last dimension of `x` with the parameters of an unmodified norm."""
    table, shape = norm._parameters, norm.normalized_shape
    # A weight or bias that is not in the table is an attribute, which only the module's own forward reads. The operation
    # compares a weight's shape with that of x, which takes a third of a microsecond here.
    return (
        len(shape) == 1
        and "weight" in table
        and (not KINDS[kind].has_bias or "bias" in table)
        and bool(table["weight"] is not None or shape[0] == x.size(-1))
    )


def _scaled_affine(norm: Any, c: Scale) -> tuple[Tensor | None, Tensor | None, Scale]:
    """Return c * weight, c * bias, and the factor that remains to be applied: c if there is no weight."""
    table = norm._parameters
    weight, bias = table["weight"], table.get("bias")
    if c.__class__ is float and c == ONE:
        return weight, bias, ONE
    if weight is None:
        return weight, bias, c
    return widen(weight) * c, None if bias is None else widen(bias) * c, ONE  # c * weight is not rounded to bfloat16


def _scaled(x: Tensor, c: Scale) -> Tensor:
    return x if c.__class__ is float and c == ONE else (x * c).to(x.dtype)


# Writes.


def begin(x: Tensor, embedding: Sequence[float], *, stacked: bool) -> Streams:
    """Return the first streams: x times each factor of `embedding`, in one tensor if `stacked`, else in a tuple."""
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


def add_write(streams: Streams, write: PendingWrite, norms: Sequence[Any], kind: Norm) -> Streams:
    """Return the new streams, N_out(A X + B W), in the form of `streams`.

    `norms` has the N_out of each new stream, with None for a stream without a norm. It is empty if no stream has a norm.
    """
    if write.inject is None:
        if not norms:
            return add_residual(streams, write.branch, **write.options)
        dtype = write.options.get("residual_dtype")
        return add_and_norm(streams, write.branch, norms[0], kind, ONE, dtype, write.options, return_stream=False)[1]
    if isinstance(streams, Tensor):
        with disable_autocast(streams):
            return _add_stacked(streams, write)
    mix = identity(len(streams)) if write.mix is None else write.mix
    return tuple(_add_row(row, streams, write, k, norms[k] if norms else None, kind) for k, row in enumerate(mix))


def _add_stacked(streams: Tensor, write: PendingWrite) -> Tensor:
    x, dtype = widen(streams), write.options.get("residual_dtype") or streams.dtype
    mixed = x if write.mix is None else torch.matmul(write.mix.to(x.dtype), x)
    inject = _to_inject(write, streams)
    gates = inject if _is_per_feature(write.inject) else inject.unsqueeze(-1)
    total = mixed + gates * widen(mask_write(write)).unsqueeze(-2)
    if write.bias is not None:
        total = total + torch.stack([torch.as_tensor(entry).expand_as(total[..., 0, :]) for entry in write.bias], -2)
    return total.to(dtype)


def _is_per_feature(inject: Any) -> bool:
    """Return whether an entry of B, the weights of the write, is a learned vector with a factor for each feature."""
    return isinstance(inject, tuple) and any(isinstance(entry, Tensor) and entry.numel() != 1 for entry in inject)


def _to_inject(write: PendingWrite, streams: Tensor) -> Tensor:
    """Return B, the weights of the write into each stream, as one tensor: `(*, n)`, or `(n, d_model)` if per feature."""
    if isinstance(write.inject, Tensor):
        return write.inject
    wide = widen_dtype(streams.dtype)
    entries = [torch.as_tensor(entry, dtype=wide, device=streams.device) for entry in write.inject]
    if _is_per_feature(write.inject):
        return torch.stack([entry.expand(streams.shape[-1]) for entry in entries])
    return torch.stack([spread(entry, streams).reshape(()) for entry in entries])


def _add_row(
    row: Sequence[Any], streams: Sequence[Tensor], write: PendingWrite, k: int, norm: Any, kind: Norm
) -> Tensor:
    """Return new stream k: norm(sum over j of row_j X_j + inject_k * W + bias_k), where `row` is row k of the matrix A."""
    inject, bias = write.inject[k], None if write.bias is None else write.bias[k]
    terms = [(c, x) for c, x in zip(row, streams, strict=True) if c.__class__ is not float or c != 0.0]
    writes, dtype = not has_value(inject, 0.0), write.options.get("residual_dtype") or streams[0].dtype
    if writes and terms and bias is None and _is_scale(inject) and (len(terms) > 1 or _is_scale(terms[0][0])):
        factor, x = terms[0] if len(terms) == 1 else (1.0, _sum_terms(terms))
        options: dict[str, Any] = dict(write.options)
        if not has_value(factor, 1.0):
            options["residual_scale"] = factor
        if not has_value(inject, 1.0):
            options["layer_scale"] = inject
        if x.dtype != dtype:
            options["residual_dtype"] = dtype  # the sum of several streams is rounded here, once
        own: Tensor = add_write(x, PendingWrite(write.branch, options), () if norm is None else (norm,), kind)
        return own
    if not writes and bias is None and len(terms) == 1 and has_value(terms[0][0], 1.0):
        total = terms[0][1]
    elif not terms and bias is None and has_value(inject, 1.0):
        total = mask_write(write).to(dtype)
    else:
        total = _sum_terms([*terms, *[(inject, mask_write(write))] * writes])
        total = (total if bias is None else total + bias).to(dtype)
    return total if norm is None else normalize(total, norm, kind, ONE, dtype)


def mask_write(write: PendingWrite) -> Tensor:
    """Return the write after dropout and stochastic depth, and for a `Row` times b; in float32 at least if any of these act."""
    options = {name: value for name, value in write.options.items() if name not in ("residual_scale", "residual_dtype")}
    if not options:
        return write.branch
    zeros = torch.zeros_like(write.branch, dtype=torch.promote_types(write.branch.dtype, torch.float32))
    return add_residual(zeros, write.branch, **options)


# Reads.


class Reading(NamedTuple):
    """Result of reading the streams.

    Attributes:
        streams: X', the streams after the pending write.
        reads: the sublayer's inputs, N_in(C P(X')), where P is an optional norm of each stream.
        collapse: the weights C of the read.
        write: mixing matrix A, weights B and bias of the sublayer's own write, X'' = A X' + B W + bias.
        carried: the C that the next stage reads with.
    """

    streams: Streams
    reads: tuple[Tensor, ...]
    collapse: Any
    write: tuple[Any, Any, Any] = (None, None, None)
    carried: Any = None


def read(module: Any, spec: Stage | Head, state: StreamState, norms: Sequence[Any]) -> Reading:
    """Return the streams after the pending write and the sublayer's inputs, computed in one call if possible.

    Args:
        module: the connection or head with the parameters and norms of `spec`.
        spec: the stage or head with the constant coefficients.
        state: the streams, the pending write, and the C that the stage before computed, if any.
        norms: N_in for each read, or None.
    """
    if _is_one_call(module, spec, state, norms):
        return _read_in_one_call(module, spec, state, norms[0])
    streams = finish(state)
    dtype = state.dtype or (streams if isinstance(streams, Tensor) else streams[0]).dtype
    sums = _attend(module, spec, state, streams)
    if sums is not None:
        reads = tuple(normalize(x, norm, module.norm, ONE, dtype) for x, norm in zip(sums, norms, strict=True))
        return Reading(streams, reads, None, _keep(module, spec, None, None, None))
    used, *write, carried = find_collapse(module, spec, streams, state.collapse)
    states = streams
    if any(spec.norm_streams):
        each = streams.unbind(-2) if isinstance(streams, Tensor) else streams
        own = [module.norm_streams[str(j)] if flag else None for j, flag in enumerate(spec.norm_streams)]
        states = tuple(
            x if norm is None else normalize(x, norm, module.norm, ONE, widen_dtype(x.dtype))
            for x, norm in zip(each, own, strict=True)
        )
    rows = used if isinstance(used, tuple) and isinstance(used[0], tuple) else (used,)
    reads = tuple(  # the sum is not rounded before its norm
        normalize(collapse(row, states), norm, module.norm, ONE, dtype) for row, norm in zip(rows, norms, strict=True)
    )
    return Reading(streams, reads, used, _keep(module, spec, *write), carried)


def _attend(module: Any, spec: Stage | Head, state: StreamState, streams: Streams) -> tuple[Tensor, ...] | None:
    """Return C X of each read before its norm if attention computes C and C itself is not needed, else None."""
    computed = module.coefficients
    is_general = computed is None or state.sites is not None or spec.delayed or any(spec.norm_streams)
    if is_general or not is_unmodified(computed, ATTENDING):
        return None
    with disable_autocast(streams[0]):
        return computed.read(streams)  # type: ignore[no-any-return]


def find_collapse(module: Any, spec: Stage | Head, streams: Streams, before: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return `(C, A, B, bias, carried)` of a stage; `carried` is the C that the next stage reads with, if it is delayed.

    All but the first are None unless `module` computes them.
    """
    computed, carried = module.coefficients, None
    used, mix, inject, bias = (None,) * 4 if computed is None else computed(streams)
    if spec.delayed:
        used, carried = unit(spec.n, 0) if before is None else before, used
    if used is None:
        used = _resolve(module, module.entries["collapse"])
    return used, mix, inject, bias, carried


def _is_one_call(module: Any, spec: Stage | Head, state: StreamState, norms: Sequence[Any]) -> bool:
    """Return whether one call of `add_norm_streams` can compute the pending write and the read."""
    x, write, computed = state.x, state.pending, module.coefficients
    if not isinstance(x, Tensor) or len(norms) != 1 or any(spec.norm_streams) or spec.learned:
        return False
    if norms[0] is not None and not is_plain(norms[0], module.norm, x):
        return False
    if write is not None and (write.bias is not None or _is_per_feature(write.inject)):
        return False
    return computed is None or (
        isinstance(computed, CoefficientModule) and not computed.appends and "collapse" in computed.computes
    )


def _read_in_one_call(module: Any, spec: Stage | Head, state: StreamState, norm: Any) -> Reading:
    x, write, computed = state.x, state.pending, module.coefficients
    used, mix, inject, bias, carried, gates, is_constant = (None,) * 7
    pending: dict[str, Any] = {}
    if write is not None:
        dtype = write.options.get("residual_dtype") or x.dtype
        pending = {
            "branch": mask_write(write),
            "mix": write.mix,
            "inject": _to_inject(write, x),
            "streams_dtype": dtype,
        }
    if computed is not None and is_unmodified(computed, GATED):
        with disable_autocast(x):  # as in the module's own call
            gates, is_constant = computed.gates(), computed.is_constant
    if gates is None and computed is not None:
        if pending and not is_constant:  # the coefficients need the streams
            x, pending = add_norm_streams(x, **pending).streams, {}
        used, mix, inject, bias = computed(x)
    if spec.delayed:
        carried, used = used, unit(spec.n, 0) if state.collapse is None else state.collapse
    elif computed is None:
        used = module.entries["collapse"][0]
    if isinstance(used, tuple):
        used = spread(x.new_tensor(used, dtype=widen_dtype(x.dtype)), x)
    affine: dict[str, Any] = {"norm": "none"}
    if norm is not None:
        table = norm._parameters
        eps = torch.finfo(widen_dtype(x.dtype)).eps if norm.eps is None else norm.eps
        affine = {"norm": module.norm, "weight": table["weight"], "bias": table.get("bias"), "eps": eps}
    step = add_norm_streams(x, **pending, collapse=used, gates=gates, out_dtype=state.dtype or x.dtype, **affine)
    if gates is not None:
        mix, inject = step.mix, step.inject
        used, carried = (used, step.collapse) if spec.delayed else (step.collapse, None)
    own: Any = step.read
    return Reading(step.streams, (own,), used, _keep(module, spec, mix, inject, bias), carried)


def collapse(row: Any, streams: Streams) -> Tensor:
    """Return the sum over j of row_j X_j in float32 at least. If row_j is 1 for one j and else 0, return X_j itself."""
    if isinstance(row, Tensor):
        if not isinstance(streams, Tensor):
            streams = torch.stack(streams, -2)
        gates = row if row.dim() == streams.dim() else row.unsqueeze(-1)
        return (gates * widen(streams)).sum(-2)
    each = streams.unbind(-2) if isinstance(streams, Tensor) else streams
    terms = [(entry, x) for entry, x in zip(row, each, strict=True) if not has_value(entry, 0.0)]
    return terms[0][1] if len(terms) == 1 and has_value(terms[0][0], 1.0) else _sum_terms(terms)


# Coefficients.


def _sum_terms(terms: Sequence[tuple[Any, Tensor]]) -> Tensor:
    """Return the sum of entry * x in float32 at least."""
    total: Any = None
    for entry, x in terms:
        term = widen(x) if has_value(entry, 1.0) else entry * widen(x)
        total = term if total is None else total + term
    return total  # type: ignore[no-any-return]  # there is a term


def has_value(entry: Any, number: float) -> bool:
    """Return whether an entry is the constant `number`. A learned or computed entry is not a constant."""
    return entry.__class__ is float and bool(entry == number)


def _is_scale(entry: Any) -> bool:
    """Return whether a coefficient is the same for all tokens."""
    return entry.__class__ is float or (isinstance(entry, Tensor) and entry.dim() <= 1)


def _keep(module: Any, spec: Stage | Head, mix: Any, inject: Any, bias: Any) -> tuple[Any, Any, Any]:
    """Return A, B and the bias of the write. The stage's A and B replace None. Copy parameters if distributed."""
    if inject is None and "inject" in module.entries:
        inject = _resolve(module, module.entries["inject"])[0]
    if mix is None and spec.mix is not None:
        mix = _resolve(module, module.entries["mix"])
    return tuple(map(_copy_parameters, (mix, inject, bias))) if is_distributed() else (mix, inject, bias)


def _resolve(module: Any, matrix: Any) -> Any:
    """Return the matrix with each entry that is a name replaced by the parameter of `module` with this name."""
    if not module.has_learned:
        return matrix
    return tuple(tuple(getattr(module, entry) if entry.__class__ is str else entry for entry in row) for row in matrix)


def _copy_parameters(value: Any) -> Any:
    """Return coefficients with copied parameters: a sharded module may free its parameters before the next layer reads them."""
    if isinstance(value, tuple):
        return tuple(_copy_parameters(entry) for entry in value)
    return value.clone() if isinstance(value, nn.Parameter) else value
