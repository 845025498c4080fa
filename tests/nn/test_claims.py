"""Tests of common statements about Add & Norm: each is shown to hold, or where it stops to hold.

Statements that can only be measured (scale, gradients, training, cost) are in benchmarks/bench_claims.py and docs/claims.md.
"""

import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import addnorm
from addnorm import LayerNorm, ResidualStack, RMSNorm, SublayerConnection, wirings
from addnorm.lab.toy_model import ToyModel, stream_states

D = 16


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)  # small matrices need no second thread


SUMS = (
    "pre_ln",
    "sandwich",
    "reordered",
    "layer_scale",
    "layernorm_scaling",
    "depth_mup",
    "no_norm",
    "rezero",
    "parallel",
)


def double(*shape):
    return torch.randn(*shape, D, dtype=torch.float64)


def feed_forward(dtype=torch.float64):
    return nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)).to(dtype)


def bits(x):
    return x.view({4: torch.int32, 8: torch.int64}[x.element_size()])


# ----------------------------------------------------------------------------------------------------------- the norm


def test_normalized_token_has_mean_zero_and_variance_one():
    z = 5.0 + 3.0 * double(7)
    y = LayerNorm(D, dtype=torch.float64)(z)
    assert y.mean(-1).tolist() == pytest.approx([0.0] * 7, abs=1e-14)
    assert y.var(-1, correction=0).tolist() == pytest.approx([1.0] * 7, rel=1e-5)


def test_variance_is_one_only_if_eps_is_small():
    """Check var / (var + eps) exactly: one half if they are equal."""
    z = double(1)
    z = (z - z.mean()) / z.std(correction=0)
    for var in (1.0, 1e-3, 1e-5, 1e-7):
        y = addnorm.layer_norm(math.sqrt(var) * z, eps=1e-5)
        assert float(y.var(correction=0)) == pytest.approx(var / (var + 1e-5), rel=1e-9)


def test_eps_prevents_division_by_zero():
    constant = torch.full((1, D), 3.0)
    assert torch.equal(addnorm.layer_norm(constant, bias=torch.arange(float(D))), torch.arange(float(D))[None])
    assert ((constant - 3.0) / constant.var(-1, correction=0).sqrt()).isnan().all()


def undone(z, gamma, beta, eps=1e-5):
    """Return the norm with gamma and beta, each a vector or one number for all features."""
    weight, bias = (torch.as_tensor(value, dtype=torch.float64).expand(D).contiguous() for value in (gamma, beta))
    return addnorm.layer_norm(z, weight, bias, eps)


def test_gamma_with_eps_and_beta_invert_the_norm():
    for z in (double(), 1e-3 * double(), 100 + double()):
        back = undone(z, math.sqrt(z.var(correction=0) + 1e-5), z.mean())
        torch.testing.assert_close(back, z, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-3])
def test_gamma_without_eps_misses_the_token_by_eps(scale):
    z = 2.0 + scale * double()
    mean, var = float(z.mean()), float(z.var(correction=0))
    back = undone(z, math.sqrt(var), mean)
    short = math.sqrt(var / (var + 1e-5))
    torch.testing.assert_close(back - mean, short * (z - mean), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(back - mean, z - mean, rtol=0.1 * (1 - short), atol=0)


def test_no_gamma_and_beta_invert_the_norm_of_two_tokens():
    """The norm maps both tokens to the same vector, and gamma and beta are equal for all tokens: the difference is lost."""
    token = double()
    two = 3.0 * token + 7.0
    gamma, beta = double(), double()
    first, second = undone(token, gamma, beta, eps=0.0), undone(two, gamma, beta, eps=0.0)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)
    for wanted, other in ((token, two), (two, token)):
        gamma, beta = wanted.std(correction=0), wanted.mean()
        torch.testing.assert_close(undone(wanted, gamma, beta, eps=0.0), wanted, rtol=1e-12, atol=1e-12)
        assert float((undone(other, gamma, beta, eps=0.0) - other).norm() / other.norm()) > 0.5


