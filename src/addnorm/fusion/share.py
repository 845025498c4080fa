"""What share of a model's forward pass its Add & Norms are: no fusing can gain more.

The model's graphs, as they were, run node by node, and the clock is read before and after each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from addnorm.fusion import encoder
from addnorm.fusion.backend import path_of
from addnorm.fusion.pattern import matches
from addnorm.fusion.traced import trace

__all__ = ["share"]

RUNS = 7


def share(
    compile: Callable[[Callable[..., Any]], Callable[..., Any]], call: Callable[[Callable[..., Any]], Any]
) -> float:
    """The share of Add & Norm in the time of a forward pass, from 0 to 1: the median of a few runs.

    Args:
        compile: the model compiled with a backend.
        call: calls that with its inputs.
    """
    clock = Clock()
    model = compile(clock)
    found = []
    with torch.no_grad():
        call(model)  # captures
        for _ in range(RUNS):
            clock.inside = clock.total = 0
            call(model)
            found.append(clock.inside / clock.total if clock.total else 0.0)
    return statistics.median(found)


class Clock:
    """A backend that times the nodes of the graphs: those of Add & Norm, and all."""

    def __init__(self) -> None:
        self.inside = self.total = 0  # nanoseconds

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """As torch.compile wants it."""
        encoder.lower(graph.graph)
        graph.recompile()
        nodes = {
            node
            for match in matches(graph, trace(graph, path_of))
            for node in (match.add, *match.inner)
            if node is not None
        }

        def run(*inputs: Any) -> Any:
            timed = _Timed(graph, nodes)
            out = timed.run(*inputs)
            self.inside, self.total = self.inside + timed.inside, self.total + timed.total
            return out

        return run


class _Timed(fx.Interpreter):
    """One run."""

    def __init__(self, graph: fx.GraphModule, nodes: set[fx.Node]) -> None:
        super().__init__(graph)
        self.nodes, self.inside, self.total = nodes, 0, 0

    def run_node(self, n: fx.Node) -> Any:
        """One node, with the clock."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        _finish()
        start = time.perf_counter_ns()
        out = getattr(self, n.op)(n.target, args, kwargs)
        _finish()
        taken = time.perf_counter_ns() - start
        self.total += taken
        self.inside += taken if n in self.nodes else 0
        return out


def _finish() -> None:
    """What was started on an accelerator is done."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
