"""Helpers that compile a model with the backend and return its boundaries, and compare it with the model before fusing."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.fusion.backend import fuse_graph, run_eagerly
from addnorm.fusion.match import Boundary
from support.equality import assert_same
from support.fused_model import D, X
from support.random_models.graphs import Graph


@dataclass
class GraphCapture:
    """Captured graphs and boundaries of a compiled model.

    Attributes:
        graphs: the graphs after the rewrite.
        boundaries: the boundaries of all graphs.
        compiled: the fused model.
        outputs: of the last compared call, of the original model and of the fused one.
    """

    graphs: list[Any] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)
    compiled: Any = None
    outputs: tuple[Any, ...] = ()

    @property
    def reasons(self):
        return [boundary.reason for boundary in self.boundaries]

    @property
    def code(self):
        return "\n".join(graph.code for graph in self.graphs)


def capture_graphs(model, **options):
    """Compile a model with a backend that records graphs and boundaries. The model does not run yet."""
    capture = GraphCapture()
    paths = {str(id(module)): path for path, module in model.named_modules()}

    def named(node):
        stack = [*node.meta.get("nn_module_stack", {})]
        return next((paths[key] for key in reversed(stack) if key in paths), "")

    def backend(graph, example_inputs):
        capture.graphs.append(graph)
        fused = fuse_graph(graph, named)
        assert all(difference.holds for difference in fused.differences)
        capture.boundaries += fused.boundaries
        return run_eagerly(graph)

    torch._dynamo.reset()  # clear earlier compilations, which would be reused or counted
    capture.compiled = torch.compile(model, backend=backend, **options)
    return capture


def run_both(model, *args, **kwargs):
    """Return the results of a model before and after fusing, without gradients, from the same random state."""
    capture = capture_graphs(model)
    with torch.no_grad():
        torch.manual_seed(0)
        before = model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        torch.manual_seed(0)
        after = capture.compiled(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    return before, after, capture


class FunctionModel(Graph):
    """Model of two sublayers, a norm and its parts; `forward` is a function of the model and the inputs."""

    def __init__(self, function):
        super().__init__(function)
        torch.manual_seed(1)
        self.f, self.g, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)
        self.weight, self.bias = nn.Parameter(torch.rand(D) + 0.5), nn.Parameter(torch.rand(D))
        self.register_buffer("buffer", torch.rand(D) + 0.5)
        self.register_buffer("eps", torch.tensor(1e-5))


def fuse_function(
    function, *calls, gradients=True, dtype=torch.float32,
    limit=1e-5, change=None, **options,
):  # fmt: skip
    """Fuse the model of a function; check outputs, strides, buffers and gradients against the original in every call.

    Args:
        function: of a `FunctionModel` and the inputs.
        calls: the inputs of each call; `X` by default.
        gradients: whether to compare gradients, too.
        dtype: of the model.
        limit: largest relative difference, of gradients ten times that.
        change: called with each model and the number of a call before that call.
        options: of `torch.compile`.
    """
    model = FunctionModel(function).to(dtype)
    twin = copy.deepcopy(model)
    capture = capture_graphs(twin, **options)
    for k, args in enumerate(calls or ((X.to(dtype),),)):
        results = []
        for of, call in ((model, model), (twin, capture.compiled)):
            if change is not None:
                change(of, k)
            results.append(run_call(of, call, args, gradients))
        capture.outputs, grads = zip(*results, strict=True)
        for before, after in zip(*capture.outputs, strict=True):
            assert relative_difference(before, after) < limit or before.equal(after)
            assert before.stride() == after.stride()
        assert_same([*twin.buffers()], [*model.buffers()])
        assert grads[0].keys() == grads[1].keys()
        pairs = [(gradient, grads[1][name]) for name, gradient in grads[0].items()]
        assert all(a.equal(b) or relative_difference(a, b) < 10 * limit for a, b in pairs)
    return capture


def run_call(model, call, args, gradients=True):
    """Return the outputs of a call, and the gradients of the parameters for random cotangents."""
    torch.manual_seed(0)
    model.zero_grad()
    with torch.set_grad_enabled(gradients):
        outputs = call(*copy.deepcopy(args))
        outputs = [outputs] if isinstance(outputs, Tensor) else [*outputs]
        if gradients:
            generator = torch.Generator().manual_seed(2)
            sum((out * torch.randn(out.shape, generator=generator)).sum() for out in outputs).backward()
    return outputs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_difference(before, after):
    """Return the largest difference, relative to the largest number."""
    assert before.shape == after.shape
    assert before.dtype == after.dtype
    before, after = before.detach(), after.detach()
    return float((before.double() - after.double()).abs().max() / before.double().abs().max())
