"""A graph with its Add & Norms as fused calls: each stands where the add stood."""

from __future__ import annotations

import operator

import torch
from torch import fx

from addnorm.fusion import call
from addnorm.fusion.layout import laid, like, order_of, ordered, same_layout, turned
from addnorm.fusion.pattern import Match
from addnorm.fusion.traced import given_to, writes_in_place

__all__ = ["rewrite", "straighten"]


def straighten(graph: fx.Graph) -> None:
    """What is written in place is read as what the writing call returned, which is the same tensor."""
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


def rewrite(graph: fx.Graph, match: Match, now: dict[fx.Node, fx.Node]) -> None:
    """Makes one boundary a fused call; `now` is what stands for nodes that are no more."""
    assert match.add is not None
    residual, branch = (now.get(node, node) for node in match.operands)
    gains = [_hoisted(node, match.add) for node in (match.weight, match.bias)]
    replaced = {*match.inner, *match.z}
    stream = any(user not in replaced for node in match.z for user in node.users)
    lies = like(given_to(match.z[0]))
    order = order_of(lies)
    rows = order[-1:] == [len(order) - 1]  # else it lies feature by feature, and is copied
    with graph.inserting_before(match.add):
        weight, bias = (None if gain is None else _flat(graph, gain) for gain in gains)
        if rows:
            residual, branch = (ordered(graph, node, order) for node in (residual, branch))
        fused = graph.call_function(
            call.fused(match), (residual, branch, weight, bias),
            call.arguments(match) | ({"return_residual": True} if stream else {}),
        )  # fmt: skip
        fused.meta["nn_module_stack"] = match.add.meta.get("nn_module_stack", {})
        y = z = fused
        if stream:
            y, z = (graph.call_function(operator.getitem, (fused, k)) for k in range(2))
        for node in (y, z):
            node.meta["example_value"] = given_to(match.z[0]).permute(order if rows else sorted(order))
        if rows:
            y, z = (turned(graph, node, order) for node in (y, z))
        else:
            z = laid(graph, z, order) if stream else z
            lies = torch.empty_like(lies, memory_format=torch.contiguous_format)
        for view in match.views:
            for size in view.all_input_nodes[1:]:
                _hoisted(size, fused)
            y, lies = _again(graph, view, y), call.viewed(view, lies)
        if not same_layout(lies, wanted := like(given_to(match.y[0]))):
            y = laid(graph, y, order_of(wanted))
    y.meta["example_value"] = given_to(match.y[0])
    z.meta["example_value"] = given_to(match.z[0])
    for node, new in (*((node, y) for node in match.y), *((node, z) for node in match.z if stream)):
        node.replace_all_uses_with(new)
        now[node] = new
    _erase(graph, [*match.z, *match.inner])


def _hoisted(node: fx.Node | None, add: fx.Node) -> fx.Node | None:
    """What is computed after the add, computed before it: a gain, which depends on parameters alone, or a size."""
    if node is None or node < add:
        return node
    for other in node.all_input_nodes:
        _hoisted(other, add)
    add.prepend(node)
    return node


def _flat(graph: fx.Graph, gain: fx.Node) -> fx.Node:
    if len(given_to(gain).shape) == 1:
        return gain
    flat = graph.call_method("reshape", (gain, (-1,)))
    flat.meta["example_value"] = given_to(gain).reshape(-1)
    return flat


def _again(graph: fx.Graph, view: fx.Node, y: fx.Node) -> fx.Node:
    """The same view of y."""
    copy = graph.create_node(view.op, view.target, (y, *view.args[1:]), dict(view.kwargs))
    copy.meta["example_value"] = given_to(view)
    return copy


def _erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Takes out those that nobody reads any more."""
    for node in sorted(set(nodes), reverse=True):
        if not node.users:
            graph.erase_node(node)
