"""Find the Add & Norms of a graph that one fused call can replace, and say why others cannot be replaced.

A sum is any add of two tensors of one shape: x + Sublayer(x), the end of the stream, embeddings. Each function below finds a
part of an Add & Norm or checks one condition; it raises `NotFusableError` with the reason why the Add & Norm stays as it is.
Whether the fused call computes the same numbers is checked in `fused_call`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from torch import Tensor, fx

from addnorm._util.arguments import FLOAT_DTYPES
from addnorm.fusion.graph import (
    SYMBOLS,
    TracedGraph,
    example_value,
    is_external,
    is_in_place,
    is_number,
    size_expr,
)
from addnorm.fusion.match import Match, NotFusableError, dtype_name, match_sum
from addnorm.stream.dataflow.arithmetic import match_terms
from addnorm.stream.dataflow.graph import CONSTANT, NOISE, Op, Value, walk
from addnorm.stream.find.norm import Norm

OTHER_FORMULAS: dict[str, Callable[[Norm], bool]] = {
    "its norm divides by the L2 norm, not by the root mean square": lambda norm: (
        norm.kind == "scale" or norm.uses_length
    ),
    "its norm uses the unbiased variance (d - 1)": lambda norm: norm.unbiased,
    "its norm adds eps outside the square root": lambda norm: norm.eps_outside,
    "its norm has eps as the least value of the square root": lambda norm: norm.eps_role == "bound",
}


def find_matches(
    traced: TracedGraph, norms: Iterable[Norm], written: Container[Value], check: Callable[[Match], None]
) -> list[Match]:
    """Return the Add & Norms of a graph in order; those that cannot be fused have a reason.

    Args:
        traced: the data flow of the graph.
        norms: norms of the graph.
        written: sums that are written by a call of several streams.
        check: last check of an Add & Norm; it raises `NotFusableError`.
    """
    matches: list[Match] = []
    fused: dict[Value, Match] = {}  # by their sum
    for norm in norms:
        match = match_sum(norm)
        if match is None:
            continue
        matches.append(match)
        try:
            if match.sum in written:
                raise NotFusableError("its sum is written by a call of several streams")
            if match.sum in fused:
                raise NotFusableError(f"its sum is already fused with the norm in {fused[match.sum].norm.path}")
            check_formula(match)
            for find in (
                _find_add, _find_parameters, _find_norm, _find_views, _check_contexts, _check_add_in_place,
                check_norm_in_place, _check_saved_sum, _check_detached, _check_varying_numbers, _check_late_parameters,
            ):  # fmt: skip  # in this order: later ones read the nodes that earlier ones set
                find(match, traced)
            for other in fused.values():
                if match.add in other.inner:  # as the add of a bias of shape (d,)
                    raise NotFusableError(f"its add is a part of the norm in {other.norm.path}, which is fused")
            check(match)
            fused[match.sum] = match
        except NotFusableError as reason:
            match.reason = str(reason)
    return matches


def check_formula(match: Match) -> None:
    """Check that the fused call has the formula of the norm."""
    for reason, applies in OTHER_FORMULAS.items():
        if applies(match.norm):
            raise NotFusableError(reason)


# The nodes.


def _find_add(match: Match, traced: TracedGraph) -> None:
    op = match.sum.op
    assert op is not None
    node = traced.node_of[op]
    if node in traced.transformed:
        raise NotFusableError("it runs inside a torch.func transform")
    terms = match_terms(op)
    assert terms is not None
    if op.name != "add" or any(term.factor != 1.0 or term.scale is not None for term in terms):
        raise NotFusableError("its add has a factor" if op.name == "add" else f"its add is torch.{op.name}")
    operands = tuple(other for term in terms if (other := traced.nodes.get(term.value)) is not None)
    z = tuple(other for other, value in traced.values.items() if value is match.sum)
    examples = [example_value(operand) for operand in operands]
    if (
        any(other is not op and "view" not in other.traits for other in traced.ops_of[node])
        or node not in z
        or len(operands) < len(terms)
        or any(operand > node for operand in operands)
        or not all(isinstance(example, Tensor) for example in examples)
    ):
        raise NotFusableError(f"its add is computed inside {_target_name(node)}")
    match.add, match.z, match.operands = node, z, operands
    x, branch = examples
    if not same_shape(x, branch):
        raise NotFusableError("its add broadcasts")
    if x.dtype not in FLOAT_DTYPES or branch.dtype not in FLOAT_DTYPES:
        raise NotFusableError(f"it adds {dtype_name(x.dtype)} and {dtype_name(branch.dtype)}")
    if x.device != branch.device:
        raise NotFusableError(f"it adds tensors on {x.device} and {branch.device}")


def same_shape(x: Tensor, other: Tensor) -> bool:
    """Return whether two shapes are equal for all sizes that the graph may run with."""
    return [*map(size_expr, x.shape)] == [*map(size_expr, other.shape)]


def _find_parameters(match: Match, traced: TracedGraph) -> None:
    d = match.sum.shape[-1]
    if match.norm.x.shape[-1:] != (d,):
        raise NotFusableError("its norm is not over the last dimension of its sum")

    def find(name: str, value: Value | None) -> fx.Node | None:
        if value is None:
            return None
        node = traced.nodes.get(value)
        if node is None:
            source = _target_name(traced.node_of[value.op]) if value.op is not None else "another call"
            raise NotFusableError(f"its {name} is computed inside {source}")
        if value.tensor.numel() != d:
            raise NotFusableError(f"its {name} is one number, not one for each of {d} features")
        if value.tensor.dtype not in FLOAT_DTYPES:
            raise NotFusableError(f"its {name} is {dtype_name(value.tensor.dtype)}")
        return node

    match.weight = find("weight", match.norm.weight)
    match.bias = find("bias", match.norm.bias)


def _find_norm(match: Match, traced: TracedGraph) -> None:
    value = match.norm.y
    while (cast := sole_cast(value)) is not None and cast in traced.nodes:
        value = cast
    match.y = tuple(node for node, other in traced.values.items() if other is value)
    if not match.y:
        assert value.op is not None
        raise NotFusableError(f"its norm is computed inside {_target_name(traced.node_of[value.op])}")
    match.inner = collect_inner(traced, match.y[:1], {*match.z, match.weight, match.bias})


def collect_inner(
    traced: TracedGraph, results: Iterable[fx.Node], ends: Container[fx.Node | None]
) -> tuple[fx.Node, ...]:
    """Return the nodes that compute the results from `ends`, in order."""

    def is_inside(node: fx.Node) -> bool:
        return node not in ends and not is_number(example_value(node))

    inner = [*filter(is_inside, walk(results, lambda node: node.all_input_nodes if is_inside(node) else ()))]
    if any(node.op == "placeholder" or (node.op == "get_attr" and traced.kind(node) != CONSTANT) for node in inner):
        raise NotFusableError("its norm depends on more than the sum and its parameters")
    return tuple(sorted(inner))


def sole_cast(value: Value) -> Value | None:
    """Return the result of a cast of `value`, if the cast is its only reader and to a supported dtype; else None."""
    users = {*value.users}
    op = next(iter(users)) if len(users) == 1 else None
    if op is None or op.name != "_to_copy" or op.outputs[0].tensor.dtype not in FLOAT_DTYPES:
        return None
    return op.outputs[0] if op.outputs[0].tensor.device == value.tensor.device else None


def _find_views(match: Match, traced: TracedGraph) -> None:
    """Set the views through which the norm reads the sum, if they change its shape."""
    z, y = example_value(match.z[0]), example_value(match.y[0])
    if match.norm.y.shape == match.sum.shape and same_shape(y, z):
        return
    value, views = max((_views_of_sum(match, op) for op in match.norm.ops), key=lambda pair: len(pair[1]))
    nodes = dict.fromkeys(traced.node_of[op] for op in reversed(views))
    has_others = any("view" not in op.traits for node in nodes for op in traced.ops_of[node])
    if has_others or value.shape != match.norm.y.shape:
        raise NotFusableError(f"its sum has the shape {match.sum.shape}, and its norm {match.norm.y.shape}")
    match.views = tuple(node for node in nodes if any("copy" not in op.traits for op in traced.ops_of[node]))


def _views_of_sum(match: Match, op: Op) -> tuple[Value, list[Op]]:
    """Return the form of the sum that an operator reads, and the views that made it from the sum, the last one first."""
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


def _check_contexts(match: Match, traced: TracedGraph) -> None:
    if any(traced.contexts[node] != traced.contexts[match.add] for node in match.inner):
        raise NotFusableError("autocast or the grad mode changes between the add and the norm")


def _check_add_in_place(match: Match, traced: TracedGraph) -> None:
    op, add = match.sum.op, match.add
    assert op is not None
    if not is_in_place(op):
        return
    if not any(traced.memory.get(node) == traced.memory[add] for node in match.operands):
        raise NotFusableError("its add writes into memory of neither operand")
    for node in traced.nodes_in_memory(traced.memory[add], {*match.z}):
        if is_external(node):
            raise NotFusableError("its add writes in place into an input or a buffer")
        if node < add and any(user > add for user in node.users):
            raise NotFusableError("its add writes in place into memory that is read later through another view")


def check_norm_in_place(match: Match, traced: TracedGraph) -> None:
    """Check that memory that a node of the match writes in place is not read outside of the match."""
    inside = {*match.inner, *match.y}
    for writer, memory in in_place_writes(match.inner, traced):
        for node in traced.nodes_in_memory(memory, inside):
            if is_external(node) or any(user > writer and user not in inside for user in node.users):
                raise NotFusableError("its norm writes in place into memory that is read elsewhere")


def _check_saved_sum(match: Match, traced: TracedGraph) -> None:
    """Check that the sum is not modified later: the fused call saves it for backward, a decomposed norm may not."""
    if not example_value(match.y[0]).requires_grad:
        return
    last = max(match.add, *match.inner)
    later = [node for node in traced.ops_of if node > last]
    if any(written == traced.memory[match.add] for _, written in in_place_writes(later, traced)):
        raise NotFusableError("its sum, which backward needs, is modified in place later")


def _check_detached(match: Match, traced: TracedGraph) -> None:
    ops = (op for node in match.inner for op in traced.ops_of[node])
    if any(op.name == "detach" and op.inputs[0].kind != CONSTANT for op in ops):
        raise NotFusableError("its norm detaches a part from the gradient")


def _check_varying_numbers(match: Match, traced: TracedGraph) -> None:
    check_numbers((match.add, *match.inner), traced, example_value(match.z[0]).shape[-1])


def check_numbers(nodes: Iterable[fx.Node], traced: TracedGraph, width: Any = None) -> None:
    """Check that no number, such as eps, may differ between calls of the graph, except for `width`."""
    for node in nodes:
        if all("view" in op.traits for op in traced.ops_of[node]):
            continue
        inputs = [example_value(other) for other in node.all_input_nodes]
        symbols = [size_expr(value) for value in inputs if isinstance(value, SYMBOLS)]
        if any(expr != size_expr(width) and not getattr(expr, "is_number", True) for expr in symbols):
            raise NotFusableError("it uses a number that may differ between calls")


def _check_late_parameters(match: Match, traced: TracedGraph) -> None:
    """Check that a weight or bias that is computed after the add is the same when computed before it."""
    todo = [*match.parameters.values()]
    while todo:
        node = todo.pop()
        if node < match.add:
            continue
        changes = node is match.add or traced.kind(node) & NOISE
        changes = changes or traced.contexts[node] != traced.contexts[match.add]
        if changes or any(is_in_place(op) or op.outputs[0].part == "memory" for op in traced.ops_of[node]):
            raise NotFusableError("its weight or bias is computed after the add and cannot be moved before it")
        todo += node.all_input_nodes


def in_place_writes(nodes: Iterable[fx.Node], traced: TracedGraph) -> Iterator[tuple[fx.Node, int]]:
    """Yield the nodes that write in place, each with the number of the memory that it writes."""
    for node in nodes:
        for op in traced.ops_of.get(node, ()):
            if is_in_place(op):
                yield from ((node, out.tensor.untyped_storage()._cdata) for out in op.outputs)


# Those of the functions above that also serve a norm that reads n streams (`streams`), in this order.
NORM_CHECKS = (
    _find_parameters, _find_norm, _check_contexts, check_norm_in_place, _check_detached, _check_varying_numbers,
)  # fmt: skip
