"""Structural part of the proof of fused calls: all other nodes stay in place and read what they read before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from torch import fx

from addnorm.fusion.graph import TracedGraph, contexts_of, is_external, writes_in_place
from addnorm.fusion.match import Match
from addnorm.fusion.tolerance import Difference, failure
from addnorm.stream.dataflow.graph import NOISE


class Rewrite:
    """Copy of a graph that the caller rewrites; the graph itself does not change.

    Args:
        traced: the data flow of the graph.
        matches: the Add & Norms that fused calls replace.

    Attributes:
        graph: the copy.
        copies: node of the graph -> its copy.
        current: node of the graph -> the node of the copy that returns its result now.
    """

    def __init__(self, traced: TracedGraph, matches: Sequence[Match]) -> None:
        self.traced, self.matches = traced, matches
        original = traced.graph.graph
        self.graph: fx.Graph = original.__deepcopy__()
        self.copies = dict(zip(original.nodes, self.graph.nodes, strict=True))
        for node, copy in self.copies.items():
            copy.__dict__.update(vars(node))  # what torch.compile's frontend sets there, and Inductor reads
        self.current = dict(self.copies)

    @cached_property
    def originals(self) -> dict[fx.Node, fx.Node]:
        """Node of the rewritten copy -> the node of the graph whose result it returns."""
        return {new: node for node, new in self.current.items()}

    def leaf_of(self, node: fx.Node) -> fx.Node:
        """Return the first node of the original graph that returns the same value as `node`.

        Dropout without effect, for example, returns the value of its input.
        """
        node, traced = self.originals.get(node, node), self.traced
        return traced.nodes[traced.values[node]] if node in traced.values else node


def wiring_changes(rewrite: Rewrite, new: Mapping[fx.Node, Match]) -> Iterator[Difference]:
    """Yield a failure for each change of a graph outside of the Add & Norms that were replaced.

    Args:
        rewrite: the graph before and after.
        new: nodes that compute the results of a call, with its Add & Norm.
    """
    copied = {copy: node for node, copy in rewrite.copies.items()}
    contexts, current = contexts_of(rewrite.graph), rewrite.current
    for node in rewrite.graph.nodes:
        before = copied.get(node)
        if before is not None:
            expected = fx.map_arg((before.args, before.kwargs), current.__getitem__)
            if (node.op, node.target, node.args, node.kwargs) != (before.op, before.target, *expected):
                yield failure(f"arguments of {node.name}")
        elif node not in new:
            if node.users or writes_in_place(node):
                yield failure(f"new node {node.name}")
            continue
        grad, *entered = rewrite.traced.contexts[new[node].add if before is None else before]
        if contexts[node] != (grad, *map(current.__getitem__, entered)):
            yield failure(f"contexts of {node.name}")
    yield from _missing_nodes(rewrite)
    yield from _moved_nodes(rewrite, copied)


def _missing_nodes(rewrite: Rewrite) -> Iterator[Difference]:
    """Yield a failure for each node that is gone and computes no replaced result, or whose writes are read elsewhere."""
    here, memory = {*rewrite.graph.nodes}, rewrite.traced.memory
    inside = {node for match in rewrite.matches for node in match.nodes}
    for node, copy in rewrite.copies.items():
        if copy in here:
            continue
        if node not in inside:
            yield failure(f"missing node {node.name}")
        elif writes_in_place(node) and node in memory:
            others = rewrite.traced.nodes_in_memory(memory[node], inside)
            is_read = any(user > node and user not in inside for other in others for user in other.users)
            if is_read or any(map(is_external, others)):
                yield failure(f"memory written by {node.name}")


def _moved_nodes(rewrite: Rewrite, copied: Mapping[fx.Node, fx.Node]) -> Iterator[Difference]:
    """Yield a failure for each node whose order among the nodes has changed.

    `copied` has the original of each copied node. The arguments of a fused call may move before the call, if they neither draw
    random numbers nor write in place.
    """
    movable = set[fx.Node]()
    for match in rewrite.matches:
        todo = [*match.parameters.values()]
        todo += [size for view in match.views for size in view.all_input_nodes[1:]]
        while todo:
            node = todo.pop()
            if node > match.add and node not in movable:
                movable.add(node)
                todo += node.all_input_nodes
    now = [copied[copy] for copy in rewrite.graph.nodes if copy in copied and copied[copy] not in movable]
    here = {*now}
    before = [node for node in rewrite.copies if node in here]
    misplaced = [node for node, other in zip(now, before, strict=True) if node is not other]
    misplaced += [node for node in movable if rewrite.traced.kind(node) & NOISE or writes_in_place(node)]
    yield from (failure(f"place of {node.name}") for node in misplaced)
