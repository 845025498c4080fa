"""Tests of the autograd nodes of computed coefficients, which save little for the backward: they equal their formulas."""

import pytest
import torch
from torch.testing import assert_close

from addnorm.nn import Place
from addnorm.wirings.coefficients import GatedRead, SourceAttention, gated, sources
from support.oracle import UNIT

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
N, D = 3, 12
GATES = gated._GatesFunction, gated._compute_gates
SCORES = sources._ScoresFunction, sources._compute_scores


def gate_arguments(shape, dtype, injects=True):
    streams = torch.randn(*shape, N, D).mul(3).to(dtype)
    project = torch.randn(N, N * D) if injects else None
    return [streams, torch.randn(N, D), torch.randn(5, N * D), torch.randn(N * D, 5), project, 1e-6]


def score_arguments(shape, dtype, n=2, reads=2):
    return [torch.randn(reads, D), 1e-3, *(torch.randn(*shape, D).mul(0.5 + k).to(dtype) for k in range(n))]


CASES = {
    "gates": (GATES, gate_arguments),
    "gates without a write": (GATES, lambda shape, dtype: gate_arguments(shape, dtype, False)),
    "scores": (SCORES, score_arguments),
    "scores of one source": (SCORES, lambda shape, dtype: score_arguments(shape, dtype, 1, 1)),
    "scores of one read": (SCORES, lambda shape, dtype: score_arguments(shape, dtype, 5, 1)),
}


def gradients(compute, arguments, frozen=None, create_graph=False):
    """Return the outputs, and the gradients of all tensors but one."""
    inputs = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]
    leaves = [t.requires_grad_() for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and i != frozen]
    outputs = [t for t in compute(*inputs) if t is not None]
    cotangents = [torch.linspace(-1, 2, t.numel(), dtype=t.dtype).reshape(t.shape).sin() for t in outputs]
    first = torch.autograd.grad(outputs, leaves, cotangents, create_graph=create_graph)
    if not create_graph:
        return [*outputs, *first]
    return torch.autograd.grad(sum(t.sin().sum() for t in first), leaves)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(2, 7), (0, 3), ()], ids=str)
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_node_equals_its_formula(name, shape, dtype):
    (node, formula), make = CASES[name]
    arguments = make(shape, dtype)
    exact = gradients(formula, [t.double() if isinstance(t, torch.Tensor) else t for t in arguments])
    for ours, theirs, expected in zip(
        gradients(node.apply, arguments), gradients(formula, arguments), exact, strict=True
    ):
        assert ours.dtype == theirs.dtype
        if expected.numel():  # twice the formula's own error, and some roundings: the sums are in another order
            bound = 2 * (theirs - expected).abs().max() + (16 * UNIT[f32] + UNIT[ours.dtype]) * expected.abs().max()
            assert (ours - expected).abs().max() <= bound


@pytest.mark.parametrize("name", ["gates", "gates without a write", "scores"])
def test_node_has_second_derivatives_and_frozen_inputs(name):
    (node, formula), make = CASES[name]
    arguments = [t.double() if isinstance(t, torch.Tensor) else t for t in make((2,), f64)]
    arguments[0 if "gates" in name else 2][0] = 0.0  # a sublayer that has learned nothing
    for frozen in (None, *(i for i, t in enumerate(arguments) if isinstance(t, torch.Tensor))):
        for create_graph in (False, True):
            ours, expected = (gradients(f, arguments, frozen, create_graph) for f in (node.apply, formula))
            assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [GatedRead, SourceAttention])
def test_node_is_left_where_the_formula_is_needed(kind, monkeypatch):
    module = kind(D, N, 1, Place(1, 0, 3, 2))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    rows = torch.randn(2, N, D) if kind is GatedRead else torch.randn(N, 2, D).unbind()
    node, _ = GATES if kind is GatedRead else SCORES

    def read(rows):
        collapse = module(rows).collapse
        return collapse if kind is GatedRead else collapse[0][0]

    called, apply = [], node.apply
    monkeypatch.setattr(node, "apply", lambda *given: called.append(1) or apply(*given))
    expected = read(rows)
    assert called == [1]
    assert_close(torch.func.vmap(read)(rows), expected)
    with torch.no_grad():
        read(rows)
    torch.export.export(module, (rows,))
    assert called == [1]
