"""Rewriting of a graph: a fused call takes the place of each Add & Norm, at the position of the add.

The call's results get the strides of the original tensors, because views later in the graph depend on them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from addnorm.boundary import add_norm_streams
from addnorm.fusion.axes import Operand
from addnorm.fusion.fused_call import apply_view, call_arguments, operation_of
from addnorm.fusion.graph import empty_like, example_value, same_layout, writes_in_place
from addnorm.fusion.match import Match
from addnorm.fusion.streams import StreamMatch
from addnorm.reference import compute_dtype

COEFFICIENTS = ("mix", "inject", "collapse")


def read_written_values(graph: fx.Graph) -> None:
    """Make nodes after an in-place call read the call's result instead of its argument, which is the same tensor."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if (
            writes_in_place(node)
            and node.target is not operator.setitem
            and node.args
            and isinstance(node.args[0], fx.Node)
        ):
            written = node.args[0]
            for user in [*written.users]:
                if order[user] > order[node]:
                    user.replace_input_with(written, node)


def insert_fused_call(graph: fx.Graph, match: Match, current: dict[fx.Node, fx.Node]) -> None:
    """Replace one Add & Norm by a fused call, in a copy of its graph.

    Args:
        graph: the copy, which is changed in place.
        match: an Add & Norm of the original graph that can be fused.
        current: node of the original graph -> the node of the copy that returns its result. The entries of the nodes that the
            call replaces are updated.
    """
    add, residual, branch = (current[node] for node in (match.add, *match.operands))
    parameters = [node and _move_before(current[node], add) for node in (match.weight, match.bias)]
    returns_residual = match.returns_residual
    layout = empty_like(example_value(match.z[0]), "meta")
    order = dimension_order(layout)
    in_rows = order[-1:] == [len(order) - 1]  # else features are not adjacent in memory, and the call copies
    call_order = order if in_rows else sorted(order)
    with graph.inserting_before(add):
        weight, bias = (node and _flatten(graph, node) for node in parameters)
        residual, branch = (_permute(graph, node, call_order) for node in (residual, branch))
        call = graph.call_function(
            operation_of(match), (residual, branch, weight, bias),
            call_arguments(match) | ({"return_residual": True} if returns_residual else {}),
        )  # fmt: skip
        call.meta["nn_module_stack"] = match.add.meta.get("nn_module_stack", {})
        y = z = call
        if returns_residual:
            y, z = (graph.call_function(operator.getitem, (call, k)) for k in range(2))
        y.meta["example_value"] = example_value(match.z[0]).permute(call_order)
        y = _permute_back(graph, y, call_order)
        if returns_residual:
            z = _result(graph, z, match.z, call_order, sorted(order))
        if not in_rows:
            layout = torch.empty_like(layout, memory_format=torch.contiguous_format)
        for view in match.views:
            for size in current[view].all_input_nodes[1:]:
                _move_before(size, call)
            y, layout = _copy_view(graph, current[view], y), apply_view(view, layout)
        if not same_layout(layout, expected := empty_like(example_value(match.y[0]), "meta")):
            y = _copy_in_order(graph, y, dimension_order(expected))
    y.meta["example_value"] = example_value(match.y[0])
    _replace(match.y, y, current)
    if returns_residual:
        _replace(match.z, z, current)


def _replace(nodes: Iterable[fx.Node], new: fx.Node, current: dict[fx.Node, fx.Node]) -> None:
    """Make all nodes that read the results of `nodes` read `new` instead."""
    for node in nodes:
        current[node].replace_all_uses_with(new)
        current[node] = new


