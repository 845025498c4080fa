"""Helpers that compile a model with the backend and return its boundaries, and its results before and after fusing."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.fusion.backend import fuse_graph, run_eagerly
from addnorm.fusion.match import Boundary


@dataclass
class GraphCapture:
    """Captured graphs and boundaries of a compiled model.

    Attributes:
        graphs: the graphs after the rewrite.
        boundaries: the boundaries of all graphs.
        compiled: the fused model.
    """

    graphs: list[Any] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)
    compiled: Any = None

    @property
    def reasons(self) -> list[str | None]:
        return [boundary.reason for boundary in self.boundaries]

    @property
    def code(self) -> str:
        return "\n".join(graph.code for graph in self.graphs)


def capture_graphs(model: nn.Module, **options: Any) -> GraphCapture:
    """Compile a model with a backend that records graphs and boundaries. The model does not run yet."""
    capture = GraphCapture()
    paths = {str(id(module)): path for path, module in model.named_modules()}

    def named(node: Any) -> str:
        stack = [*node.meta.get("nn_module_stack", {})]
        return next((paths[key] for key in reversed(stack) if key in paths), "")

    def backend(graph: Any, example_inputs: Any) -> Any:
        capture.graphs.append(graph)
        fused = fuse_graph(graph, named)
        assert all(difference.holds for difference in fused.differences)
        capture.boundaries += fused.boundaries
        return run_eagerly(graph)

    torch._dynamo.reset()  # clear earlier compilations, which would be reused or counted
    capture.compiled = torch.compile(model, backend=backend, **options)
    return capture


def run_both(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any, GraphCapture]:
    """Return the results of a model before and after fusing, without gradients, from the same random state."""
    capture = capture_graphs(model)
    with torch.no_grad():
        torch.manual_seed(0)
        before = model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        torch.manual_seed(0)
        after = capture.compiled(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    return before, after, capture


def relative_difference(before: Tensor, after: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    assert before.shape == after.shape
    assert before.dtype == after.dtype
    before, after = before.detach(), after.detach()
    return float((before.double() - after.double()).abs().max() / before.double().abs().max())
