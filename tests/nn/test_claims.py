"""Tests of common statements about Add & Norm that hold for every wiring of a kind.

Statements that are measured (the norm's own, scale, gradients, training, cost) are in benchmarks/bench_claims.py and docs/claims.md.
"""

import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from addnorm import LayerNorm, ResidualStack, RMSNorm, wirings
from addnorm.lab.toy_model import ToyModel, stream_states

D = 16


SUMS = (
    "pre_ln", "sandwich", "reordered", "layer_scale", "layernorm_scaling", "depth_mup", "no_norm", "rezero", "parallel",
)  # fmt: skip


def double(*shape):
    return torch.randn(*shape, D, dtype=torch.float64)


def feed_forward(dtype=torch.float64):
    return nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)).to(dtype)


def bits(x):
    return x.view({4: torch.int32, 8: torch.int64}[x.element_size()])


# ----------------------------------------------------------------------------------------------------------- the norm


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