def erase_unused(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase those of `nodes` that no other node reads."""
    for node in sorted(nodes, reverse=True):
        if not node.users:
            graph.erase_node(node)


def insert_streams_call(graph: fx.Graph, match: StreamMatch, current: dict[fx.Node, fx.Node]) -> None:
    """Replace a boundary of n streams, or a part of it, by one call, as `insert_fused_call` does."""
    assert match.before is not None
    n, rows, features = match.n, match.rows, match.features
    tails = {
        "mix": [n, match.source],
        "inject": [n],
        "collapse": [n],
        "branch": [features],
        "streams": [match.source, features],
    }
    like = example_value(match.tensor("streams").node)
    wide = compute_dtype(like)
    with graph.inserting_before(current[match.before]):
        arguments: dict[str, Any] = {}
        for name, operand in match.operands_of.items():
            if not isinstance(operand, Operand):
                arguments[name] = _fill(graph, operand, match.num_streams, like, wide)
                continue
            is_shared = operand.held <= {*tails[name]} and name in COEFFICIENTS
            per_feature = [features] if name == "collapse" and features in operand.held else []
            order = [*([] if is_shared else rows), *tails[name], *per_feature]
            node = _arrange(graph, current[operand.node], operand, order)
            if name in COEFFICIENTS and example_value(node).dtype != wide:
                node = _call_method(graph, "to", node, wide)
            if operand.number != 1.0:
                node = _call_method(graph, "mul", node, operand.number)
            arguments[name] = node
        arguments |= {name: _flatten(graph, current[node]) for name, node in match.parameters.items()}
        dtypes = {"streams_dtype": match.z, "out_dtype": match.y}
        arguments |= {
            name: dtype
            for name, nodes in dtypes.items()
            if nodes and (dtype := example_value(nodes[0]).dtype) != like.dtype
        }
        if match.y:
            arguments |= {"norm": match.norm.kind, "eps": match.norm.eps or 0.0}
        call = graph.call_function(
            add_norm_streams, (arguments.pop("streams"), arguments.pop("branch", None)), arguments
        )
        call.meta["nn_module_stack"] = match.add.meta.get("nn_module_stack", {})
        results = ((match.z, [n, features], match.written), (match.y, [features], [*rows, features]))
        for k, (nodes, tail, wanted) in enumerate(results):
            if nodes and wanted is not None:
                new = _result(graph, graph.call_function(operator.getitem, (call, k)), nodes, [*rows, *tail], wanted)
                _replace(nodes, new, current)


def _result(
    graph: fx.Graph, node: fx.Node, nodes: Sequence[fx.Node], axes: Sequence[int], wanted: Sequence[int]
) -> fx.Node:
    """Return a result of the call with the dimensions and the layout of the nodes that it replaces."""
    expected = example_value(nodes[0])
    order = [wanted.index(axis) for axis in axes]
    node.meta["example_value"] = torch.empty_like(expected.permute(order), memory_format=torch.contiguous_format)
    node = _permute(graph, node, sorted(range(len(order)), key=order.__getitem__))
    if not same_layout(empty_like(example_value(node), "meta"), layout := empty_like(expected, "meta")):
        node = _copy_in_order(graph, node, dimension_order(layout))
    node.meta["example_value"] = expected
    return node


def _arrange(graph: fx.Graph, node: fx.Node, operand: Operand, order: Sequence[int]) -> fx.Node:
    """Return the tensor of an operand, cut, with its axes in `order`.

    Dimensions without an axis are squeezed, and an axis that the tensor does not hold becomes a dimension of size 1.
    """
    for k, cut in enumerate(operand.cuts):
        node = node if cut is None else _call_method(graph, "narrow", node, k, *cut)
    empty = tuple(k for k, axis in enumerate(operand.axes) if axis is None)
    node = _call_method(graph, "squeeze", node, empty) if empty else node
    held = [axis for axis in operand.axes if axis is not None]
    node = _permute(graph, node, [held.index(axis) for axis in order if axis in held])
    for k, axis in enumerate(order):
        node = node if axis in held else _call_method(graph, "unsqueeze", node, k)
    return node


def _fill(graph: fx.Graph, number: float, size: int, like: Tensor, dtype: torch.dtype) -> fx.Node:
    node = graph.call_function(torch.full, ((size,), number), {"dtype": dtype, "device": like.device})
    node.meta["example_value"] = like.new_empty((size,), dtype=dtype)
    return node


def _move_before(node: fx.Node, add: fx.Node) -> fx.Node:
    """Move a parameter or a size, and the nodes from which it is computed, before the add."""
    if not node < add:
        for other in node.all_input_nodes:
            _move_before(other, add)
        add.prepend(node)
    return node


def _flatten(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return node if len(example_value(node).shape) == 1 else _call_method(graph, "reshape", node, (-1,))


def _copy_view(graph: fx.Graph, view: fx.Node, y: fx.Node) -> fx.Node:
    """Return the view of y that `view` is of its own input."""
    copy = graph.create_node(view.op, view.target, (y, *view.args[1:]), dict(view.kwargs))
    copy.meta["example_value"] = example_value(view)
    return copy


# Layout: the order of the dimensions in memory.


def dimension_order(tensor: Tensor) -> list[int]:
    """Return the dimensions by falling stride; in their usual order if the tensor is contiguous or not dense."""
    usual = list(range(tensor.dim()))
    order = sorted(usual, key=tensor.stride().__getitem__, reverse=True)
    is_dense = not tensor.is_contiguous() and tensor.permute(order).is_contiguous()
    return order if is_dense else usual


def _permute(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    return _call_method(graph, "permute", node, tuple(order)) if list(order) != sorted(order) else node


def _permute_back(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    return _permute(graph, node, sorted(order, key=list(order).__getitem__))


def _copy_in_order(graph: fx.Graph, node: fx.Node, order: Sequence[int]) -> fx.Node:
    """Return a copy whose dimensions have this order in memory."""
    return _permute_back(graph, _call_method(graph, "contiguous", _permute(graph, node, order)), order)


def _call_method(graph: fx.Graph, name: str, node: fx.Node, *args: Any) -> fx.Node:
    new = graph.call_method(name, (node, *args))
    new.meta["example_value"] = getattr(example_value(node), name)(*args)
    return new
