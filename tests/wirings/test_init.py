"""Tests of `wiring.init_(stack)`: weights by role and place, norms, biases and factors."""

import math

import pytest
import torch
from torch import nn

from addnorm import ResidualStack, wirings
from addnorm.nn import block
from addnorm.wirings.init import depth_scaled, gpt2, weight_roles, xavier_normal, zero_out
from support.refusals import assert_refused, make_test

D, FF = 128, 512


def stack_of(num_layers, wiring, **options):
    return ResidualStack([f for _ in range(num_layers) for f in block(D, 4, FF)], D, wiring, **options)


def spoiled(stack):
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.fill_(7.0)
    return stack


def std(weight):
    return float(weight.detach().double().std(correction=0))


def near(expected, weight):
    """Return whether a sample's standard deviation is within five standard errors (those of a normal distribution)."""
    return abs(std(weight) - expected) < 5 * expected / math.sqrt(2 * weight.numel())


def glorot(fan_in, fan_out):
    return math.sqrt(2 / (fan_in + fan_out))


def weights(stack):
    """Return (role, layer from 1, weight) of every weight."""
    for here in stack.connections:
        for role, weight in weight_roles(here.sublayer):
            yield role, here.place.number, weight


def scale_values(beta):
    """Return Xavier's standard deviation, times beta but for queries and keys."""
    return lambda role, layer, xavier: xavier if role in ("query", "key") else beta * xavier


EXPECTED = {  # the wiring, and the standard deviation of a role in layer l of 8
    "pre_ln: Xavier's": (wirings.pre_ln(), lambda role, layer, xavier: xavier),
    "pre_ln, Xavier-normal": (wirings.pre_ln(init=xavier_normal), lambda role, layer, xavier: xavier),
    "GPT-2: 0.02, and 0.02/sqrt(2L) where a sublayer ends": (
        wirings.pre_ln(init=gpt2),
        lambda role, layer, xavier: 0.02 / 4 if role in ("out", "down") else 0.02,
    ),
    "hyper-connections: sqrt(n) where a sublayer ends": (
        wirings.hyper_connections(4),
        lambda role, layer, xavier: xavier * (2 if role in ("out", "down") else 1),
    ),
    "DS-Init: Xavier's over sqrt(l)": (
        wirings.post_ln(init=depth_scaled),
        lambda role, layer, xavier: xavier / math.sqrt(layer),
    ),
    "DeepNorm: beta = (8L)^(-1/4) = 0.3536 but for queries and keys": (
        wirings.deepnorm(),
        scale_values(0.35355339),
    ),
    "DeepNorm's encoder of 8 + 4 layers: 0.87 (8^4 * 4)^(-1/16)": (
        wirings.deepnorm("encoder", other_layers=4),
        scale_values(0.87 * 16384 ** (-1 / 16)),
    ),
    "DeepNorm's decoder of 8: (12 * 8)^(-1/4)": (
        wirings.deepnorm("decoder"),
        scale_values(96**-0.25),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_weights_have_the_published_distributions(name):
    wiring, expected = EXPECTED[name]
    stack = spoiled(stack_of(8, wiring))
    wiring.init_(stack)
    for role, layer, weight in weights(stack):
        fan_out, fan_in = weight.shape
        assert near(expected(role, layer, glorot(fan_in, fan_out)), weight), (role, layer)
    assert len({weight[0, 0].item() for _, _, weight in weights(stack)}) == 8 * 6  # each is drawn separately


def test_zero_out_makes_every_write_zero():
    wiring = wirings.pre_ln(init=zero_out)
    stack = spoiled(stack_of(3, wiring))
    wiring.init_(stack)
    x = torch.randn(2, 5, D)
    assert [bool(write.any()) for write in stack.unroll(x).writes] == [False] * 6


def test_init_resets_biases_norms_and_factors():
    for wiring in (wirings.layer_scale(0.1), wirings.rezero(), wirings.peri_ln(), wirings.admin(profiled=False)):
        stack = spoiled(stack_of(8, wiring))
        wiring.init_(stack)
        fresh = stack_of(8, wiring)
        state = stack.state_dict()
        for name, value in fresh.state_dict().items():
            if "sublayer" not in name:
                assert torch.equal(state[name], value), name
            elif name.endswith("bias"):
                assert not state[name].any(), name


def test_multihead_attention_weights_have_roles():
    attention = nn.MultiheadAttention(D, 4)
    roles = dict(weight_roles(attention))
    assert set(roles) == {"query", "key", "value", "out"}

    def call(x):
        return attention(x, x, x)[0]

    call.weight_roles = lambda: weight_roles(attention)
    stack = ResidualStack([call, nn.Linear(D, D)], D, wirings.deepnorm())
    stack.wiring.init_(stack)
    beta = (8 * 1) ** -0.25
    assert near(glorot(D, D), attention.in_proj_weight[:D])
    assert near(beta * glorot(D, D), attention.in_proj_weight[2 * D :])
    other = nn.MultiheadAttention(D, 4, kdim=32, vdim=16)  # separate projections
    assert [weight.shape[1] for _, weight in weight_roles(other)] == [D, 32, 16, D]


def test_linear_chain_ends_in_down():
    chain = nn.Sequential(nn.Linear(D, FF), nn.LayerNorm(FF), nn.Linear(FF, FF), nn.GELU(), nn.Linear(FF, D))
    assert [role for role, _ in weight_roles(chain)] == ["up", "up", "down"]
    assert [role for role, _ in weight_roles(nn.Linear(D, D))] == ["down"]
    assert list(weight_roles(nn.Identity())) == list(weight_roles(torch.tanh)) == []


def without_roles():
    return nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])


