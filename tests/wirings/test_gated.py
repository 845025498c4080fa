"""Tests of the gates of gated residuals: the autograd node, which saves little, equals the formula."""

import pytest
import torch

from addnorm import wirings
from addnorm.nn import ResidualStack
from addnorm.wirings.coefficients import gated
from support.oracle import UNIT

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16


def coefficients(injects=True):
    stack = ResidualStack([torch.nn.Linear(12, 12)], 12, wiring=wirings.gated_residual(3, rank=5))
    torch.manual_seed(0)
    module = stack.connections[0].coefficients if injects else stack.head.coefficients
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def arguments(module, streams):
    return streams, *(getattr(module, name) for name in ("weight", "down", "up", "project_inject")), module.eps


def gradients(compute, inputs, create_graph=False):
    outputs = [t for t in compute(*inputs) if t is not None]
    cotangents = [torch.linspace(-1, 2, t.numel(), dtype=t.dtype).reshape(t.shape).sin() for t in outputs]
    leaves = [t for t in inputs if isinstance(t, torch.Tensor)]
    return outputs, torch.autograd.grad(outputs, leaves, cotangents, create_graph=create_graph)


@pytest.mark.parametrize("injects", [True, False])
@pytest.mark.parametrize("shape", [(2, 7, 3, 12), (0, 3, 12), (3, 12)], ids=str)
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_node_of_the_gates_equals_the_formula(injects, shape, dtype):
    module, streams = coefficients(injects), torch.randn(shape, dtype=dtype).mul(3).requires_grad_()
    results = [gradients(f, arguments(module, streams)) for f in (gated._GatesFunction.apply, gated._compute_gates)]
    wide = [
        t.detach().to(f64).requires_grad_() if isinstance(t, torch.Tensor) else t for t in arguments(module, streams)
    ]
    exact = gradients(gated._compute_gates, wide)
    for kind, (ours, formula, expected) in enumerate(zip(*results, exact, strict=True)):
        for a, b, c in zip(ours, formula, expected, strict=True):
            assert a.dtype == b.dtype
            size = c.abs().max() if c.numel() else 0.0
            # Twice the formula's own error, and some roundings: the sums are in another order.
            bound = 2 * (b - c).abs().max() if c.numel() else 0.0
            assert (
                not c.numel() or (a - c).abs().max() <= bound + (8 + 8 * kind) * UNIT[f32] * size + UNIT[a.dtype] * size
            )


def test_gates_have_second_derivatives():
    module = coefficients().double()
    streams = torch.randn(2, 3, 12, dtype=f64, requires_grad=True)
    inputs = arguments(module, streams)
    second = []
    for compute in (gated._GatesFunction.apply, gated._compute_gates):
        _, first = gradients(compute, inputs, create_graph=True)
        second.append(torch.autograd.grad(sum(t.sin().sum() for t in first), inputs[:-1]))
    for a, b in zip(*second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_node_of_the_gates_is_left_where_the_formula_is_needed(monkeypatch):
    module, streams = coefficients(), torch.randn(2, 3, 12, requires_grad=True)
    assert type(module(streams).collapse.grad_fn).__name__ == "_GatesFunctionBackward"
    monkeypatch.setattr(gated._GatesFunction, "apply", None)  # is not called
    assert torch.func.vmap(lambda x: module(x).collapse)(streams).shape == streams.shape
    with torch.no_grad():
        module(streams)
    torch.export.export(module, (streams,))
