"""What is said of Add & Norm wherever it is taught, sentence by sentence: shown, or shown where it ends.

What can only be measured (scale, gradients, training, cost) is in benchmarks/bench_claims.py and docs/claims.md.
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
    threads(1)  # tiny matrices: a second thread only waits


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


def test_after_the_norm_a_token_has_mean_zero_and_variance_one():
    z = 5.0 + 3.0 * double(7)
    y = LayerNorm(D, dtype=torch.float64)(z)
    assert y.mean(-1).tolist() == pytest.approx([0.0] * 7, abs=1e-14)
    assert y.var(-1, correction=0).tolist() == pytest.approx([1.0] * 7, rel=1e-5)


def test_the_variance_is_one_only_where_eps_is_small_beside_it():
    """var / (var + eps), exactly: a half where they are equal."""
    z = double(1)
    z = (z - z.mean()) / z.std(correction=0)
    for var in (1.0, 1e-3, 1e-5, 1e-7):
        y = addnorm.layer_norm(math.sqrt(var) * z, eps=1e-5)
        assert float(y.var(correction=0)) == pytest.approx(var / (var + 1e-5), rel=1e-9)


def test_eps_keeps_a_constant_token_from_a_division_by_zero():
    constant = torch.full((1, D), 3.0)
    assert torch.equal(addnorm.layer_norm(constant, bias=torch.arange(float(D))), torch.arange(float(D))[None])
    assert ((constant - 3.0) / constant.var(-1, correction=0).sqrt()).isnan().all()


def undone(z, gamma, beta, eps=1e-5):
    """The norm with gamma and beta, each a vector or one number for all features."""
    weight, bias = (torch.as_tensor(value, dtype=torch.float64).expand(D).contiguous() for value in (gamma, beta))
    return addnorm.layer_norm(z, weight, bias, eps)


def test_gamma_the_root_of_the_variance_and_eps_and_beta_the_mean_undo_the_norm_of_a_token():
    for z in (double(), 1e-3 * double(), 100 + double()):
        back = undone(z, math.sqrt(z.var(correction=0) + 1e-5), z.mean())
        torch.testing.assert_close(back, z, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-3])
def test_gamma_the_root_of_the_variance_alone_is_off_by_what_eps_adds(scale):
    z = 2.0 + scale * double()
    mean, var = float(z.mean()), float(z.var(correction=0))
    back = undone(z, math.sqrt(var), mean)
    short = math.sqrt(var / (var + 1e-5))
    torch.testing.assert_close(back - mean, short * (z - mean), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(back - mean, z - mean, rtol=0.1 * (1 - short), atol=0)


def test_no_gamma_and_beta_undo_the_norm_of_two_tokens_of_different_statistics():
    """The norm gives both the same vector, and gamma and beta are the same for all tokens: what differed is gone."""
    one = double()
    two = 3.0 * one + 7.0
    gamma, beta = double(), double()
    first, second = undone(one, gamma, beta, eps=0.0), undone(two, gamma, beta, eps=0.0)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)
    for wanted, other in ((one, two), (two, one)):
        gamma, beta = wanted.std(correction=0), wanted.mean()
        torch.testing.assert_close(undone(wanted, gamma, beta, eps=0.0), wanted, rtol=1e-12, atol=1e-12)
        assert float((undone(other, gamma, beta, eps=0.0) - other).norm() / other.norm()) > 0.5


@pytest.mark.parametrize("wiring", ["post_ln", "pre_ln", "deepnorm", "sandwich"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_tokens_output_does_not_depend_on_its_batch_to_the_bit(wiring, norm):
    """The sublayers are elementwise: a matrix product may sum in another order for another number of rows."""
    stack = ResidualStack([torch.tanh, torch.sin] * 3, D, wiring, norm=norm)
    batch = torch.randn(9, D)
    for i in range(9):
        assert torch.equal(bits(stack(batch[i : i + 1])), bits(stack(batch)[i : i + 1]))


def test_under_batch_norm_it_does():
    batch, norm = torch.randn(9, D), nn.BatchNorm1d(D)
    alone, together = norm(batch[:2])[0], norm(batch)[0]
    assert float((alone - together).detach().abs().max()) > 0.1
    with pytest.raises(ValueError, match="more than 1 value"):
        norm(batch[:1])


# -------------------------------------------------------------------------------------------------------- the residual


def test_the_shapes_of_the_stream_and_of_what_is_added_must_be_the_same():
    with pytest.raises(ValueError, match=r"\(2, 8\).*\(2, 16\)"):
        SublayerConnection(lambda x: x[..., :8], D)(torch.randn(2, D))
    with pytest.raises(ValueError, match="branch"):
        addnorm.add_layer_norm(torch.randn(2, D), torch.randn(1, D))


@pytest.mark.parametrize("name", SUMS)
def test_a_sublayer_of_zeros_leaves_the_stream_as_it_was_to_the_bit(name):
    """a = 1 and no N_out: nothing touches the stream but the adds."""
    stack = ResidualStack([torch.zeros_like] * 12, D, name, final_norm=False)
    x = 1e3 * torch.randn(3, 5, D)
    assert torch.equal(bits(stack(x)), bits(x))
    assert torch.equal(bits(stack.unroll(x).x_L), bits(x))


def test_a_norm_behind_the_sublayer_writes_its_bias_even_so():
    connection = SublayerConnection(torch.zeros_like, D, "reordered", dtype=torch.float64)
    nn.init.normal_(connection.norm_branch.bias)
    x = double(3)
    assert torch.equal(connection(x), x + connection.norm_branch.bias)


def test_under_post_ln_a_sublayer_of_zeros_still_normalizes_the_stream():
    x = 3.0 + 2.0 * double(4)
    once = SublayerConnection(torch.zeros_like, D, "post_ln", dtype=torch.float64)
    torch.testing.assert_close(once(x), F.layer_norm(x, (D,)), rtol=1e-12, atol=1e-12)
    assert float((once(x) - x).detach().norm() / x.norm()) > 0.5
    # Scale and mean of x are gone after one; further ones find nothing more to change but eps.
    twelve = ResidualStack([torch.zeros_like] * 12, D, "post_ln", dtype=torch.float64)
    torch.testing.assert_close(twelve(x), F.layer_norm(x, (D,)), rtol=1e-4, atol=1e-4)


def test_pre_ln_unrolls_to_x_0_and_the_sum_of_the_writes():
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
    """A sublayer whose gradient ends in it: what is left at x_0 came along the residual alone."""

    def __init__(self, sublayer):
        super().__init__()
        self.sublayer = sublayer

    def forward(self, x):
        return self.sublayer(x).detach()


@pytest.mark.parametrize("name", SUMS[:-1])
def test_the_residual_alone_carries_the_gradient_of_x_L_to_x_0_untouched(name):
    """The path with the factor of exactly one: equal to the bit, after 24 sublayers."""
    stack = ResidualStack([Detached(feed_forward()) for _ in range(24)], D, name, final_norm=False, dtype=torch.float64)
    x = double(3, 5).requires_grad_()
    cotangent = double(3, 5)
    (gradient,) = torch.autograd.grad(stack(x), x, cotangent)
    assert torch.equal(bits(gradient), bits(cotangent))


def test_post_lns_path_goes_through_every_norm():
    stack = ResidualStack([Detached(feed_forward()) for _ in range(24)], D, "post_ln", dtype=torch.float64)
    x = double(3, 5).requires_grad_()
    cotangent = double(3, 5)
    (gradient,) = torch.autograd.grad(stack(x), x, cotangent)
    assert not torch.allclose(gradient, cotangent)
    # What the norms take out: the mean, and what lies along the normalized token.
    assert float(gradient.sum(-1).abs().max()) < 1e-12


def test_the_gradient_at_x_0_is_that_of_x_L_and_what_came_through_each_sublayer():
    """In general: dL/dx_0 = dL/dx_L + the sum over sublayers of J_i^T dL/dx_i, J_i that of f_i(N(x))."""
    stack = ResidualStack([feed_forward() for _ in range(8)], D, "pre_ln", final_norm=False, dtype=torch.float64)
    x = double(3, 5).requires_grad_()
    cotangent = double(3, 5)
    (expected,) = torch.autograd.grad(stack(x), x, cotangent)
    found = stream_states(stack, x)
    at = torch.autograd.grad(found[-1], found, cotangent)
    through = []
    for connection, before, gradient in zip(stack.connections, found[:-1], at[1:], strict=True):
        read = before.detach().requires_grad_()
        through += torch.autograd.grad(connection.sublayer(F.layer_norm(read, (D,))), read, gradient)
    torch.testing.assert_close(expected, cotangent + sum(through), rtol=1e-12, atol=1e-12)
    assert float((expected - cotangent).norm() / cotangent.norm()) > 0.1, "the sublayers do add something"


def changes(wiring, seed):
    """How far the output moves when one sublayer is taken out, for each; 1 is as far as another input would move it."""
    model = ToyModel(12, wiring, seed, sequences=4)
    with torch.no_grad():
        y = model.stack(model.x)
        other = float((y.roll(1, 0) - y).norm())
        return [float((one(model.x) - y).norm()) / other for one in with_one_out(model.stack)]


def with_one_out(stack):
    """The stacks of all sublayers but one, in their order."""
    modules = [connection.sublayer for connection in stack.connections]
    for i in range(len(modules)):
        rest = modules[:i] + modules[i + 1 :]
        yield ResidualStack(rest, stack.d_model, stack.wiring, sublayers_per_layer=1, elementwise_affine=False)


def test_taking_out_a_sublayer_moves_the_output_little_with_the_residual_and_out_of_range_without():
    """At init. Veit et al. 2016 showed it for trained residual networks; docs/claims.md has it after training."""

    def mean(wiring):
        return statistics.fmean(statistics.fmean(changes(wiring, seed)) for seed in range(6))

    assert mean("pre_ln") < 0.5
    assert mean(wirings.no_residual()) > 1.2


def test_without_is_taking_out_a_sublayer_where_the_stream_is_a_sum():
    model = ToyModel(6, "pre_ln", 0)
    y = model.stack(model.x)
    for i, rest in enumerate(with_one_out(model.stack)):
        torch.testing.assert_close(model.stack.without(i)(model.x), rest(model.x))
        assert not torch.allclose(rest(model.x), y, rtol=0.01)


# ------------------------------------------------------------------------------------------------------------ the cost


@pytest.mark.parametrize(("norm", "each"), [("layer", 2 * D), ("rms", D)])
def test_the_parameters_of_add_and_norm_are_two_vectors_a_norm(norm, each):
    """Scale and shift; RMSNorm has the scale alone. The add has none."""
    for wiring, norms in (("post_ln", 24), ("pre_ln", 25), ("sandwich", 49), ("no_norm", 0)):
        stack = ResidualStack([torch.zeros_like] * 24, D, wiring, norm=norm)
        assert sum(parameter.numel() for parameter in stack.parameters()) == norms * each
        assert sum(isinstance(module, LayerNorm | RMSNorm) for module in stack.modules()) == norms
