"""Tests of Encoder, Decoder and Transformer: wirings, masks, layouts, errors (for torch see test_from_torch.py)."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from addnorm.nn import Decoder, Encoder, Transformer
from support import stacks
from support.pairwise import rotate
from support.refusals import make_test
from support.transformer_inputs import (
    BATCH,
    HEADS,
    D,
    M,
    N,
    compute_gradients,
    f64,
    get_sizes,
    make_inputs,
    make_module,
    make_padding,
    padding_mask,
)

ALL = {wiring.name: wiring for wiring in stacks.ALL}


# Every wiring


@pytest.mark.parametrize(("wiring", "kind"), rotate([*ALL], [Encoder, Decoder, Transformer], 1))
def test_every_wiring_trains_every_parameter_from_finite_start(kind, wiring):
    start = kind(*get_sizes(kind), wiring=ALL[wiring], dtype=f64)
    assert start(*make_inputs(kind)).isfinite().all()
    module = make_module(kind, ALL[wiring])
    y, *grads = compute_gradients(module, module.parameters(), make_inputs(kind))
    assert y.shape == (BATCH, N, D)
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


@pytest.mark.parametrize("causal", [True, False])
def test_decoder_is_causal_on_request(causal):
    decoder = make_module(Decoder, causal=causal)
    x, memory = make_inputs(Decoder)
    other = torch.cat([x[:, :3], torch.randn(BATCH, N - 3, D, dtype=f64)], 1)
    assert torch.equal(decoder(x, memory)[:, :3], decoder(other, memory)[:, :3]) is causal


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


@pytest.mark.parametrize("kind", [Encoder, Decoder, Transformer])
def test_batch_first_changes_only_the_layout(kind):
    module, tensors = make_module(kind), make_inputs(kind)
    other = kind(*get_sizes(kind), dtype=f64, batch_first=False)
    other.load_state_dict(module.state_dict())
    keep = make_padding(kind)
    expected = module(*tensors, **keep)
    actual = other(*(t.transpose(0, 1) for t in tensors), **keep)
    assert_close(actual.transpose(0, 1), expected, rtol=1e-13, atol=1e-13)


# Errors

X, MEMORY = torch.zeros(BATCH, N, D), torch.zeros(BATCH, M, D)
REFUSED = {
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
