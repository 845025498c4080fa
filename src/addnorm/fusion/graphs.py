"""The graphs of one model: a backend of torch.compile that rewrites them, and tells which boundaries ran, and where."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from addnorm.fusion.backend import Graph, bodies, compiled, eager, fused_graph
from addnorm.fusion.pattern import Boundary, sum_of
from addnorm.fusion.traced import source_of
from addnorm.stream.find.inspect import capture_flow
from addnorm.stream.find.norms import find_norms

__all__ = ["Backend", "Graphs"]

Backend = Callable[[fx.GraphModule, Sequence[Any]], Graph]
OF_SELF = re.compile(r"L\['self'\]((?:\._modules\[[^\]]*\])*)\._parameters\[")
AS_BEFORE = {"fallback_random": True}  # of Inductor: random numbers are torch's
APART = "the frontend ends a graph between its add and its norm"
NONE = "the frontend makes no graph of it"


class Graphs:
    """The backend for one model.

    The frontend makes graphs anew for runs with gradients and without; it may also run one graph for several layers that
    are alike, and only the parameters that it is given tell them apart.

    Attributes:
        ran: while `watching`, the boundaries of each graph that ran, of runs without gradients and with.
    """

    def __init__(self, model: nn.Module, inductor: bool) -> None:
        # It does not hold the model: the frontend keeps its backends.
        self.inductor, self.watching = inductor, True
        self.ran: dict[bool, list[tuple[Boundary, ...]]] = {}
        self._bodies = False  # graphs inside of graphs
        self._root = ""
        self._paths = {str(id(module)): path for path, module in model.named_modules()}
        self._owners = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters(remove_duplicate=False)}

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Graph:
        """As torch.compile wants it."""
        self._root = self._root_of(graph)
        found = fused_graph(graph, self._named)
        inputs = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        weights = [inputs.index(one.weight) if one.weight in inputs else None for one in found]
        self._bodies |= bool(bodies(graph))
        forward = compiled(graph, example_inputs, options=AS_BEFORE) if self.inductor else eager(graph)

        def run(*given: Any) -> Any:
            if self.watching:
                at = (self._owner(given[k]) if k is not None else None for k in weights)
                told = tuple(_moved(one, path) for one, path in zip(found, at, strict=True))
                self.ran.setdefault(torch.is_grad_enabled(), []).append(told)
            return forward(*given)

        return run

    def _named(self, node: fx.Node) -> str:
        """The path of the module in which the frontend met a node."""
        stack: list[str] = [*node.meta.get("nn_module_stack", {})]
        known = (self._paths.get(key.partition("@")[0]) for key in reversed(stack))
        return next((path for path in known if path is not None), self._root)

    def _root_of(self, graph: fx.GraphModule) -> str:
        """The path of the module whose forward a graph begins in: empty, but after a break it may be any."""
        for node in graph.graph.nodes:
            given = node.meta.get("grapharg") if node.op == "placeholder" else None
            path = self._owner(given.example) if given is not None else None
            within = OF_SELF.match(source_of(given)) if path is not None else None
            if path is not None and within is not None:
                parts = path.split(".") if path else []
                return ".".join(parts[: len(parts) - within[1].count("._modules[")])
        return ""

    def _owner(self, parameter: Tensor) -> str | None:
        return self._owners.get(id(parameter))

    @property
    def count(self) -> int:
        """Of how many graphs a run consists."""
        return max(map(len, self.ran.values()), default=0)

    def boundaries(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Boundary, ...]:
        """Those of one run, in order; one that is left with gradients or without counts as left; then those that no graph has."""
        runs = [[one for graph in graphs for one in graph] for graphs in self.ran.values()]
        most = max(runs, key=len, default=[])
        alike = [run for run in runs if [_key(one) for one in run] == [_key(one) for one in most]]
        found = tuple(next((one for one in same if not one.fused), same[0]) for same in zip(*alike, strict=True))
        if self.count == 1 and not self._bodies:
            return found
        return found + self._between(model, args, kwargs, found)

    def _between(self, model: nn.Module, args: Any, kwargs: Any, found: Sequence[Boundary]) -> tuple[Boundary, ...]:
        """The boundaries that no graph has: their add is in one, their norm in another."""
        with torch.no_grad():
            flow = capture_flow(model, args, kwargs)
        seen = Counter((one.norm, one.kind) for one in found)
        left = []
        for norm in find_norms(flow):
            match = sum_of(norm)
            if match is None:
                continue
            match.reason = APART if self.count else NONE
            one = match.told()
            seen[one.norm, one.kind] -= 1
            if seen[one.norm, one.kind] < 0:
                left.append(one)
        return tuple(left)


def _key(one: Boundary) -> tuple[str, str, str]:
    return one.add, one.norm, one.kind


def _moved(one: Boundary, norm: str | None) -> Boundary:
    """A boundary in another layer than that of which its graph was made, whose norm is at that path."""
    before, after = one.norm.split("."), (norm or "").split(".")
    if norm is None or norm == one.norm or len(before) != len(after):
        return one
    other = {k: (was, now) for k, (was, now) in enumerate(zip(before, after, strict=True)) if was != now}
    add = [other[k][1] if k in other and other[k][0] == part else part for k, part in enumerate(one.add.split("."))]
    return replace(one, norm=norm, add=".".join(add))
