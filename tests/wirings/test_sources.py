"""Tests of attention over sources: the autograd node, which saves little, equals the formula."""

import pytest
import torch

from addnorm.nn import Place
from addnorm.wirings.coefficients import sources
from support.oracle import UNIT

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
NODE, FORMULA = sources._ScoresFunction.apply, sources._compute_scores
EPS, D = 1e-3, 12


def arguments(shape=(2, 7), n=3, reads=2, dtype=f32):
    torch.manual_seed(3)
    rows = [torch.randn(*shape, D).mul(0.5 + k).to(dtype).requires_grad_() for k in range(n)]
    return torch.randn(reads, D, dtype=torch.promote_types(dtype, f32)).requires_grad_(), EPS, *rows


def gradients(compute, inputs, create_graph=False, outputs=2):
    scores = compute(*inputs)[:outputs]
    cotangents = [torch.linspace(-1, 2, t.numel(), dtype=t.dtype).reshape(t.shape).sin() for t in scores]
    leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    return scores, torch.autograd.grad(scores, leaves, cotangents, create_graph=create_graph)


@pytest.mark.parametrize(("n", "reads", "outputs"), [(3, 2, 2), (1, 1, 1), (5, 1, 2)])
@pytest.mark.parametrize("shape", [(2, 7), (0, 3), ()], ids=str)
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_node_of_the_scores_equals_the_formula(n, reads, outputs, shape, dtype):
    inputs = arguments(shape, n, reads, dtype)
    ours, formula = (gradients(compute, inputs, outputs=outputs) for compute in (NODE, FORMULA))
    wide = [t.detach().to(f64).requires_grad_() if isinstance(t, torch.Tensor) else t for t in inputs]
    exact = gradients(FORMULA, wide, outputs=outputs)
    for a, b in zip(ours[0], formula[0], strict=True):
        assert torch.equal(a, b)
    for a, b, c in zip(ours[1], formula[1], exact[1], strict=True):
        assert a.dtype == b.dtype
        size = c.abs().max() if c.numel() else 0.0
        # Twice the formula's own error, and some roundings: the sums are in another order.
        bound = 2 * (b - c).abs().max() if c.numel() else 0.0
        assert not c.numel() or (a - c).abs().max() <= bound + 16 * UNIT[f32] * size + UNIT[a.dtype] * size


def test_only_what_is_needed_has_a_gradient():
    query, eps, first, second = arguments(n=2)
    expected = gradients(FORMULA, (query, eps, first, second.detach()))[1]
    for inputs, wanted in (
        ((query, eps, first, second.detach()), expected),
        ((query.detach(), eps, first, second.detach()), expected[1:]),
    ):
        for a, b in zip(gradients(NODE, inputs)[1], wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_scores_have_second_derivatives():
    query, eps, first, second = (
        t.detach().double().requires_grad_() if isinstance(t, torch.Tensor) else t for t in arguments(n=2)
    )
    with torch.no_grad():
        second[0, 0] = 0.0  # a sublayer that has learned nothing
    found = []
    for compute in (NODE, FORMULA):
        _, gradient = gradients(compute, (query, eps, first, second), create_graph=True)
        found.append(torch.autograd.grad(sum(t.sin().sum() for t in gradient), (query, first, second)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_node_of_the_scores_is_left_where_the_formula_is_needed(monkeypatch):
    module = sources.SourceAttention(D, 2, 1, Place(1, 0, 3, 2))
    torch.nn.init.normal_(module.query)
    rows = arguments(n=2)[2:]
    called = []
    monkeypatch.setattr(sources._ScoresFunction, "apply", lambda *given: called.append(1) or NODE(*given))
    expected = module(rows).collapse[0][0]
    assert called == [1]
    mapped = torch.func.vmap(lambda *each: module(each).collapse[0][0])(*rows)
    torch.testing.assert_close(mapped, expected)
    with torch.no_grad():
        module(rows)
    torch.export.export(module, (rows,))
    assert called == [1]
