"""Norms on the way into a sublayer or out of it that its row does not contain: behind a gate, a mask, a sum with positions."""

from __future__ import annotations

from addnorm.stream.dataflow.graph import Op, Value
from addnorm.stream.find.moves import find_moved, is_move, list_joined
from addnorm.stream.find.operators import is_ancestor, is_mixing, match_factor
from addnorm.stream.find.sublayers import Sublayer

__all__ = ["has_hidden_norm_in", "has_hidden_norm_out"]

ELEMENTWISE = {
    "add",
    "sub",
    "mul",
    "div",
    "addcmul",
    "neg",
    "native_dropout",
    "where",
    "masked_fill",
    "clamp",
    "nan_to_num",
}


def has_hidden_norm_in(sublayer: Sublayer) -> bool:
    """Return whether a norm reads the stream after factors and sums, or the norm through which the sublayer reads."""
    read = sublayer.add.read
    carried = {read}
    for op in sublayer.ops:
        if op.norms:
            if any(norm.x in carried and norm not in sublayer.reads.norms for norm in op.norms):
                return True
            if op.norms[0].y in op.outputs and op.norms[0] in sublayer.reads.norms:
                carried.add(op.norms[0].y)
        elif _passes(op, carried, read):
            carried.update(op.outputs)
    return False


def _passes(op: Op, carried: set[Value], read: Value) -> bool:
    """Return whether an operator passes the stream on: moved, multiplied, or added to something that is not computed from it."""
    parts = [v for v in op.inputs if v in carried]
    if not parts or is_mixing(op):
        return False
    if is_move(op):
        return op.outputs[0].shape[-1:] == parts[0].shape[-1:]
    same = op.name in ELEMENTWISE and op.outputs[0].shape == parts[0].shape
    return same and not any(is_ancestor(read, v) for v in op.inputs if v not in carried)


def has_hidden_norm_out(sublayer: Sublayer) -> bool:
    """Return whether the output is a norm that is multiplied by a gate, or moved, before it is added."""
    todo, seen = [sublayer.raw], set[Value]()
    while todo:
        value = todo.pop()
        if value in seen or value.op is None or value is sublayer.add.read:
            continue
        seen.add(value)
        if value.norm is not None:
            if value.norm not in (sublayer.norm, *sublayer.reads.norms) and value is not sublayer.raw:
                return True
            continue
        op = value.op
        if (moved := find_moved(op)) is not None:
            todo.append(moved)
        elif joined := list_joined(op):
            todo += joined
        elif op.name == "mul" or match_factor(op) is not None:
            todo += [v for v in op.inputs if v.shape == value.shape]
    return False
