"""The stream on its way through a stack, and the steps that every wiring consists of.

    read       c * N_in(x)              the sublayer's input
    branch     N_branch(f(read))        its output, normalized where the row has norm_branch
    add        a * x + b * branch       the stream after the sublayer
    norm_out   N_out(a * x + b * branch)

A sublayer without norm_out does not add its branch: it passes the branch and the coefficients of the add on, as the stream's
pending write. The next reader owns the norm that follows, so it does the add and the norm in one call, and needs no parameter of
another module. That keeps modules separate (hooks, compilation, sharding, checkpoints, pipeline stages) and each add fused.

A step of a small stack takes a few microseconds. So the usual step (no factor, no dropout) calls the operator directly, and
modules and parameters are read from `_modules` and `_parameters`: one `nn.Module.__getattr__` takes a tenth of the operation's
time. A norm is called as a module if it may compute more than its formula: another class, parametrized, or with hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from addnorm import functional
from addnorm.nn.norm import LayerNorm, NormKind, RMSNorm
from addnorm.nn.untouched import Methods, is_untouched, methods_of
from addnorm.ops import dispatch, dtensor

__all__ = [
    "PendingWrite",
    "Site",
    "StreamState",
    "add",
    "add_and_normalize",
    "keep_write",
    "normalize",
    "read_stream",
    "with_seed",
    "without_views",
]

Scale = Tensor | float
Options = Mapping[str, Any]
ONE = 1.0
WIDE = {
    torch.float64: torch.float64
}  # dtype of c * weight and of kept writes by the operands' dtype; float32 for all others
FUNCTIONS: dict[NormKind, tuple[Any, Any]] = {
    "layer": (functional.layer_norm, functional.add_layer_norm),
    "rms": (functional.rms_norm, functional.add_rms_norm),
}
# The classes of norms that compute exactly the formula.
PLAIN: dict[NormKind, Methods] = {
    "layer": methods_of(LayerNorm, torch.nn.LayerNorm),
    "rms": methods_of(RMSNorm, torch.nn.RMSNorm),
}


class PendingWrite(NamedTuple):
    """A write that is not added to the stream yet.

    Attributes:
        branch: N_branch(f(read)), in the stream's shape.
        options: the coefficients of the add, as keyword arguments of `addnorm.add_residual`; empty for a plain sum.
    """

    branch: Tensor
    options: Options


class StreamState(NamedTuple):
    """What one layer of a stack passes to the next.

    Attributes:
        x: the stream, `(*, d_model)`, before the pending write; or n streams: one tensor `(*, n, d_model)`, or a tuple of n
            tensors `(*, d_model)`.
        pending: the write that the next reader adds; None if there is none. With several streams it is a `StreamWrite`.
        read: the input of the sublayer before, if the next one shares its state.
        base: that state, the stream without the write of the sublayer before.
        sites: a `Site` for each sublayer so far; None if they are not kept.
        dtype: dtype of the sublayers' inputs, if the stream has another one.
        collapse: the coefficients of the next read, if the sublayer before computed them.
    """

    x: Any
    pending: Any = None
    read: Tensor | None = None
    base: Tensor | None = None
    sites: tuple[Site, ...] | None = None
    dtype: torch.dtype | None = None
    collapse: Any = None


class Site(NamedTuple):
    """What one sublayer did to the streams, with its coefficients as they were: X' = N_out(A X + B W + bias).

    Attributes:
        write: W, in float32 at least: after N_branch, dropout and stochastic depth; with one stream after the factor b too.
        mix, inject, bias: A, B and the bias; A is the factor a with one stream, and B is 1.
        collapse: C.
        total: with N_out, what it normalized: the sum with one stream, otherwise one entry for each stream.
        norms: with N_out, the norms, None for a stream without.
    """

    write: Tensor
    mix: Any = 1.0
    inject: Any = 1.0
    bias: Any = None
    collapse: Any = None
    total: Any = None
    norms: Any = None


def without_views(state: StreamState) -> StreamState:
    """Return the state with a pending branch that is no view, for modules with hooks.

    FSDP2 hooks a module's outputs and warns of a view, which an operator in place would detach from its hook. A projection
    returns a view, and the stack writes nothing in place.
    """
    write = state.pending
    if write is None or write.branch._base is None:
        return state
    branch = torch.ops.aten._unsafe_view(write.branch, write.branch.shape)
    return state._replace(pending=write._replace(branch=branch))


def read_stream(
    state: StreamState, norm: Any, kind: NormKind, c: Scale = ONE, *, return_stream: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the stream after the pending write, and c * N(stream) in the dtype of reads; norm None means none.

    Without `return_stream` the stream may be returned as it was before the write, which saves writing it to memory.
    """
    x, pending, _, _, _, dtype, _ = state
    if pending is None:
        return x, _read(x, norm, kind, c, dtype)
    branch, options = pending
    if norm is None:
        x = functional.add_residual(x, branch, **options)
        return x, _read(x, None, kind, c, dtype)
    if not options and c.__class__ is float and c == ONE and dtype is None and is_plain(norm, kind, x):
        eps: Any = norm.eps
        if eps is not None:
            table = norm._parameters
            y: Any = dispatch.fast_path(
                x, branch, table["weight"], table.get("bias"), eps, kind == "rms", return_stream
            )
            return (y[1], y[0]) if return_stream else (x, y)
    read, x = add_and_normalize(x, branch, options, norm, kind, c, dtype, return_residual=return_stream)
    return x, read