@pytest.mark.parametrize("wiring", ["post_ln", "pre_ln", "deepnorm", "sandwich"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_token_output_does_not_depend_on_its_batch(wiring, norm):
    """The sublayers are elementwise: matrix products may sum in another order for another number of rows."""
    stack = ResidualStack([torch.tanh, torch.sin] * 3, D, wiring, norm=norm)
    batch = torch.randn(9, D)
    for i in range(9):
        assert torch.equal(bits(stack(batch[i : i + 1])), bits(stack(batch)[i : i + 1]))


# -------------------------------------------------------------------------------------------------------- the residual


@pytest.mark.parametrize("name", SUMS)
def test_zero_sublayer_leaves_pre_ln_stream_unchanged(name):
    """a = 1 and no N_out: only the adds change the stream."""
    stack = ResidualStack([torch.zeros_like] * 12, D, name, final_norm=False)
    x = 1e3 * torch.randn(3, 5, D)
    assert torch.equal(bits(stack(x)), bits(x))
    assert torch.equal(bits(stack.unroll(x).x_L), bits(x))


def test_norm_after_sublayer_writes_its_bias():
    connection = SublayerConnection(torch.zeros_like, D, "reordered", dtype=torch.float64)
    nn.init.normal_(connection.norm_branch.bias)
    x = double(3)
    assert torch.equal(connection(x), x + connection.norm_branch.bias)


def test_zero_sublayer_in_post_ln_still_normalizes():
    x = 3.0 + 2.0 * double(4)
    once = SublayerConnection(torch.zeros_like, D, "post_ln", dtype=torch.float64)
    torch.testing.assert_close(once(x), F.layer_norm(x, (D,)), rtol=1e-12, atol=1e-12)
    assert float((once(x) - x).detach().norm() / x.norm()) > 0.5
    # One norm removes scale and mean of x; further norms change only by eps.
    twelve = ResidualStack([torch.zeros_like] * 12, D, "post_ln", dtype=torch.float64)
    torch.testing.assert_close(twelve(x), F.layer_norm(x, (D,)), rtol=1e-4, atol=1e-4)


def test_pre_ln_unrolls_into_writes():
    stack = ResidualStack([feed_forward() for _ in range(12)], D, "pre_ln", dtype=torch.float64)
    x = double(3, 5)
    expected, stream = [], x
    for connection in stack.connections:
        expected.append(connection.sublayer(F.layer_norm(stream, (D,))))
        stream = stream + expected[-1]
    x_0, writes, x_L, y = stack.unroll(x)
    assert torch.equal(x_0, x)
    torch.testing.assert_close(list(writes), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x_L, x + sum(expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y, F.layer_norm(x_L, (D,)), rtol=1e-12, atol=1e-12)


class Detached(nn.Module):
    """Sublayer that stops gradients, so that the gradient at x_0 comes through the residual connection alone."""

    def __init__(self, sublayer):
        super().__init__()
        self.sublayer = sublayer

    def forward(self, x):
        return self.sublayer(x).detach()


@pytest.mark.parametrize("name", SUMS[:-1])
def test_identity_path_carries_gradient_unchanged(name):
    """The identity path has the factor 1: gradients are bitwise equal after 24 sublayers."""
    stack = ResidualStack([Detached(feed_forward()) for _ in range(24)], D, name, final_norm=False, dtype=torch.float64)
    x = double(3, 5).requires_grad_()
    cotangent = double(3, 5)
    (gradient,) = torch.autograd.grad(stack(x), x, cotangent)
    assert torch.equal(bits(gradient), bits(cotangent))


def test_post_ln_gradient_passes_every_norm():
    stack = ResidualStack([Detached(feed_forward()) for _ in range(24)], D, "post_ln", dtype=torch.float64)
    x = double(3, 5).requires_grad_()
    cotangent = double(3, 5)
    (gradient,) = torch.autograd.grad(stack(x), x, cotangent)
    assert not torch.allclose(gradient, cotangent)
    # The norms remove the mean and the component along the normalized token.
    assert float(gradient.sum(-1).abs().max()) < 1e-12


def test_gradient_at_x_0_is_identity_plus_sublayers():
    """Check the general rule: dL/dx_0 = dL/dx_L + the sum over sublayers of J_i^T dL/dx_i, J_i that of f_i(N(x))."""
    stack = ResidualStack([feed_forward() for _ in range(8)], D, "pre_ln", final_norm=False, dtype=torch.float64)
    x = double(3, 5).requires_grad_()
    cotangent = double(3, 5)
    (expected,) = torch.autograd.grad(stack(x), x, cotangent)
    states = stream_states(stack, x)
    at = torch.autograd.grad(states[-1], states, cotangent)
    through = []
    for connection, before, gradient in zip(stack.connections, states[:-1], at[1:], strict=True):
        read = before.detach().requires_grad_()
        through += torch.autograd.grad(connection.sublayer(F.layer_norm(read, (D,))), read, gradient)
    torch.testing.assert_close(expected, cotangent + sum(through), rtol=1e-12, atol=1e-12)
    assert float((expected - cotangent).norm() / cotangent.norm()) > 0.1, "the sublayers do add something"


def changes(wiring, seed):
    """Return the change of the output without each sublayer, relative to the change by another input."""
    model = ToyModel(12, wiring, seed, sequences=4)
    with torch.no_grad():
        y = model.stack(model.x)
        other = float((y.roll(1, 0) - y).norm())
        return [float((stack(model.x) - y).norm()) / other for stack in with_one_out(model.stack)]


def with_one_out(stack):
    """Return the stacks without one sublayer each, in order."""
    modules = [connection.sublayer for connection in stack.connections]
    for i in range(len(modules)):
        rest = modules[:i] + modules[i + 1 :]
        yield ResidualStack(rest, stack.d_model, stack.wiring, sublayers_per_layer=1, elementwise_affine=False)


def test_removing_a_sublayer_changes_little_with_residual():
    """Check it at initialization. Veit et al. 2016 showed it for trained residual networks; docs/claims.md has trained models."""

    def mean(wiring):
        return statistics.fmean(statistics.fmean(changes(wiring, seed)) for seed in range(3))

    assert mean("pre_ln") < 0.5
    assert mean(wirings.no_residual()) > 1.2


# ------------------------------------------------------------------------------------------------------------ the cost


@pytest.mark.parametrize(("norm", "each"), [("layer", 2 * D), ("rms", D)])
def test_add_and_norm_has_two_vectors_of_parameters(norm, each):
    """A LayerNorm has scale and shift, an RMSNorm the scale alone, the add none."""
    for wiring, norms in (("post_ln", 24), ("pre_ln", 25), ("sandwich", 49), ("no_norm", 0)):
        stack = ResidualStack([torch.zeros_like] * 24, D, wiring, norm=norm)
        assert sum(parameter.numel() for parameter in stack.parameters()) == norms * each
        assert sum(isinstance(module, LayerNorm | RMSNorm) for module in stack.modules()) == norms
