"""Tests of ResidualStack: unroll, without, and torch's own tools."""

import copy
import gc

import pytest
import torch
from torch import nn

import addnorm
from addnorm import ResidualStack, wirings
from addnorm.nn.state import StreamState
from support.pairwise import some
from support.stacks import D, Masked, Mlp, each_wiring, f64, perturb, stack_of

# unroll and without


@pytest.mark.parametrize(
    "name", ["pre_ln", "sandwich", "reordered", "layer_scale", "layernorm_scaling", "rezero", "no_norm", "parallel"]
)
@pytest.mark.parametrize("training", [True, False])
def test_unroll_returns_x_0_and_the_writes(name, training):
    stack = stack_of(6, name, dtype=f64, dropout=0.3, stochastic_depth=0.3).train(training)
    for parameter in stack.parameters():
        nn.init.normal_(parameter, 0.3, 0.3)
    x = torch.randn(4, 3, D, dtype=f64)
    torch.manual_seed(5)
    x_0, writes, x_L, y = stack.unroll(x)
    assert len(writes) == 6
    torch.testing.assert_close(x_L, x_0 + sum(writes), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(y, x_L if stack.norm_final is None else stack.norm_final(x_L))
    torch.manual_seed(5)
    if name != "rezero" or not training:  # another training pass has other masks
        stack.eval()
        torch.testing.assert_close(stack.unroll(x).y, stack(x))


def test_unroll_carries_gradients():
    stack, x = stack_of(4, dtype=f64), torch.randn(3, D, dtype=f64, requires_grad=True)
    dy = torch.randn(3, D, dtype=f64)
    expected = torch.autograd.grad(stack(x), [x, *stack.parameters()], dy)
    gradients = torch.autograd.grad(stack.unroll(x).y, [x, *stack.parameters()], dy)
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("wiring", wirings.list_all(), ids=lambda wiring: wiring.name)
def test_frozen_expansion_closes_in_float64(wiring):
    """The terms are carried through later mixes and norms; learned coefficients are away from their initial values."""
    stack, x = stack_of(6, wiring, dtype=f64).double(), torch.randn(3, D, dtype=f64)
    perturb(stack)
    with torch.no_grad():
        x_0, writes, x_L, y = stack.unroll(x)
    assert len(writes) == 6
    assert float((x_L - x_0 - sum(writes)).norm() / x_L.norm()) < 1e-14
    torch.testing.assert_close(y, stack(x))


def test_unroll_carries_writes_through_later_norms():
    """Post-LN by hand: with its statistics frozen a norm is linear, and its bias counts with the write before it."""
    stack, x = stack_of(2, "post_ln", dtype=f64), torch.randn(3, D, dtype=f64)
    perturb(stack)
    first, second = stack.connections
    z = x + first.sublayer(x)
    h = first.norm_out(z)
    s = h + second.sublayer(h)

    def carried(t, total, norm):
        return (
            (t - t.mean(-1, keepdim=True)) / (total.var(-1, keepdim=True, correction=0) + norm.eps).sqrt() * norm.weight
        )

    x_0, (w_1, w_2), _, _ = stack.unroll(x)
    torch.testing.assert_close(x_0, carried(carried(x, z, first.norm_out), s, second.norm_out))
    own = carried(first.sublayer(x), z, first.norm_out) + first.norm_out.bias
    torch.testing.assert_close(w_1, carried(own, s, second.norm_out))
    torch.testing.assert_close(w_2, carried(second.sublayer(h), s, second.norm_out) + second.norm_out.bias)


def test_direct_path_of_scaled_streams():
    """a = 0.5 halves every earlier term at each sublayer."""
    stack = stack_of(4, addnorm.Row(norm_in=True, a=0.5))
    expected = torch.tensor([2.0**-4, 2.0**-3, 2.0**-2, 2.0**-1, 1.0])
    torch.testing.assert_close(stack.direct_path(torch.randn(3, D)), expected)


def test_direct_path_of_hyper_connections():
    """Row-stochastic mixing and writes of 1 keep the path: as often as the head reads, 4 times."""
    stack = stack_of(4, "hyper_connections")
    torch.testing.assert_close(stack.direct_path(torch.randn(3, D)), torch.full((5,), 4.0))
    with torch.no_grad():
        for connection in stack.connections:
            connection.coefficients.inject.copy_(torch.tensor([0.5, 1.0, -2.0, 3.0]))
    torch.testing.assert_close(stack.direct_path(torch.randn(3, D)), torch.tensor([4.0, 2.5, 2.5, 2.5, 2.5]))


def test_unroll_raises_if_the_sum_is_not_x_L():
    def spoil(x):
        return torch.full_like(x, float("inf"))

    with pytest.raises(RuntimeError, match="not finite"):
        ResidualStack([spoil, spoil], D).unroll(torch.randn(3, D))


@pytest.mark.parametrize("i", [0, 2, 5, -1])
def test_without_removes_one_write(i):
    stack, x = stack_of(6, dtype=f64), torch.randn(3, D, dtype=f64)
    called = []
    for k, connection in enumerate(stack.connections):
        connection.sublayer.register_forward_hook(lambda *_, k=k: called.append(k))
    less = stack.without(i)
    writes = less.unroll(x).writes
    assert called == [k for k in range(6) if k != i % 6]
    assert not writes[i].any()
    before = stack.unroll(x)
    for k in range(i % 6):
        assert torch.equal(writes[k], before.writes[k])
    assert {id(p) for p in less.parameters()} < {id(p) for p in stack.parameters()}
    assert len(stack.unroll(x).writes) == 6
    assert stack.unroll(x).writes[i].any()


@each_wiring
def test_without_works_for_every_wiring(wiring):
    stack, x = stack_of(6, wiring), torch.randn(2, 3, D)
    for parameter in stack.parameters():
        nn.init.normal_(parameter, 0.3, 0.3)
    y = stack.without(3)(x)
    with torch.no_grad():
        assert torch.equal(stack.without(3)(x), y)
    assert not torch.equal(stack(x), y)


def test_without_removes_bias_of_branch_norm():
    stack = stack_of(2, "sandwich", final_norm=False)
    nn.init.normal_(stack.connections[1].norm_branch.bias)
    x = torch.randn(3, D)
    x_0, writes, x_L, _ = stack.without(1).unroll(x)
    assert torch.equal(x_L, x_0 + writes[0])


def test_hooks_of_a_copy_are_independent():
    stack = stack_of(2)
    less = stack.without(0)
    less.register_forward_hook(lambda module, args, out: out * 0)
    x = torch.randn(3, D)
    assert not less(x).any()
    assert stack(x).any()


def test_without_accepts_keywords_of_removed_sublayer():
    stack = ResidualStack([Masked(), Mlp()], D)
    stack.without(0)(torch.randn(3, D), mask=None)


# torch's own tools


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # warnings of torch.compile about itself
@pytest.mark.parametrize(
    "name",
    some(
        ["pre_ln", "post_ln", "layer_scale", "layernorm_scaling", "parallel", "resi_dual", "b2t"],
        ["pre_ln"],
    ),
)
def test_stack_compiles_without_graph_break(name):
    stack = stack_of(2 if name == "pre_ln" else 4, name, checkpoint=name == "pre_ln")
    x = torch.randn(2, 3, D, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    dy = torch.randn(2, 3, D)
    expected = torch.autograd.grad(stack(x), [x, *stack.parameters()], dy, allow_unused=True)
    gradients = torch.autograd.grad(compiled(x), [x, *stack.parameters()], dy, allow_unused=True)
    torch.testing.assert_close(gradients, expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), stack(x))


def test_copies_state_dicts_and_functional_calls():
    stack, x = stack_of(6, "rezero"), torch.randn(3, D)
    stack.connections[0].b.data.fill_(0.7)
    assert stack.connections[1].b is stack.connections[0].b  # one for both sublayers of a layer
    other = copy.deepcopy(stack)
    assert other.connections[1].b is other.connections[0].b
    assert torch.equal(other(x), stack(x))
    fresh = stack_of(6, "rezero")
    fresh.load_state_dict(stack.state_dict())
    assert torch.equal(fresh(x), stack(x))
    state = {name: 2 * value for name, value in stack.named_parameters()}
    doubled = torch.func.functional_call(stack, state, (x,))
    fresh.load_state_dict(state, strict=False)  # the state lacks the second name of a shared parameter
    assert torch.equal(doubled, fresh(x))


def test_shared_factor_stays_one_parameter():
    def one(stack):
        return all(layer[0].b is here.b for layer in map(list, stack._layers()) for here in layer)

    stack = stack_of(4, "rezero")
    assert one(stack)
    assert one(copy.deepcopy(stack))
    assert one(stack.double().to("cpu"))
    model = nn.Sequential(stack_of(4, "rezero", device="meta"))  # the sublayers are on the CPU
    assert one(model.to_empty(device="cpu")[0])
    model[0].reset_parameters()
    assert [float(here.b.detach()) for here in model[0].connections] == [0.0] * 4
    state = {name: value.clone() for name, value in stack.state_dict().items()}
    stack.load_state_dict(state, assign=True)
    assert one(stack)
    assert sum(name.endswith(".b") for name, _ in stack.named_parameters()) == 2


def test_per_sample_gradients_with_torch_func():
    stack, x = stack_of(4, dtype=f64), torch.randn(5, 3, D, dtype=f64)
    parameters = dict(stack.named_parameters())

    def loss(parameters, sample):
        return torch.func.functional_call(stack, parameters, (sample,)).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for k in range(5):
        of_sample = torch.autograd.grad(stack(x[k]).square().sum(), list(parameters.values()))
        for name, gradient in zip(parameters, of_sample, strict=True):
            torch.testing.assert_close(gradients[name][k], gradient)


def test_parametrized_norm_keeps_its_parametrization():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    stack, x = stack_of(2), torch.randn(3, D)
    y = stack(x)
    nn.utils.parametrize.register_parametrization(stack.norm_final, "weight", Doubled())
    torch.testing.assert_close(stack(x), 2 * y)


def test_replaced_norm_or_sublayer_is_used():
    stack, x = stack_of(2), torch.randn(3, D)
    stack.connections[1].norm_in = addnorm.LayerNorm(D, eps=1.0)
    stack.connections[0].sublayer = nn.Identity()
    h = x + nn.functional.layer_norm(x, (D,))
    h = h + stack.connections[1].sublayer(nn.functional.layer_norm(h, (D,), eps=1.0))
    torch.testing.assert_close(stack(x), nn.functional.layer_norm(h, (D,)))


def test_call_leaves_no_state_behind():
    stack, x = stack_of(4), torch.randn(3, D)
    stack(x)
    gc.collect()
    assert not any(type(o) is StreamState for o in gc.get_objects())
