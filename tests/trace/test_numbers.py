"""Tests of the trace's numbers against float64 autograd and the library."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from addnorm.trace import trace
from support.trace_variants import VARIANTS


def oracle(x, sublayer, jacobian, weight, bias, eps, grad, placement, norm, variance, eps_place):
    """Return outputs and gradients of float64 autograd, with an affine sublayer that returns `sublayer` for this token."""
    x, s, weight, bias = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (x, sublayer, weight, bias))

    def normalize(z):
        if norm == "layer":
            centred, spread = z - z.mean(), z.var(correction=int(variance == "unbiased"))
        else:
            centred, spread = z, z.square().mean()
        root = (spread + eps).sqrt() if eps_place == "inside" else spread.sqrt() + eps
        return centred / root * weight + bias

    if placement == "post":
        out = normalize(x + s)
    else:
        read = normalize(x)
        out = x + s + torch.tensor(jacobian, dtype=torch.float64) @ (read - read.detach())
    out.backward(torch.tensor(grad, dtype=torch.float64))
    return {
        "output": out.tolist(), "dx": x.grad.tolist(), "dsublayer": s.grad.tolist(), "dweight": weight.grad.tolist(),
        "dbias": bias.grad.tolist(),
    }  # fmt: skip


@st.composite
def calls(draw):
    d = draw(st.integers(2, 9))
    numbers = st.floats(-100, 100, allow_subnormal=False)
    vector = st.lists(numbers, min_size=d, max_size=d)
    x, sublayer, weight, bias, grad = (draw(vector) for _ in range(5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    jacobian = (100 * torch.randn(d, d, generator=generator, dtype=torch.float64)).tolist()
    return x, sublayer, jacobian, weight, bias, draw(st.sampled_from([1e-6, 1e-5, 1e-2, 1.0])), grad


@given(st.sampled_from(VARIANTS), calls())
def test_trace_matches_float64_autograd(variant, call):
    x, sublayer, jacobian, weight, bias, eps, grad = call
    d, extra = len(x), {}
    if variant["placement"] == "pre":
        extra["read_grad"] = [sum(jacobian[i][j] * grad[i] for i in range(d)) for j in range(d)]
    ours = trace(x, sublayer, weight=weight, bias=bias, eps=eps, grad=grad, **variant, **extra)
    spread = ours["variance" if variant["norm"] == "layer" else "mean_square"].value
    # at sigma = 0 autograd returns NaN for eps outside the root; near it, both normalize only rounding errors
    assume(variant["eps_place"] == "inside" or spread > 1e-6)
    theirs = oracle(x, sublayer, jacobian, weight, bias, eps, grad, **variant)
    # roundings of z, carried through 1/root, and once more those of the gradient
    root, largest = ours["root"].value, 1 + max(map(abs, [*x, *sublayer]))
    carried = 50 * d * 2**-53 * (1 + largest / root)
    size = 1 + max(map(abs, [*grad, *extra.get("read_grad", [])]))
    gain = 1 + max(map(abs, weight))
    assert ours.output == pytest.approx(theirs["output"], rel=0, abs=carried * (gain + 100))
    assert ours["dweight"].value == pytest.approx(theirs["dweight"], rel=0, abs=carried * size)
    assert ours["dbias"].value == pytest.approx(theirs["dbias"], rel=0, abs=carried * size)
    for name in ("dx", "dsublayer"):
        assert ours[name].value == pytest.approx(theirs[name], rel=0, abs=carried * size * (1 + gain / root))