def test_unneeded_roles_may_be_unknown():
    stack = spoiled(ResidualStack([without_roles()], D, "pre_ln"))
    stack.wiring.init_(stack)
    assert near(glorot(D, D), stack.connections[0].sublayer[0].weight)


@pytest.mark.parametrize("wiring", [wirings.deepnorm(), wirings.pre_ln(init=gpt2), wirings.pre_ln(init=zero_out)])
def test_needed_unknown_role_raises_before_drawing(wiring):
    stack = spoiled(ResidualStack([nn.Linear(D, D), without_roles()], D, wiring))
    assert_refused("sublayers[1] (ModuleList) states no roles for its weights", lambda: wiring.init_(stack))
    assert all(bool((p == 7).all()) for p in stack.parameters())


REFUSED = {
    "Embedding has the parameter 'weight', whose role is not known": lambda: wirings.pre_ln().init_(
        ResidualStack([nn.Embedding(D, D)], D, "pre_ln")
    ),
    "stack was built with pre_ln": lambda: wirings.deepnorm().init_(stack_of(1, "pre_ln")),
    "stack is a Linear, expected a ResidualStack": lambda: wirings.pre_ln().init_(nn.Linear(2, 2)),
}


test_wrong_stacks_are_refused = make_test(REFUSED)


# Admin's profile


def test_admin_omega_follows_its_recurrence():
    wiring = wirings.admin()
    stack = stack_of(4, wiring, elementwise_affine=False, dropout=0.5).double()
    x = nn.functional.layer_norm(torch.randn(8, 16, D, dtype=torch.float64), (D,))
    wiring.init_(stack, x)
    assert stack.training
    omega = 1.0
    for here in stack.connections:
        assert here.a.shape == (D,)
        torch.testing.assert_close(here.a, torch.full_like(here.a, omega))
        with torch.no_grad():
            f = here.sublayer(x)
            z = omega * x + f
            omega = float((omega**2 * x.var(correction=0) + f.var(correction=0)).sqrt())
            x = nn.functional.layer_norm(z, (D,))
    assert omega > 1.5  # each sublayer adds its variance


def test_admin_failure_leaves_the_stack_unchanged():
    wiring = wirings.admin()
    stack = stack_of(2, wiring)
    assert_refused("admin measures its factors: give init_ the inputs of the stack", lambda: wiring.init_(stack))
    assert_refused(
        "sublayer 0 an output that is not finite", lambda: wiring.init_(stack, torch.full((2, 3, D), math.inf))
    )
    assert all(torch.equal(here.a, torch.ones(D)) for here in stack.connections)
    assert stack.training
