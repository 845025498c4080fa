"""Operators that move numbers and compute none: cuts, joins, shifts; and the removal of those that cancel.

    cat(x[:, :2], x[:, 2:])      is x             cat(a, b)[:, :n]    is a, which has n tokens
    cat(a, b), cat(a, b)         are one value    stack(a, b)[0]      is a

`remove_redundant_moves` replaces such values in the operators that read them. Streams that a model cuts and joins in each layer
(reversible layers, memories, two halves of the features) are then the same graph as those of a model that does not.
`remove_saved_copies` does so for a run with gradients, of which autograd saves values.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from addnorm.stream.dataflow.graph import Flow, Op, Value
from addnorm.stream.find.operators import TRANSPARENT

__all__ = [
    "CUTS",
    "JOINS",
    "find_moved",
    "is_move",
    "list_joined",
    "remove_redundant_moves",
    "remove_saved_copies",
    "strip_moves",
]

# The output has some numbers of the first input, in another place.
CUTS = {
    "slice", "select", "narrow", "split", "split_with_sizes", "unsafe_split", "unbind", "chunk", "index_select", "gather",
    "index", "masked_select", "roll", "flip", "constant_pad_nd", "repeat", "repeat_interleave", "pixel_shuffle",
    "pixel_unshuffle", "unfold", "as_strided", "diagonal", "channel_shuffle", "take_along_dim", "tile", "im2col",
}  # fmt: skip
# The output has numbers of several inputs.
JOINS = {
    "cat", "stack", "write_into", "index_put", "_index_put_impl_", "scatter", "slice_scatter", "select_scatter", "masked_scatter",
    "index_copy", "where",
}  # fmt: skip
COPIES = {"clone", "contiguous", "alias", "detach", "lift_fresh"}


def is_move(op: Op) -> bool:
    """Return whether the output of an operator has numbers of its inputs and no others."""
    return op.name in CUTS or op.name in JOINS or op.name in TRANSPARENT


def find_moved(op: Op) -> Value | None:
    """Return the input whose numbers, or some of them, the output has; None for a join and for other operators."""
    return op.inputs[0] if op.inputs and (op.name in CUTS or op.name in TRANSPARENT) else None


def list_joined(op: Op) -> list[Value]:
    """Return the inputs whose numbers a join has, without indices and masks."""
    if op.name not in JOINS:
        return []
    return [v for v in op.inputs if v.tensor.is_floating_point() or v.tensor.is_complex()]


def strip_moves(value: Value) -> Value:
    """Return the value of which another is a view, or a part."""
    while value.op is not None and (moved := find_moved(value.op)) is not None:
        value = moved
    return value


class _Cut(NamedTuple):
    """Part of a value: the numbers from `start` to `end` of one dimension."""

    root: Value
    dim: int
    start: int
    end: int


def remove_saved_copies(flow: Flow) -> None:
    """Remove the `detach` of values that autograd saves for the backward from the users of these values."""
    returned = {value for value in pytree.tree_leaves(flow.result) if isinstance(value, Value)}
    for op in flow.ops:
        if op.name == "detach" and not any(out.users or out in returned for out in op.outputs):
            for value in op.inputs:
                value.users = [user for user in value.users if user is not op]


def remove_redundant_moves(flow: Flow) -> None:
    """Replace values that are equal to earlier ones by construction, in all operators and in the result."""
    resolver = _Resolver()
    same: dict[Value, Value] = {}
    for op in flow.ops:
        if op.name in resolver.names:
            for value in op.outputs:
                equal = resolver.resolve(op, value)
                if equal is not None and equal is not value:
                    same[value] = equal
                    _replace(value, equal)
    if same:
        flow.result = pytree.tree_map_only(Value, lambda value: same.get(value, value), flow.result)


def _replace(value: Value, equal: Value) -> None:
    """Replace a value by another one in the operators that read it."""
    users, value.users = value.users, []
    for op in dict.fromkeys(users):
        op.inputs = [equal if v is value else v for v in op.inputs]
        op.args = _substitute(op.args, value, equal)
        op.kwargs = _substitute(op.kwargs, value, equal)
    equal.users += users


def _substitute(arguments: Any, value: Value, equal: Value) -> Any:
    if arguments is value:
        return equal
    if isinstance(arguments, list | tuple):
        return type(arguments)(_substitute(a, value, equal) for a in arguments)
    if isinstance(arguments, dict):
        return {key: _substitute(a, value, equal) for key, a in arguments.items()}
    return arguments


class _Resolver:
    """Finds for each cut and join an earlier value that is equal to it."""

    names = frozenset(
        ("slice", "narrow", "split", "split_with_sizes", "unsafe_split", "select", "unbind", "cat", "stack")
    )

    def __init__(self) -> None:
        self._known: dict[Hashable, Value] = {}

    def resolve(self, op: Op, value: Value) -> Value | None:
        """Return an earlier value that is equal to an output of a cut or join."""
        if op.name in ("cat", "stack"):
            return self._resolve_join(op, value)
        if op.name in ("select", "unbind"):
            return self._resolve_selection(op, value)
        cut = _read_cut(op, value)
        if cut is None:
            return None
        if cut.start == 0 and cut.end == cut.root.shape[cut.dim]:
            return _get_equal(cut.root, value)
        for parts in _find_parts(cut):
            if len(parts) == 1:
                return _get_equal(parts[0], value)
        return self._register(("cut", cut.root, cut.dim, cut.start, cut.end), value)

    def _register(self, key: Hashable, value: Value) -> Value | None:
        known = self._known.setdefault(key, value)
        return None if known is value else _get_equal(known, value)

    def _resolve_join(self, op: Op, value: Value) -> Value | None:
        parts, dim = _read_join(op)
        if not all(isinstance(part, Value) for part in parts):
            return None
        if op.name == "cat" and len(parts) > 1:
            cuts = [_read_cut(part.op, part) if part.op is not None else None for part in map(_strip_copies, parts)]
            first = cuts[0]
            if first is not None and first.start == 0 and first.dim == dim:
                ends = [0, *(cut.end for cut in cuts if cut is not None)]
                joined = [
                    cut is not None and cut.root is first.root and cut.dim == dim and cut.start == end
                    for cut, end in zip(cuts, ends, strict=False)
                ]
                if all(joined) and ends[-1] == first.root.shape[dim]:
                    return _get_equal(first.root, value)
        return self._register((op.name, dim, *map(_strip_copies, parts)), value)

    def _resolve_selection(self, op: Op, value: Value) -> Value | None:
        source = _strip_copies(op.inputs[0])
        rank = len(source.shape)
        dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)
        index = value.part if op.name == "unbind" else op.kwargs.get("index", op.args[2] if len(op.args) > 2 else None)
        if not isinstance(dim, int) or not isinstance(index, int) or not rank:
            return None
        dim, index = dim % rank, index % source.shape[dim % rank] if source.shape[dim % rank] else 0
        if source.op is not None and source.op.name == "stack":
            parts, along = _read_join(source.op)
            if along == dim:
                return _get_equal(parts[index], value)
        return self._register(("selection", source, dim, index), value)


def _strip_copies(value: Value) -> Value:
    while value.op is not None and value.op.name in COPIES and len(value.op.args) == 1:
        before = value.op.inputs[0]
        if before.shape != value.shape or before.tensor.dtype != value.tensor.dtype:
            break
        value = before
    return value


def _get_equal(equal: Value, value: Value) -> Value | None:
    """Return an equal value if it has the shape and the dtype too."""
    return equal if equal.shape == value.shape and equal.tensor.dtype == value.tensor.dtype else None


def _read_cut(op: Op, value: Value) -> _Cut | None:
    """Return which part of which value a cut is; cuts of cuts are parts of the first value."""
    if not op.inputs:
        return None
    root = _strip_copies(op.inputs[0])
    rank = len(root.shape)
    args = dict(enumerate(op.args))
    dim: Any = op.kwargs.get("dim", args.get(2 if op.name in ("split", "split_with_sizes", "unsafe_split") else 1, 0))
    if not isinstance(dim, int) or not rank or dim >= rank:
        return None
    dim %= rank
    size = root.shape[dim]
    if op.name == "slice":
        start, end = op.kwargs.get("start", args.get(2)), op.kwargs.get("end", args.get(3))
        step = op.kwargs.get("step", args.get(4, 1))
        start, end = 0 if start is None else start, size if end is None else end
        if step != 1 or not isinstance(start, int) or not isinstance(end, int):
            return None
        start, end, _ = slice(start, end).indices(size)
    elif op.name == "narrow":
        start = args.get(2)
        if not isinstance(start, int) or not isinstance(args.get(3), int):
            return None
        start %= size or 1
        end = start + args[3]
    elif op.name in ("split", "split_with_sizes", "unsafe_split") and isinstance(value.part, int):
        start = sum(out.shape[dim] for out in op.outputs[: value.part])
        end = start + value.shape[dim]
    else:
        return None
    if value.shape != (*root.shape[:dim], end - start, *root.shape[dim + 1 :]):
        return None
    before = _read_cut(root.op, root) if root.op is not None else None
    if before is not None and before.dim == dim:
        return _Cut(before.root, dim, before.start + start, before.start + end)
    return _Cut(root, dim, start, end)


def _read_join(op: Op) -> tuple[list[Value], int]:
    """Return the parts of a join and its dimension, counted from the front."""
    parts = [*op.args[0]]
    dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)
    return parts, dim % max(len(op.outputs[0].shape), 1)


def _find_parts(cut: _Cut) -> Iterator[list[Value]]:
    """Yield the parts of a join that a cut of it consists of."""
    if cut.root.op is None or cut.root.op.name != "cat":
        return
    parts, dim = _read_join(cut.root.op)
    at, inside = 0, []
    for part in parts:
        if dim != cut.dim:
            return
        if cut.start <= at and at + part.shape[dim] <= cut.end and part.shape[dim]:
            inside.append(part)
        at += part.shape[dim]
    if inside and sum(part.shape[dim] for part in inside) == cut.end - cut.start:
        yield inside
