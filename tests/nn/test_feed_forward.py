"""Tests of the feed-forward and its block: the formulas, the width, dropout, the order of sublayers."""

import math

import torch
from torch.testing import assert_close

from addnorm.nn import FeedForward, block
from support.transformer_inputs import BATCH, HEADS, D, N, f64


def test_feed_forward_matches_its_formula():
    """Those of torch's activations are compared with torch's layers."""
    x = torch.randn(BATCH, N, D, dtype=f64)
    ff = FeedForward(D, 24, torch.sin, dtype=f64)
    assert_close(ff(x), torch.sin(x @ ff.up.weight.T + ff.up.bias) @ ff.down.weight.T + ff.down.bias)
    ff = FeedForward(D, 24, "swiglu", bias=False, dtype=f64)
    gate, up = x @ ff.gate.weight.T, x @ ff.up.weight.T
    assert_close(ff(x), (gate * torch.sigmoid(gate) * up) @ ff.down.weight.T)


def test_swiglu_width_is_the_least_sufficient_multiple_of_8():
    assert FeedForward(96).up.out_features == 384
    for d, dim_feedforward in ((48, 128), (96, 256), (64, 176), (1, 8), (4096, 10928)):
        with torch.device("meta"):
            assert FeedForward(d, activation="swiglu").gate.out_features == dim_feedforward


def test_dropout_is_inside_and_in_training_only():
    ff = FeedForward(1, 4000, dropout=0.25, bias=False)
    with torch.no_grad():
        ff.up.weight.fill_(1.0)
        ff.down.weight.fill_(1.0)
    kept = ff(torch.ones(1)).item() * 0.75 / 4000  # the kept share, each times 4/3
    assert abs(kept - 0.75) < 5 * math.sqrt(0.75 * 0.25 / 4000)
    assert ff.eval()(torch.ones(1)).item() == 4000


def test_block_lists_sublayers_in_order():
    names = [type(sublayer).__name__ for sublayer in block(D, HEADS, 8, cross_attention=True, causal=True)]
    assert names == ["SelfAttention", "CrossAttention", "FeedForward"]
    attention, ff = block(D, HEADS, dropout=0.2, attention_dropout=0.1, bias=False)
    assert (attention.dropout, ff.dropout, attention.causal) == (0.2 / 2, 0.2, False)
    assert [name for name, _ in ff.named_parameters()] == ["up.weight", "down.weight"]
    module = torch.nn.PReLU()
    assert block(D, HEADS, activation=module)[1].activation is not module
