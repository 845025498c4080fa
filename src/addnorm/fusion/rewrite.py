"""Rewriting of a graph: a fused call takes the place of each Add & Norm, at the position of the add.

The call's results get the strides of the original tensors, because views later in the graph depend on them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from addnorm.fusion.fused_call import apply_view, call_arguments, operation_of
from addnorm.fusion.graph import empty_like, example_value, same_layout, writes_in_place
from addnorm.fusion.match import Match


def read_written_values(graph: fx.Graph) -> None:
    """Let nodes after an in-place call read its result instead of its argument, which is the same tensor."""
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
        current: nodes of the original graph, with those of the copy that return their results; this call changes its own.
    """
    add, residual, branch = (current[node] for node in (match.add, *match.operands))
    # A cast without effect returns y too.
    replaced = {current[node] for node in (*match.inner, *match.z, *match.y)}
    parameters = [node and _move_before(current[node], add) for node in (match.weight, match.bias)]
    returns_residual = match.returns_residual
    layout = empty_like(example_value(match.z[0]), "meta")
    order = dimension_order(layout)
    in_rows = order[-1:] == [len(order) - 1]  # else features are not adjacent in memory, and the call copies
    with graph.inserting_before(add):
        weight, bias = (node and _flatten(graph, node) for node in parameters)
        if in_rows:
            residual, branch = (_permute(graph, node, order) for node in (residual, branch))
        call = graph.call_function(
            operation_of(match), (residual, branch, weight, bias),
            call_arguments(match) | ({"return_residual": True} if returns_residual else {}),
        )  # fmt: skip
        call.meta["nn_module_stack"] = match.add.meta.get("nn_module_stack", {})
        y = z = call
        if returns_residual:
            y, z = (graph.call_function(operator.getitem, (call, k)) for k in range(2))
        for node in (y, z):
            node.meta["example_value"] = example_value(match.z[0]).permute(order if in_rows else sorted(order))
        if in_rows:
            y, z = _permute_back(graph, y, order), _permute_back(graph, z, order) if returns_residual else z
        else:
            z = _copy_in_order(graph, z, order) if returns_residual else z
            layout = torch.empty_like(layout, memory_format=torch.contiguous_format)
        for view in match.views:
            for size in current[view].all_input_nodes[1:]:
                _move_before(size, call)
            y, layout = _copy_view(graph, current[view], y), apply_view(view, layout)
        if not same_layout(layout, expected := empty_like(example_value(match.y[0]), "meta")):
            y = _copy_in_order(graph, y, dimension_order(expected))
    y.meta["example_value"] = example_value(match.y[0])
    z.meta["example_value"] = example_value(match.z[0])
    for node, new in (*((node, y) for node in match.y), *((node, z) for node in match.z if returns_residual)):
        current[node].replace_all_uses_with(new)
        current[node] = new
    for node in sorted(replaced, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _move_before(node: fx.Node, add: fx.Node) -> fx.Node:
    """Move a parameter or a size, and what it is computed from, before the add."""
    if not node < add:
        for other in node.all_input_nodes:
            _move_before(other, add)
        add.prepend(node)
    return node


def _flatten(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return node if len(example_value(node).shape) == 1 else _call_method(graph, "reshape", node, (-1,))


def _copy_view(graph: fx.Graph, view: fx.Node, y: fx.Node) -> fx.Node:
    """Return the same view of y."""
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
