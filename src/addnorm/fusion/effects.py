"""Why somebody would notice that a boundary is one call: what it writes, what it takes no gradient of, what it is computed with.

That its numbers are right (call.py) does not tell: they are those of one call, of tensors that nobody else reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from addnorm.fusion.traced import Traced, given_to, size_of
from addnorm.stream.dataflow.graph import CONSTANT, NOISE, Op
from addnorm.stream.find.operators import TRANSPARENT

if TYPE_CHECKING:
    from addnorm.fusion.pattern import Match

__all__ = ["add_in_place", "changing", "detached", "gains_after", "kept", "norm_in_place"]

Order = Mapping[fx.Node, int]
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def add_in_place(match: Match, traced: Traced, order: Order) -> str | None:
    """Others would see that an add in place is no longer in place."""
    op, add = match.sum.op, match.add
    assert op is not None
    assert add is not None
    if not _writes(op):
        return None
    if not any(traced.memory.get(node) == traced.memory[add] for node in match.operands):
        return "its add writes into memory that is given"
    for node in _of_memory(traced, traced.memory[add], {*match.z}):
        if _given(node):
            return "its add writes in place into what the model was given"
        if order[node] < order[add] and any(order[user] > order[add] for user in node.users):
            return "its add writes in place into memory of which a view is read later"
    return None


def norm_in_place(match: Match, traced: Traced, order: Order) -> str | None:
    """Others would see that the steps of a norm write nothing in place any more."""
    inside = {*match.inner, *match.y}
    for writer, memory in _written(match.inner, traced):
        for node in _of_memory(traced, memory, inside):
            if _given(node) or any(order[user] > order[writer] and user not in inside for user in node.users):
                return "its norm writes in place into memory that others read"
    return None


def kept(match: Match, traced: Traced, order: Order) -> str | None:
    """The call keeps the sum for backward, which a norm by hand may not."""
    if not given_to(match.y[0]).requires_grad:
        return None
    assert match.add is not None
    last = max(order[match.add], *(order[node] for node in match.inner))
    memory = traced.memory[match.add]
    later = [node for node in traced.ran if order[node] > last]
    if any(written == memory for _, written in _written(later, traced)):
        return "its sum, which backward needs, is written in place later"
    return None


def detached(match: Match, traced: Traced) -> str | None:
    """The norm stops a gradient on its way."""
    ops = (op for node in match.inner for op in traced.ran[node])
    if any(op.name == "detach" and op.inputs[0].kind != CONSTANT for op in ops):
        return "its norm takes no gradient of a part"
    return None


def changing(match: Match, traced: Traced) -> str | None:
    """A number, such as eps, that is another one in another call of the same graph."""
    assert match.add is not None
    width = size_of(given_to(match.z[0]).shape[-1])
    for node in (match.add, *match.inner):
        if all(op.name in TRANSPARENT for op in traced.ran[node]):
            continue
        found = [given_to(other) for other in node.all_input_nodes]
        symbols = [size_of(given) for given in found if isinstance(given, SYMBOLS)]
        if any(expr != width and not getattr(expr, "is_number", True) for expr in symbols):
            return "it is computed with a number that may change"
    return None


def gains_after(match: Match, traced: Traced, order: Order, region: Mapping[fx.Node, Any]) -> str | None:
    """A weight or a bias that is made after the add, and would be another one before it."""
    assert match.add is not None
    todo = [node for node in (match.weight, match.bias) if node is not None]
    while todo:
        node = todo.pop()
        if order[node] < order[match.add]:
            continue
        ops = traced.ran[node]
        moved = node is match.add or traced.kind(node) & NOISE or region[node] != region[match.add]
        if moved or any(_writes(op) or op.outputs[0].part == "memory" for op in ops):
            return "its weight or bias is made after the add, and cannot be before it"
        todo += node.all_input_nodes
    return None


def _written(nodes: Any, traced: Traced) -> Iterator[tuple[fx.Node, int]]:
    """Which nodes write in place, and into which memory."""
    for node in nodes:
        for op in traced.ran.get(node, ()):
            if _writes(op):
                yield from ((node, out.tensor.untyped_storage()._cdata) for out in op.outputs)


def _writes(op: Op) -> bool:
    schema = getattr(op.func, "_schema", None)
    return schema is not None and schema.is_mutable


def _of_memory(traced: Traced, memory: int, without: set[fx.Node]) -> Iterator[fx.Node]:
    """The tensors that lie in a memory."""
    return (node for node, other in traced.memory.items() if other == memory and node not in without)


def _given(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")
