"""Find the Add & Norms of a graph that one fused call can replace, and say why others cannot be replaced.

A sum is any add of two tensors of one shape: x + Sublayer(x), the end of the stream, embeddings. Each check below returns the
reason why an Add & Norm stays as it is, or None. Whether the fused call computes the same numbers is checked in `fused_call`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from addnorm.fusion.boundary import Match, dtype_name, match_sum
from addnorm.fusion.graph import TracedGraph, contexts_of, example_value, is_number, size_expr
from addnorm.stream.dataflow.arithmetic import match_terms
from addnorm.stream.dataflow.graph import CONSTANT, NOISE, Op, Value
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.norms import find_norms

__all__ = ["find_matches"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

Order = Mapping[fx.Node, int]
Contexts = Mapping[fx.Node, Any]


def find_matches(
    graph: fx.GraphModule, traced: TracedGraph, check: Callable[[Match], str | None] = lambda match: None
) -> list[Match]:
    """Return the Add & Norms of a graph in order; those that cannot be fused have a reason.

    Args:
        graph: the graph from torch.compile's frontend.
        traced: its data flow.
        check: last check of an Add & Norm; it returns the reason why it cannot be fused, or None.
    """
    order = {node: k for k, node in enumerate(graph.graph.nodes)}
    contexts = contexts_of(graph)
    matches: list[Match] = []
    fused: dict[Value, Match] = {}  # by their sum
    for norm in sorted(find_norms(traced.flow, proven=False), key=lambda norm: norm.y.index):
        match = match_sum(norm)
        if match is None:
            continue
        if match.sum in fused:
            match.reason = f"its sum is already fused with the norm in {fused[match.sum].norm.path}"
        else:
            match.reason = (
                _find_nodes(match, traced, order, contexts) or _overlap(match, fused.values()) or check(match)
            )
            if match.reason is None:
                fused[match.sum] = match
        matches.append(match)
    return matches


def _overlap(match: Match, fused: Iterable[Match]) -> str | None:
    """Check that the add is no part of another norm, as that of a bias is for a sum of shape (d,)."""
    norms = (other.norm.path for other in fused if match.add in other.inner)
    return next((f"its add is a part of the norm in {path}, which is fused" for path in norms), None)


OTHER_FORMULAS: dict[str, Callable[[Norm], bool]] = {
    "its norm divides by the L2 norm, not by the root mean square": lambda norm: (
        norm.kind == "scale" or norm.uses_length
    ),
    "its norm uses the unbiased variance (d - 1)": lambda norm: norm.unbiased,
    "its norm adds eps outside the square root": lambda norm: norm.eps_outside,
    "its norm has eps as the least value of the square root": lambda norm: norm.eps_role == "bound",
}


def _find_nodes(match: Match, traced: TracedGraph, order: Order, contexts: Contexts) -> str | None:
    """Set the nodes of an Add & Norm; return the reason if it cannot be fused."""
    for formula, applies in OTHER_FORMULAS.items():
        if applies(match.norm):
            return formula
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _find_add(match, traced, order),
        lambda: _find_parameters(match, traced),
        lambda: _find_norm(match, traced, order),
        lambda: _find_views(match, traced),
        lambda: _check_contexts(match, contexts),
        lambda: _check_add_in_place(match, traced, order),
        lambda: _check_norm_in_place(match, traced, order),
        lambda: _check_saved_sum(match, traced, order),
        lambda: _check_detached(match, traced),
        lambda: _check_varying_numbers(match, traced),
        lambda: _check_late_parameters(match, traced, order, contexts),
    )
    return next((reason for check in checks if (reason := check()) is not None), None)


# The nodes.


def _find_add(match: Match, traced: TracedGraph, order: Order) -> str | None:
    op = match.sum.op
    assert op is not None
    node = traced.node_of[op]
    if node in traced.transformed:
        return "it runs inside a torch.func transform"
    terms = match_terms(op)
    assert terms is not None
    if op.name != "add" or any(term.factor != 1.0 or term.scale is not None for term in terms):
        return "its add has a factor" if op.name == "add" else f"its add is torch.{op.name}"
    inside = f"its add is computed inside {_target_name(node)}"
    if [other for other in traced.ops_of[node] if other is not op and "view" not in other.traits]:
        return inside
    operands = tuple(traced.nodes.get(term.value) for term in terms)
    z = tuple(other for other, value in traced.values.items() if value is match.sum)
    if node not in z or any(operand is None or order[operand] > order[node] for operand in operands):
        return inside
    match.add, match.z = node, z
    match.operands = tuple(operand for operand in operands if operand is not None)
    x, branch = (example_value(operand) for operand in match.operands)
    if not isinstance(x, Tensor) or not isinstance(branch, Tensor):
        return inside
    return _check_operands(x, branch)


def _check_operands(x: Tensor, branch: Tensor) -> str | None:
    if not _same_shape(x, branch):
        return "its add broadcasts"
    if x.dtype not in DTYPES or branch.dtype not in DTYPES:
        return f"it adds {dtype_name(x.dtype)} and {dtype_name(branch.dtype)}"
    if x.device != branch.device:
        return f"it adds tensors on {x.device} and {branch.device}"
    return None


def _same_shape(x: Tensor, other: Tensor) -> bool:
    """Return whether two shapes are equal for all sizes that the graph may run with."""
    if x.dim() != other.dim():
        return False
    return all(size_expr(m) == size_expr(n) for m, n in zip(x.shape, other.shape, strict=True))


def _find_parameters(match: Match, traced: TracedGraph) -> str | None:
    d = match.sum.shape[-1]
    if match.norm.x.shape[-1:] != (d,):
        return "its norm is not over the last dimension of its sum"
    for name in ("weight", "bias"):
        value: Value | None = getattr(match.norm, name)
        if value is None:
            continue
        node = traced.nodes.get(value)
        if node is None:
            source = _target_name(traced.node_of[value.op]) if value.op is not None else "another call"
            return f"its {name} is computed inside {source}"
        if value.tensor.numel() != d:
            return f"its {name} is one number, not one for each of {d} features"
        if value.tensor.dtype not in DTYPES:
            return f"its {name} is {dtype_name(value.tensor.dtype)}"
        setattr(match, name, node)
    return None


def _find_norm(match: Match, traced: TracedGraph, order: Order) -> str | None:
    value = match.norm.y
    while (cast := _sole_cast(value)) is not None and cast in traced.nodes:
        value = cast
    y = tuple(node for node, other in traced.values.items() if other is value)
    if not y:
        assert value.op is not None
        return f"its norm is computed inside {_target_name(traced.node_of[value.op])}"
    match.y = y
    inner = _nodes_between(y[0], {*match.z, match.weight, match.bias}, traced)
    if inner is None:
        return "its norm depends on more than the sum and its parameters"
    match.inner = sorted(inner, key=order.__getitem__)
    return None


def _sole_cast(value: Value) -> Value | None:
    """Return the result of a cast of the value, if the cast is its only reader."""
    users = {*value.users}
    op = next(iter(users)) if len(users) == 1 else None
    if op is None or op.name != "_to_copy" or op.outputs[0].tensor.dtype not in DTYPES:
        return None
    return op.outputs[0] if op.outputs[0].tensor.device == value.tensor.device else None


def _nodes_between(y: fx.Node, ends: set[fx.Node | None], traced: TracedGraph) -> set[fx.Node] | None:
    """Return the nodes that compute y from the ends; None if they read anything else but constants."""
    inner: set[fx.Node] = set()
    todo = [y]
    while todo:
        node = todo.pop()
        if node in inner or node in ends or is_number(example_value(node)):
            continue
        if node.op == "placeholder" or (node.op == "get_attr" and traced.kind(node) != CONSTANT):
            return None
        inner.add(node)
        todo += node.all_input_nodes
    return inner


def _find_views(match: Match, traced: TracedGraph) -> str | None:
    """Set the views through which the norm reads the sum, if they change its shape."""
    z, y = example_value(match.z[0]), example_value(match.y[0])
    if match.norm.y.shape == match.sum.shape and _same_shape(y, z):
        return None
    value, views = max((_views_of_sum(match, op) for op in match.norm.ops), key=lambda pair: len(pair[1]))
    nodes = dict.fromkeys(traced.node_of[op] for op in reversed(views))
    if (
        any("view" not in op.traits for node in nodes for op in traced.ops_of[node])
        or value.shape != match.norm.y.shape
    ):
        return f"its sum has the shape {match.sum.shape}, and its norm {match.norm.y.shape}"
    match.views = tuple(node for node in nodes if any("copy" not in op.traits for op in traced.ops_of[node]))
    return None


def _views_of_sum(match: Match, op: Op) -> tuple[Value, list[Op]]:
    """Return the view of the sum that an operator reads, and the operators that made it, the last one first."""
    for start in op.inputs:
        value, views = start, []
        while value is not match.sum and value.op is not None and "view" in value.op.traits and value.op.inputs:
            views.append(value.op)
            value = value.op.inputs[0]
        if value is match.sum:
            return start, views
    return match.sum, []


def _target_name(node: fx.Node) -> str:
    target = node.target
    return str(getattr(target, "__name__", target)) if not isinstance(target, str) else target


# Side effects: differences that fusing would make for other operators, for autograd or for a later call.


def _check_contexts(match: Match, contexts: Contexts) -> str | None:
    assert match.add is not None
    if any(contexts[node] != contexts[match.add] for node in match.inner):
        return "autocast or the grad mode changes between the add and the norm"
    return None


def _check_add_in_place(match: Match, traced: TracedGraph, order: Order) -> str | None:
    op, add = match.sum.op, match.add
    assert op is not None
    assert add is not None
    if not _is_in_place(op):
        return None
    if not any(traced.memory.get(node) == traced.memory[add] for node in match.operands):
        return "its add writes into memory of neither operand"
    for node in _nodes_in_memory(traced, traced.memory[add], {*match.z}):
        if _is_external(node):
            return "its add writes in place into an input or a buffer"
        if order[node] < order[add] and any(order[user] > order[add] for user in node.users):
            return "its add writes in place into memory that is read later through another view"
    return None


def _check_norm_in_place(match: Match, traced: TracedGraph, order: Order) -> str | None:
    inside = {*match.inner, *match.y}
    for writer, memory in _in_place_writes(match.inner, traced):
        for node in _nodes_in_memory(traced, memory, inside):
            if _is_external(node) or any(order[user] > order[writer] and user not in inside for user in node.users):
                return "its norm writes in place into memory that is read elsewhere"
    return None


def _check_saved_sum(match: Match, traced: TracedGraph, order: Order) -> str | None:
    """Check that the sum is not modified later: the fused call saves it for backward, a decomposed norm may not."""
    if not example_value(match.y[0]).requires_grad:
        return None
    assert match.add is not None
    last = max(order[match.add], *(order[node] for node in match.inner))
    memory = traced.memory[match.add]
    later = [node for node in traced.ops_of if order[node] > last]
    if any(written == memory for _, written in _in_place_writes(later, traced)):
        return "its sum, which backward needs, is modified in place later"
    return None


def _check_detached(match: Match, traced: TracedGraph) -> str | None:
    ops = (op for node in match.inner for op in traced.ops_of[node])
    if any(op.name == "detach" and op.inputs[0].kind != CONSTANT for op in ops):
        return "its norm detaches a part from the gradient"
    return None


def _check_varying_numbers(match: Match, traced: TracedGraph) -> str | None:
    """Check that no number, such as eps, differs between calls of the graph."""
    assert match.add is not None
    width = size_expr(example_value(match.z[0]).shape[-1])
    for node in (match.add, *match.inner):
        if all("view" in op.traits for op in traced.ops_of[node]):
            continue
        inputs = [example_value(other) for other in node.all_input_nodes]
        symbols = [size_expr(value) for value in inputs if isinstance(value, SYMBOLS)]
        if any(expr != width and not getattr(expr, "is_number", True) for expr in symbols):
            return "it uses a number that may differ between calls"
    return None


def _check_late_parameters(match: Match, traced: TracedGraph, order: Order, contexts: Contexts) -> str | None:
    """Check that a weight or bias that is computed after the add is the same when computed before it."""
    assert match.add is not None
    todo = [node for node in (match.weight, match.bias) if node is not None]
    while todo:
        node = todo.pop()
        if order[node] < order[match.add]:
            continue
        ops = traced.ops_of[node]
        changes = node is match.add or traced.kind(node) & NOISE or contexts[node] != contexts[match.add]
        if changes or any(_is_in_place(op) or op.outputs[0].part == "memory" for op in ops):
            return "its weight or bias is computed after the add and cannot be moved before it"
        todo += node.all_input_nodes
    return None


def _in_place_writes(nodes: Iterable[fx.Node], traced: TracedGraph) -> Iterator[tuple[fx.Node, int]]:
    """Yield the nodes that write in place, each with the number of the memory that it writes."""
    for node in nodes:
        for op in traced.ops_of.get(node, ()):
            if _is_in_place(op):
                yield from ((node, out.tensor.untyped_storage()._cdata) for out in op.outputs)


def _is_in_place(op: Op) -> bool:
    schema = getattr(op.func, "_schema", None)
    return schema is not None and schema.is_mutable


def _nodes_in_memory(traced: TracedGraph, memory: int, without: set[fx.Node]) -> Iterator[fx.Node]:
    return (node for node, other in traced.memory.items() if other == memory and node not in without)


def _is_external(node: fx.Node) -> bool:
    """Return whether a node is an input, a parameter or a buffer."""
    return node.op in ("placeholder", "get_attr")
