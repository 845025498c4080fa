"""Structural part of the proof of fused calls: all other nodes stay in place and read what they read before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from addnorm.fusion.graph import TracedGraph, contexts_of, is_external, writes_in_place
from addnorm.fusion.match import Match
from addnorm.fusion.tolerance import Difference, failure
from addnorm.stream.dataflow.graph import NOISE


class Rewrite:
    """Rewrite of a graph, and the graph before it.

    Args:
        traced: the data flow of the graph, which is not rewritten yet.
        matches: the Add & Norms that fused calls replace.

    Attributes:
        graph: the graph, which the caller rewrites.
        original: a copy of the graph before.
        twins: node of the graph -> its copy.
        replaced: nodes of the graph before -> the nodes that replaced them.
    """

    def __init__(self, traced: TracedGraph, matches: Sequence[Match]) -> None:
        self.traced, self.matches, self.graph = traced, matches, traced.graph
        self.original: fx.Graph = self.graph.graph.__deepcopy__()
        self.twins = dict(zip(self.graph.graph.nodes, self.original.nodes, strict=True))
        self.replaced: dict[fx.Node, fx.Node] = {}


def wiring_changes(rewrite: Rewrite, new: Mapping[fx.Node, Match]) -> Iterator[Difference]:
    """Yield a failure for each change of a graph outside of the Add & Norms that were replaced.

    Args:
        rewrite: the graph before and after.
        new: nodes that compute the results of a call, with its Add & Norm.
    """
    current = {twin: rewrite.replaced.get(node, node) for node, twin in rewrite.twins.items()}
    contexts, contexts_now = rewrite.traced.contexts, contexts_of(rewrite.graph)
    for node in rewrite.graph.graph.nodes:
        twin = rewrite.twins.get(node)
        if twin is not None:
            expected = fx.map_arg((twin.args, twin.kwargs), current.__getitem__)
            if (node.op, node.target, node.args, node.kwargs) != (twin.op, twin.target, *expected):
                yield failure(f"arguments of {node.name}")
        elif node not in new:
            if node.users or writes_in_place(node):
                yield failure(f"new node {node.name}")
            continue
        if contexts_now[node] != contexts[node if twin is not None else new[node].add]:
            yield failure(f"contexts of {node.name}")
    yield from _missing_nodes(rewrite)
    yield from _moved_nodes(rewrite)


def _missing_nodes(rewrite: Rewrite) -> Iterator[Difference]:
    """Yield a failure for each node that is gone and computes no replaced result, or whose writes are read elsewhere."""
    here, twins, memory = {*rewrite.graph.graph.nodes}, rewrite.twins, rewrite.traced.memory
    inside = {node for match in rewrite.matches for node in (*match.inner, *match.z, *match.y)}
    gone = {twins[node] for node in inside}
    for node in twins:
        if node in here:
            continue
        if node not in inside:
            yield failure(f"missing node {node.name}")
        elif writes_in_place(node) and node in memory:
            others = rewrite.traced.nodes_in_memory(memory[node], inside)
            readers = (user for other in others for user in twins[other].users)
            is_read = any(reader > twins[node] and reader not in gone for reader in readers)
            if is_read or any(map(is_external, others)):
                yield failure(f"memory written by {node.name}")


def _moved_nodes(rewrite: Rewrite) -> Iterator[Difference]:
    """Yield a failure for each node that has another place among the others.

    What a call reads may move before it, if it neither draws random numbers nor writes in place.
    """
    twins = rewrite.twins
    node_of, movable = {twin: node for node, twin in twins.items()}, set[fx.Node]()
    for match in rewrite.matches:
        todo = [twins[node] for node in (match.weight, match.bias) if node is not None]
        todo += [size for view in match.views for size in twins[view].all_input_nodes[1:]]
        while todo:
            twin = todo.pop()
            if twin > twins[match.add] and node_of[twin] not in movable:
                movable.add(node_of[twin])
                todo += twin.all_input_nodes
    now = [node for node in rewrite.graph.graph.nodes if node in twins and node not in movable]
    here = {*now}
    before = [node for node in twins if node in here]
    misplaced = [node for node, other in zip(now, before, strict=True) if node is not other]
    misplaced += [node for node in movable if rewrite.traced.kind(node) & NOISE or writes_in_place(node)]
    yield from (failure(f"place of {node.name}") for node in misplaced)
