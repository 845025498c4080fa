"""Sublayers that mix tokens without attention: products over the tokens (mixers), means, recurrences, and messages on a graph."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from addnorm.stream.dataflow.graph import DATA, PARAMETER, Op, Value
from addnorm.stream.find.moves import CUTS
from addnorm.stream.find.operators import is_ancestor, is_mixing, strip_views
from addnorm.stream.find.views import find_axis, find_views, replay_op

__all__ = ["LINEAR", "find_contraction", "mixes_tokens", "trace_axis"]

GATHERS = {"index_select", "gather", "index"}
SCATTERS = {"index_add", "scatter_add", "index_put", "_index_put_impl_"}
LINEAR = {"mm": (0, 1), "addmm": (1, 2), "linear": (0, 1), "bmm": (0, 1), "baddbmm": (1, 2), "matmul": (0, 1)}


def find_contraction(op: Op) -> tuple[Value, int] | None:
    """Return the activation that a product with a parameter reads, and the axis over which it sums; None for other operators."""
    if op.name not in LINEAR:
        return None
    first, second = (op.args[at] if len(op.args) > at else None for at in LINEAR[op.name])
    if not isinstance(first, Value) or not isinstance(second, Value):
        return None
    if first.kind & DATA and not second.kind & DATA:
        return first, len(first.shape) - 1
    if second.kind & DATA and not first.kind & DATA and len(second.shape) > 1:
        return second, len(second.shape) - 2
    return None


def trace_axis(value: Value, axis: int, source: Value) -> int | None:
    """Return the axis of `source` that is an axis of a value, through views, norms and elementwise functions; None if none is."""
    for _ in range(64):
        base = strip_views(value)
        found = find_axis(value, base, axis)
        if found is None:
            return None
        value, axis = base, found
        if value is source or value is strip_views(source):
            rank = len(value.shape)
            return axis if rank == len(source.shape) else None
        if value.norm is not None and value.norm.x.shape == value.shape:
            value = value.norm.x
            continue
        op = value.op
        if op is None or is_mixing(op) or op.name in CUTS:
            return None
        same = [v for v in op.inputs if v.kind & DATA and v.shape == value.shape]
        if not same:
            return None
        value = same[0]
    return None


def mixes_tokens(read: Value, ops: Sequence[Op]) -> bool:
    """Return whether a sublayer sums over tokens: in a product, in a mean, in a recurrence, or over the edges of a graph."""
    features = _find_features(read, ops)
    products: dict[Value, list[Op]] = {}
    for op in ops:
        contraction = find_contraction(op)
        if contraction is not None:
            value, axis = contraction
            traced = trace_axis(value, axis, read)
            if traced is None and _sums_over_rows(value, axis, read, features):
                return True
            if features is not None and traced not in (None, features):
                return True
            weights = [v for v in op.inputs if v.kind & (DATA | PARAMETER) == PARAMETER and len(v.shape) > 1]
            if weights:
                products.setdefault(strip_views(weights[0]), []).append(op)
    return any(_is_recurrence(calls) for calls in products.values()) or _passes_messages(ops)


def _sums_over_rows(value: Value, axis: int, read: Value, features: int | None) -> bool:
    """Return whether an axis of a view of the stream, or of its norm, has elements of several tokens."""
    source = strip_views(value)
    start = source if source is strip_views(read) else source.norm.y if source.norm is not None else None
    views = find_views(value, source) if start is not None else None
    if not views or not value.tensor.numel():
        return False
    labels = torch.arange(source.tensor.numel()).reshape(source.shape)
    for op in views:
        labels = replay_op(op, labels)
    row = labels.movedim(axis, -1).reshape(-1, labels.shape[axis])[0]
    indices = torch.unravel_index(row, source.shape)
    last = len(source.shape) - 1 if features is None else features
    return any(len(index.unique()) > 1 for k, index in enumerate(indices) if k != last)


def _is_recurrence(calls: Sequence[Op]) -> bool:
    """Return whether a product with a parameter is computed from the result of the same product."""
    return len(calls) > 2 and all(
        is_ancestor(before.outputs[0], after.outputs[0]) for before, after in pairwise(calls[:3])
    )


def _passes_messages(ops: Sequence[Op]) -> bool:
    """Return whether tokens are read by one index and added by another, as on a graph; experts read and add by the same one."""
    read, added = (
        [found for op in ops if op.name in names and (found := _find_index(op))] for names in (GATHERS, SCATTERS)
    )
    alike = [[torch.equal(sources, targets) for n, sources in read if n == m] for m, targets in added]
    return any(found and not any(found) for found in alike)


def _find_index(op: Op) -> tuple[int, Tensor] | None:
    """Return the number of tokens among which an index chooses, and the token of each row; None if it chooses features."""
    source, *args = op.args[:3]
    if isinstance(args[0], int):
        dim, index = args[0] % len(source.shape), args[1]
    else:  # of x[i]
        chosen = [(k, value) for k, value in enumerate(args[0]) if value is not None]
        dim, index = chosen[0] if len(chosen) == 1 else (0, None)
    if not isinstance(index, Value) or index.tensor.dtype == torch.bool or dim == len(source.shape) - 1:
        return None
    if not source.tensor.is_floating_point() or not op.outputs[0].kind & DATA or not index.tensor.numel():
        return None
    rows = index.tensor.movedim(dim, 0) if len(index.shape) == len(source.shape) else index.tensor
    return source.shape[dim], rows.reshape(len(rows), -1)[:, 0]


def _find_features(read: Value, ops: Sequence[Op]) -> int | None:
    """Return the axis of the features, from a norm that reads the stream; the last one otherwise."""
    for op in ops:
        for norm in op.norms:
            axis = trace_axis(norm.x, len(norm.x.shape) - 1, read)
            if axis is not None:
                return axis
    return None
