"""Tests of Encoder, Decoder and Transformer: wirings, masks, layouts, errors, options, compilation (for torch see test_from_torch.py)."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F

import addnorm
from addnorm.nn import Decoder, Encoder, Transformer
from addnorm.wirings.init import weight_roles
from support import stacks
from support.equality import assert_same
from support.pairwise import rotate
from support.refusals import make_test
from support.transformer_inputs import (
    BATCH,
    HEADS,
    D,
    M,
    N,
    assert_close,
    compute_gradients,
    f64,
    get_sizes,
    make_inputs,
    make_module,
    padding_mask,
)

ALL = {wiring.name: wiring for wiring in stacks.ALL}
PADDING = {"source_key_mask": padding_mask(M)}  # of a transformer


# Every wiring


@pytest.mark.parametrize(("wiring", "kind"), rotate([*ALL], [Encoder, Decoder, Transformer], 1))
def test_every_wiring_trains_every_parameter_from_finite_start(kind, wiring):
    start = kind(*get_sizes(kind), wiring=ALL[wiring], dtype=f64)
    assert start(*make_inputs(kind)).isfinite().all()
    module = make_module(kind, ALL[wiring])
    _, *grads = compute_gradients(module, module.parameters(), make_inputs(kind))
    for g in grads:
        assert g.isfinite().all()
        assert g.ne(0).any()


@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln", "parallel", "resi_dual", "mhc"])
def test_encoder_is_a_stack_of_blocks_with_merged_masks(wiring, monkeypatch):
    encoder = make_module(Encoder, ALL[wiring])
    (x,) = make_inputs(Encoder)
    mask, keys = torch.randn(N, N, dtype=f64), padding_mask(N)
    expected = encoder.stack(x, mask=mask, key_mask=keys)  # each attention merges its masks
    masks, sdpa = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, m, *rest: masks.append(m) or sdpa(q, k, v, m, *rest)
    )
    assert torch.equal(encoder(x, mask, keys), expected)
    assert len(masks) == 3
    assert all(m is masks[0] for m in masks)


def test_transformer_hides_source_padding_from_both_stacks():
    transformer = make_module(Transformer)
    source, target = make_inputs(Transformer)
    keep, mask = padding_mask(M), torch.randn(N, M, dtype=f64)
    memory = transformer.encoder(source, key_mask=keep)
    assert torch.equal(
        transformer(source, target, None, keep), transformer.decoder(target, memory, memory_key_mask=keep)
    )
    everything = torch.ones(BATCH, M, dtype=torch.bool)
    assert torch.equal(
        transformer(source, target, None, keep, memory_mask=mask, memory_key_mask=everything),
        transformer.decoder(target, memory, memory_mask=mask),
    )


def test_batch_first_changes_only_the_layout():
    module, tensors = make_module(Transformer), make_inputs(Transformer)
    other = Transformer(*get_sizes(Transformer), dtype=f64, batch_first=False)
    other.load_state_dict(module.state_dict())
    expected = module(*tensors, **PADDING)
    actual = other(*(t.transpose(0, 1) for t in tensors), **PADDING)
    torch.testing.assert_close(actual.transpose(0, 1), expected, rtol=1e-13, atol=1e-13)


# Errors

X, MEMORY = make_inputs(Decoder)
REFUSED = {
    "norm is ['rms'], expected one of 'layer', 'rms'": lambda: Encoder(1, 8, 2, norm=["rms"]),
    "TypeError: x is NoneType, expected a tensor of shape": lambda: Encoder(1, D, HEADS)(None),
    "TypeError: memory is given to a decoder that has cross_attention=False, expected none": lambda: Decoder(
        1, D, HEADS, cross_attention=False
    )(X, MEMORY),
    "ValueError: memory has shape (7, 16), expected (batch, tokens, 16): memory.unsqueeze(0)": lambda: Decoder(1, D, HEADS)(
        X, MEMORY[0], memory_mask=torch.ones(N, M)
    ),
    "ValueError: num_layers is 0, expected a whole number from 1": lambda: Encoder(0, D, HEADS),
}  # fmt: skip


test_wrong_inputs_raise = make_test(REFUSED)


# Constants, initial weights and options


def test_transformer_has_deepnorms_encoder_decoder_constants():
    n, m = 2, 3
    transformer = Transformer(n, m, D, HEADS, wiring="deepnorm")
    alphas = {transformer.encoder: 0.81 * (n**4 * m) ** (1 / 16), transformer.decoder: (3 * m) ** (1 / 4)}
    for module, alpha in alphas.items():
        constants = [connection.a for connection in module.stack.connections]
        assert constants == pytest.approx([alpha] * len(constants), rel=1e-15)


def test_constructor_draws_weights_by_the_wirings_rule():
    for connection in Encoder(8, 256, 4, wiring="sandwich").stack.connections:
        for role, weight in weight_roles(connection.sublayer):
            expected = 0.02 / 4 if role in ("out", "down") else 0.02
            assert weight.std().item() == pytest.approx(expected, rel=0.03), role


def test_admin_profiles_decoder_on_encoder_output():
    transformer = Transformer(2, 2, D, HEADS, wiring="admin", dtype=f64, dropout=0.3)
    source, target = make_inputs(Transformer)
    transformer.wiring.init_(transformer, source, target)
    assert transformer.training
    assert transformer.decoder.stack.connections[0].sublayer.training
    transformer.eval().requires_grad_(False)
    first, second, third = list(transformer.decoder.stack.connections)[:3]
    attended = first.sublayer(target)
    x = F.layer_norm(target + attended, (D,))
    omega = math.sqrt(
        second.a[0] ** 2 * x.var(correction=0) + second.sublayer(x, transformer.encoder(source)).var(correction=0)
    )
    torch.testing.assert_close(third.a, torch.full_like(third.a, omega))
    assert not any(stack._forward_pre_hooks for stack in (transformer.encoder.stack, transformer.decoder.stack))


def test_checkpointing_keeps_numbers_with_masks_and_dropout():
    options = {"dropout": 0.2, "attention_dropout": 0.1, "stochastic_depth": 0.3}
    module = make_module(Transformer, **options)
    other = Transformer(*get_sizes(Transformer), dtype=f64, **options, checkpoint=True)
    other.load_state_dict(module.state_dict())
    tensors = make_inputs(Transformer)
    a, b = (compute_gradients(lambda *t, m=m: m(*t, **PADDING), m.parameters(), tensors) for m in (module, other))
    assert_same(a, b)


def test_norm_kind_bias_eps_and_dropout_are_passed_on():
    encoder = Encoder(1, D, HEADS, norm="rms", eps=0.5, bias=False, residual_dtype=f64, final_norm=False)
    assert [name for name, _ in encoder.named_parameters() if "bias" in name] == []
    assert {m.eps for m in encoder.modules() if isinstance(m, addnorm.RMSNorm)} == {0.5}
    assert encoder.stack.norm_final is None
    assert encoder.stack.residual_dtype == f64
    for connection in Encoder(1, D, HEADS, dropout=0.3).stack.connections:
        assert (connection.dropout, connection.sublayer.dropout) == (0.3, 0.3)


def test_signatures_of_the_three_modules_agree():
    sizes = {"num_layers", "num_encoder_layers", "num_decoder_layers", "cross_attention", "causal"}
    options = [
        {name: (p.kind, p.default) for name, p in inspect.signature(kind).parameters.items() if name not in sizes}
        for kind in (Encoder, Decoder, Transformer)
    ]
    assert options[0] == options[1] == options[2]
    assert inspect.Parameter.VAR_KEYWORD not in {kind for kind, _ in options[0].values()}


# torch.compile uses deprecated parts of setuptools and distutils, which warn.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transformer_compiles_into_one_graph():
    module, tensors = make_module(Transformer, "deepnorm"), make_inputs(Transformer)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    expected = compute_gradients(lambda *t: module(*t, **PADDING), module.parameters(), tensors)
    assert_close(compute_gradients(lambda *t: compiled(*t, **PADDING), module.parameters(), tensors), expected)