def _read(x: Tensor, norm: Any, kind: NormKind, c: Scale, dtype: torch.dtype | None) -> Tensor:
    if norm is None:
        x = _scaled(x, c)
        return x if dtype is None else x.to(dtype)
    return normalize(x, norm, kind, c, dtype)


def normalize(x: Tensor, norm: Any, kind: NormKind, c: Scale = ONE, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return c * N(x)."""
    if not is_plain(norm, kind, x):
        y: Tensor = norm(x)
        return _scaled(y if out_dtype is None else y.to(out_dtype), c)
    weight, bias, factor = _scaled_affine(norm, c)
    arguments = (x, weight, bias) if kind == "layer" else (x, weight)
    return _scaled(FUNCTIONS[kind][0](*arguments, eps=norm.eps, out_dtype=out_dtype), factor)


def add(x: Tensor, write: PendingWrite) -> Tensor:
    """Return a * x + b * branch."""
    return functional.add_residual(x, write.branch, **write.options)


def add_and_normalize(
    x: Tensor,
    branch: Tensor,
    options: Options,
    norm: Any,
    kind: NormKind,
    c: Scale,
    out_dtype: torch.dtype | None,
    *,
    return_residual: bool,
) -> tuple[Tensor, Tensor]:
    """Return c * N(sum) in `out_dtype` (None: that of branch), and the sum (or x without `return_residual`)."""
    if not is_plain(norm, kind, x):
        total = functional.add_residual(x, branch, **options)
        return normalize(total, norm, kind, c, out_dtype), total
    if not options and c.__class__ is float and c == ONE and out_dtype is None and norm.eps is not None:
        table = norm._parameters
        result: Any = dispatch.fast_path(
            x, branch, table["weight"], table.get("bias"), norm.eps, kind == "rms", return_residual
        )
        return result if return_residual else (result, x)
    weight, bias, factor = _scaled_affine(norm, c)
    result = FUNCTIONS[kind][1](
        x, branch, weight, bias, norm.eps, return_residual=return_residual, out_dtype=out_dtype, **options
    )
    y, z = result if return_residual else (result, x)
    return _scaled(y, factor), z


def is_plain(norm: Any, kind: NormKind, x: Tensor) -> bool:
    """Return whether a norm computes exactly its formula, so that the module need not be called."""
    if not is_untouched(norm, PLAIN[kind]):
        return False
    own = norm.__dict__
    table, shape = own["_parameters"], own["normalized_shape"]
    # A weight or bias that is not in the table is an attribute, which only the module's own forward reads. The operation
    # compares a weight's shape with that of x, which takes a third of a microsecond here.
    return (
        len(shape) == 1
        and "weight" in table
        and (kind == "rms" or "bias" in table)
        and bool(table["weight"] is not None or shape[0] == x.size(-1))
    )


def keep_write(x: Tensor, write: PendingWrite) -> Tensor:
    """Return what a write adds to the stream, in float32 at least."""
    options = {name: value for name, value in write.options.items() if name not in ("residual_scale", "residual_dtype")}
    zeros = torch.zeros_like(x, dtype=WIDE.get(x.dtype, torch.float32))
    return functional.add_residual(zeros, write.branch, **options)


def with_seed(options: Options, x: Tensor) -> Options:
    """Return the options with a seed of the dropout mask, so that two adds can share it."""
    if "dropout_p" not in options or "seed" in options:
        return options
    return {**options, "seed": dtensor.draw_seed(x)}


def _scaled_affine(norm: Any, c: Scale) -> tuple[Tensor | None, Tensor | None, Scale]:
    """Return c * weight, c * bias, and the factor that remains to be applied: c if there is no weight."""
    table = norm._parameters
    weight, bias = table["weight"], table.get("bias")
    if c.__class__ is float and c == ONE:
        return weight, bias, ONE
    if weight is None:
        return weight, bias, c
    wide = WIDE.get(weight.dtype, torch.float32)  # c * weight is not rounded to bfloat16
    return weight.to(wide) * c, None if bias is None else bias.to(wide) * c, ONE


def _scaled(x: Tensor, c: Scale) -> Tensor:
    return x if c.__class__ is float and c == ONE else (x * c).to(x.dtype)
