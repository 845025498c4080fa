"""Structural part of the proof of fused calls: all other nodes stay in place and read what they read before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from addnorm.fusion.boundary import Match
from addnorm.fusion.graph import TracedGraph, contexts_of, writes_in_place
from addnorm.fusion.tolerance import Difference
from addnorm.stream.dataflow.graph import NOISE

__all__ = ["Original", "failure", "wiring_changes"]


class Original:
    """Copy of a graph before the rewrite.

    Attributes:
        graph: the copy.
        twins: node of the graph -> its copy.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph: fx.Graph = graph.__deepcopy__()
        self.twins = dict(zip(graph.nodes, self.graph.nodes, strict=True))


def failure(name: str) -> Difference:
    """Return a difference that no tolerance accepts."""
    return Difference(name, math.inf, None, 0.0, 0.0)


def wiring_changes(
    graph: fx.GraphModule, original: Original, traced: TracedGraph, matches: Sequence[Match],
    replaced: Mapping[fx.Node, fx.Node], contexts: Mapping[fx.Node, Sequence[Any]], new: Mapping[fx.Node, Match],
) -> Iterator[Difference]:  # fmt: skip
    """Yield a failure for each change of a graph outside of the Add & Norms that were replaced.

    Args:
        graph: the graph after the rewrite.
        original: the graph before it.
        traced: the data flow of the graph before it.
        matches: the Add & Norms that were replaced.
        replaced: nodes of the graph before -> the nodes that replaced them.
        contexts: of the nodes before, as `contexts_of` returns them.
        new: nodes that compute the results of a call, with its Add & Norm.
    """
    current = {twin: replaced.get(node, node) for node, twin in original.twins.items()}
    contexts_now = contexts_of(graph)
    for node in graph.graph.nodes:
        twin = original.twins.get(node)
        if twin is None:
            add = new[node].add if node in new else None
            if add is None:
                if node.users or writes_in_place(node):
                    yield failure(f"new node {node.name}")
            elif contexts_now[node] != contexts[add]:
                yield failure(f"contexts of {node.name}")
            continue
        expected = fx.map_arg((twin.args, twin.kwargs), current.__getitem__)
        if (node.op, node.target, node.args, node.kwargs) != (twin.op, twin.target, *expected):
            yield failure(f"arguments of {node.name}")
        if contexts_now[node] != contexts[node]:
            yield failure(f"contexts of {node.name}")
    yield from _missing_nodes(graph.graph, original, traced, matches)
    yield from _moved_nodes(graph.graph, original, traced, matches)


def _missing_nodes(
    graph: fx.Graph, original: Original, traced: TracedGraph, matches: Sequence[Match]
) -> Iterator[Difference]:
    """Yield a failure for each node that is gone and computes no replaced result, or whose writes are read elsewhere."""
    here, order = {*graph.nodes}, {node: k for k, node in enumerate(original.twins)}
    inside = {node for match in matches for node in (*match.inner, *match.z, *match.y)}
    for node in original.twins:
        if node in here:
            continue
        if node not in inside:
            yield failure(f"missing node {node.name}")
        elif writes_in_place(node) and node in traced.memory:
            memory = traced.memory[node]
            others = [other for other in order if traced.memory.get(other) == memory and other not in inside]
            readers = (user for other in others for user in original.twins[other].users)
            position = original.twins[node]
            gone = {original.twins[other] for other in inside}
            is_read = any(reader > position and reader not in gone for reader in readers)
            if is_read or any(other.op in ("placeholder", "get_attr") for other in others):
                yield failure(f"memory written by {node.name}")


def _moved_nodes(
    graph: fx.Graph, original: Original, traced: TracedGraph, matches: Iterable[Match]
) -> Iterator[Difference]:
    """Yield a failure for each node that has another place among the others.

    What a call reads may move before it, if it neither draws random numbers nor writes in place.
    """
    node_of, movable = {twin: node for node, twin in original.twins.items()}, set[fx.Node]()
    for match in matches:
        assert match.add is not None
        todo = [original.twins[node] for node in (match.weight, match.bias) if node is not None]
        todo += [size for view in match.views for size in original.twins[view].all_input_nodes[1:]]
        while todo:
            twin = todo.pop()
            if twin > original.twins[match.add] and node_of[twin] not in movable:
                movable.add(node_of[twin])
                todo += twin.all_input_nodes
    now = [node for node in graph.nodes if node in original.twins and node not in movable]
    here = {*now}
    before = [node for node in original.twins if node in here]
    misplaced = [node for node, other in zip(now, before, strict=True) if node is not other]
    misplaced += [node for node in movable if traced.kind(node) & NOISE or writes_in_place(node)]
    yield from (failure(f"place of {node.name}") for node in misplaced)
