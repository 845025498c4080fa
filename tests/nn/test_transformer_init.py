"""Tests of Encoder, Decoder and Transformer: constants and initial weights of the wirings."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import addnorm
from addnorm.nn import Decoder, Encoder, Transformer
from addnorm.wirings.init import weight_roles
from support.transformer_inputs import HEADS, D, f64, make_inputs


def stds(module, role):
    """Return the standard deviation of a role's weights over that of Xavier's rule, for each sublayer."""
    ratios = []
    for connection in module.stack.connections:
        for name, weight in weight_roles(connection.sublayer):
            if name == role:
                ratios.append(weight.std().item() / math.sqrt(2 / sum(weight.shape)))
    return ratios


def test_transformer_has_deepnorms_encoder_decoder_constants():
    n, m = 2, 3
    transformer = Transformer(n, m, D, HEADS, wiring="deepnorm")
    alphas = {
        transformer.encoder: 0.81 * (n**4 * m) ** (1 / 16),
        transformer.decoder: (3 * m) ** (1 / 4),
        Encoder(n, D, HEADS, wiring="deepnorm"): (2 * n) ** (1 / 4),
        Decoder(m, D, HEADS, wiring=addnorm.wirings.deepnorm("decoder-only"), cross_attention=False): (2 * m)
        ** (1 / 4),
    }
    for module, alpha in alphas.items():
        constants = [connection.a for connection in module.stack.connections]
        assert constants == pytest.approx([alpha] * len(constants), rel=1e-15)


def test_deepnorm_scales_all_weights_but_queries_and_keys():
    n, m = 2, 4
    transformer = Transformer(n, m, 256, 4, wiring="deepnorm")
    betas = ((transformer.encoder, 0.87 * (n**4 * m) ** (-1 / 16)), (transformer.decoder, (12 * m) ** (-1 / 4)))
    for module, beta in betas:
        for role in ("value", "out", "up", "down"):
            assert stds(module, role) == pytest.approx([beta] * len(stds(module, role)), rel=0.02), role
        for role in ("query", "key"):
            assert stds(module, role) == pytest.approx([1.0] * len(stds(module, role)), rel=0.02), role
    assert len(stds(transformer.decoder, "value")) == 2 * m


def test_initial_weights_follow_the_wirings_rule():
    for wiring in ("pre_ln", "sandwich", "deepnorm", "rezero"):
        torch.manual_seed(11)
        encoder = Encoder(2, D, HEADS, wiring=wiring, activation="swiglu")
        start = copy.deepcopy(encoder.state_dict())
        torch.manual_seed(11)
        twin = Encoder(2, D, HEADS, wiring=wiring, activation="swiglu")
        assert all(torch.equal(start[name], value) for name, value in twin.state_dict().items())
        torch.manual_seed(3)
        encoder.wiring.init_(encoder)
        first = copy.deepcopy(encoder.state_dict())
        torch.manual_seed(3)
        twin.wiring.init_(twin)
        assert all(torch.equal(first[name], value) for name, value in twin.state_dict().items())
        for name, value in start.items():
            assert not name.endswith("proj.bias") or value.eq(0).all()


def test_gpt2_scales_last_projections_by_depth():
    sandwich = Encoder(8, 256, 4, wiring="sandwich")
    for connection in sandwich.stack.connections:
        for role, weight in weight_roles(connection.sublayer):
            expected = 0.02 / 4 if role in ("out", "down") else 0.02
            assert weight.std().item() == pytest.approx(expected, rel=0.03), role
    pre_ln = Encoder(2, 64, 4)
    for connection in pre_ln.stack.connections:
        for _, weight in weight_roles(connection.sublayer):
            bound = math.sqrt(6 / sum(weight.shape))
            assert 0.98 * bound < weight.abs().max() <= bound


def test_admin_profiles_decoder_on_encoder_output():
    transformer = Transformer(2, 2, D, HEADS, wiring="admin", dtype=f64, dropout=0.3)
    source, target = make_inputs(Transformer)
    with pytest.raises(TypeError, match="give init_ the inputs of the stack"):
        transformer.wiring.init_(transformer)
    transformer.wiring.init_(transformer, source, target)
    assert transformer.training
    assert transformer.decoder.stack.connections[0].sublayer.training
    transformer.eval().requires_grad_(False)
    first, second, third = list(transformer.decoder.stack.connections)[:3]
    attended = first.sublayer(target)
    x = F.layer_norm(target + attended, (D,))
    torch.testing.assert_close(
        second.a, torch.full_like(second.a, math.sqrt(target.var(correction=0) + attended.var(correction=0)))
    )
    omega = math.sqrt(
        second.a[0] ** 2 * x.var(correction=0) + second.sublayer(x, transformer.encoder(source)).var(correction=0)
    )
    torch.testing.assert_close(third.a, torch.full_like(third.a, omega))
    assert not any(stack._forward_pre_hooks for stack in (transformer.encoder.stack, transformer.decoder.stack))
