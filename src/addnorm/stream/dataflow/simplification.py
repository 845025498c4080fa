"""Removal of values that are equal to earlier ones, from a captured run: its graph then shows what is computed, and nothing else.

    cat(x[:, :2], x[:, 2:])      is x             cat(a, b)[:, :n]    is a, which has n tokens
    cat(a, b), cat(a, b)         are one value    stack(a, b)[0]      is a

So streams that a model cuts and joins in each layer (reversible layers, memories, two halves of the features) have the same graph
as those of a model that does not.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch.utils import _pytree as pytree

from addnorm.stream.dataflow.graph import Flow, Op, Value

Slab = tuple[Hashable, ...]  # a value at one index of one dimension: (value, dimension, index)


def remove_saved_copies(flow: Flow) -> None:
    """Remove unused `detach` operators from `Value.users`. Autograd runs them when it saves values for the backward."""
    returned = flow.list_results()
    for op in flow.ops:
        if op.name == "detach" and not any(out.users or out in returned for out in op.outputs):
            for value in op.inputs:
                value.users = [user for user in value.users if user is not op]


def remove_redundant_moves(flow: Flow) -> None:
    """Replace values that are equal to earlier ones by construction, in all operators and in the result."""
    slabs = _Slabs()
    same: dict[Value, Value] = {}
    for op in flow.ops:
        for value in op.outputs if "exact" in op.traits else ():
            equal = slabs.find_equal(op, value)
            if equal is not value and (equal.shape, equal.tensor.dtype) == (value.shape, value.tensor.dtype):
                same[value] = equal
                _replace(value, equal)
    if same:
        flow.result = pytree.tree_map_only(Value, lambda value: same.get(value, value), flow.result)


def _replace(value: Value, equal: Value) -> None:
    """Replace `value` by `equal` in all operators that read the value."""
    users, value.users = value.users, []
    for op in dict.fromkeys(users):
        op.inputs = [equal if v is value else v for v in op.inputs]
        op.args, op.kwargs = pytree.tree_map_only(Value, lambda v: equal if v is value else v, (op.args, op.kwargs))
    equal.users += users


class _Slabs:
    """Index of cuts and joins. Each is a list of slabs along one dimension; values with equal lists are equal."""

    def __init__(self) -> None:
        # for each cut or join its dimension, and the slabs along this dimension
        self._rows: dict[Value, tuple[int, tuple[Slab, ...]]] = {}
        self._slabs: dict[Value, Slab] = {}  # the slab of each value that is one slab of another value
        self._values: dict[Hashable, Value] = {}  # first value by slab, or by dimension and slabs

    def find_equal(self, op: Op, value: Value) -> Value:
        """Return the first value that is equal to an output of a cut or join."""
        dim = op.get("dim", 0)
        is_selection, source = "select" in op.traits, _strip_copies(op.inputs[0]) if op.inputs else value
        rank = len(source.shape if is_selection else value.shape)
        if not isinstance(dim, int) or not rank:
            return value
        dim %= rank
        if is_selection:
            index: Any = value.part if op.name == "unbind" else op.get("index")
            slab = self._list(source, dim)[index]
            self._slabs[value] = slab
            return self._values.setdefault(slab, value)
        row = self._cut(op, value, source, dim) if "cut" in op.traits else self._join(op, dim)
        if len(row) != value.shape[dim] or not row:
            return value
        self._rows[value] = dim, row
        root = row[0][0]
        if isinstance(root, Value) and self._list(root, dim, plain=True) == row:
            return root
        return self._values.setdefault((dim, row), value)

    def _cut(self, op: Op, value: Value, source: Value, dim: int) -> tuple[Slab, ...]:
        row = self._list(source, dim)
        if "split" in op.traits:
            start = sum(out.shape[dim] for out in op.outputs[: op.outputs.index(value)])
            return row[start : start + value.shape[dim]]
        start = op.get("start")
        return row[start : op.get("end") : op.get("step")] if op.name == "slice" else row[start:][: op.get("length")]

    def _join(self, op: Op, dim: int) -> tuple[Slab, ...]:
        parts = [_strip_copies(part) for part in op.args[0]]
        if op.name == "cat":
            return tuple(slab for part in parts for slab in self._list(part, dim))
        for part in parts:
            self._values.setdefault(self._slabs.setdefault(part, (part,)), part)
        return tuple(self._slabs[part] for part in parts)

    def _list(self, value: Value, dim: int, plain: bool = False) -> tuple[Slab, ...]:
        """Return the slabs of a value along `dim`: for a cut or join, the slabs of its sources, unless `plain`."""
        along, row = self._rows.get(value, (-1, ()))
        size = value.shape[dim] if dim < len(value.shape) else 0
        return row if along == dim and not plain else tuple((value, dim, index) for index in range(size))


def _strip_copies(value: Value) -> Value:
    while value.op is not None and "copy" in value.op.traits and len(value.op.args) == 1 and value.op.name != "_conj":
        before = value.op.inputs[0]
        if before.shape != value.shape or before.tensor.dtype != value.tensor.dtype:
            break
        value = before
    return value
