"""Tests of Attention: the formula, masks, fully masked queries."""

import copy

import pytest
import torch

from addnorm.nn import CrossAttention, SelfAttention
from addnorm.nn.masks import MergedMask, merge_masks
from support.attention_inputs import (
    BATCH,
    HEADS,
    D,
    M,
    N,
    f64,
    make_inputs,
    random_mask,
)
from support.oracle import relative
from support.pairwise import product
from support.refusals import make_test
from support.transformer_inputs import assert_close, compute_gradients

bf16 = torch.bfloat16

INF = float("inf")


def formula(attention, x, memory, mask):
    """Return attention by its definition; `mask` is float, `(batch, heads, queries, keys)`."""
    if isinstance(attention, SelfAttention):
        projections = attention.in_proj(x).chunk(3, -1)
    else:
        projections = attention.q_proj(x), *attention.kv_proj(memory).chunk(2, -1)
    q, k, v = (t.unflatten(-1, (HEADS, D // HEADS)).transpose(1, 2) for t in projections)
    weights = (q @ k.mT / (D // HEADS) ** 0.5 + mask).softmax(-1).nan_to_num(0.0)
    return attention.out_proj((weights @ v).transpose(1, 2).flatten(2))


KINDS = [SelfAttention, CrossAttention]
# Of masks, but for their last dimension, the keys.
SHAPES = [(N,), (1,), (BATCH, N), (BATCH, 1, N), (BATCH, HEADS, N), (1, HEADS, 1)]


@pytest.mark.parametrize(
    ("kind", "causal", "shape", "dtype", "key_mask"),
    product(
        KINDS, [False, True], SHAPES, [None, torch.bool, f64], [None, torch.bool, f64],
        always=[(kind, True, (N,), None, None) for kind in KINDS],
    ),
)  # fmt: skip
def test_masks_of_any_shape_match_the_formula(kind, causal, shape, dtype, key_mask):
    attention = kind(D, HEADS, dtype=f64, **({"causal": causal} if kind is SelfAttention else {}))
    tensors, m = make_inputs(attention), N if kind is SelfAttention else M
    masks = {"mask": make_mask(dtype, (*shape, m)), "key_mask": make_mask(key_mask, (BATCH, m))}
    scores = torch.zeros(BATCH, HEADS, N, m, dtype=f64)
    if causal and kind is SelfAttention:
        scores = scores.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -INF)
    for name, mask in masks.items():
        if mask is not None:
            wide = mask[:, None, None] if name == "key_mask" else mask[:, None] if mask.dim() == 3 else mask
            scores = scores.masked_fill(~wide, -INF) if mask.dtype == torch.bool else scores + wide
    named = {f"memory_{name}" if kind is CrossAttention else name: mask for name, mask in masks.items()}
    functions = (
        lambda *t: attention(*t, **named),
        lambda *t: formula(attention, *t, *[None] * (2 - len(t)), scores),
    )
    leaves = [*attention.parameters(), *(mask for mask in masks.values() if mask is not None and mask.requires_grad)]
    assert_close(*(compute_gradients(function, leaves, tensors) for function in functions))


def make_mask(dtype, shape):
    if dtype is None:
        return None
    keep = random_mask(*shape)
    return keep if dtype == torch.bool else torch.randn(shape, dtype=f64).masked_fill(~keep, -INF).requires_grad_()


@pytest.mark.parametrize(
    ("kind", "as_float", "dropout", "dtype"),
    product(KINDS, [False, True], [0.0, 0.2], [torch.float32, f64, bf16, torch.float16]),
)
def test_query_without_keys_gets_bias_and_finite_gradients(kind, as_float, dropout, dtype):
    attention = kind(D, HEADS, dropout=dropout, dtype=dtype)
    tensors = make_inputs(attention, dtype=dtype)
    mask = torch.ones(BATCH, N, N if kind is SelfAttention else M, dtype=torch.bool)
    mask[0, 2] = False
    if as_float:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -INF)
    named = {"mask" if kind is SelfAttention else "memory_mask": mask}
    results = compute_gradients(lambda *t: attention(*t, **named), attention.parameters(), tensors)
    assert torch.equal(results[0][0, 2], attention.out_proj.bias)
    assert not torch.equal(results[0][0, 1], attention.out_proj.bias)
    assert all(t.isfinite().all() for t in results)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_of_weights_keeps_their_mean(kind):
    attention = kind(D, HEADS, dropout=0.4, dtype=f64)
    tensors = make_inputs(attention)
    many = attention(*(t[:1].expand(4000, -1, -1) for t in tensors))
    expected = attention.eval()(*(t[:1] for t in tensors))[0]
    assert many.std(0).min() > 0
    assert ((many.mean(0) - expected).abs() / many.std(0)).max() < 5 / 4000**0.5
    assert torch.equal(attention(*tensors), attention(*tensors))


def test_bfloat16_error_is_bounded_and_masks_may_be_float32():
    attention = SelfAttention(D, HEADS, dtype=bf16)
    x, mask = torch.randn(BATCH, N, D, dtype=bf16), torch.randn(N, N)
    exact = copy.deepcopy(attention).double()
    expected = exact(x.double(), mask.double())
    assert attention(x, mask).dtype == bf16
    # One rounding each for the projections, the weights, the values and the output.
    assert relative(attention(x, mask=mask), expected) < 4 * 2.0**-8
    with torch.autocast("cpu", bf16):
        y = copy.deepcopy(attention).float()(x.float(), mask, random_mask(BATCH, N))
    assert y.dtype == bf16


def test_empty_batches_and_sequences():
    attention, crossing = SelfAttention(D, HEADS, causal=True), CrossAttention(D, HEADS)
    assert attention(torch.randn(2, 0, D)).shape == (2, 0, D)
    assert attention(torch.randn(0, 3, D), key_mask=torch.ones(0, 3, dtype=torch.bool)).shape == (0, 3, D)
    y = crossing(torch.randn(2, 3, D), torch.randn(2, 0, D))
    assert torch.equal(y, crossing.out_proj.bias.expand(2, 3, D))  # no keys


@pytest.mark.parametrize("kind", KINDS)
def test_weight_roles_are_views_of_packed_weights(kind):
    attention, number = kind(D, HEADS), {"query": 0, "key": 1, "value": 2, "out": 3}
    with torch.no_grad():
        for role, weight in attention.weight_roles():
            weight.fill_(number[role])
    rows = [p[:, 0] for name, p in attention.named_parameters() if name.endswith("weight")]
    assert torch.equal(torch.cat(rows), torch.arange(4.0).repeat_interleave(D))


def test_causality_alone_needs_no_mask_tensor():
    x = torch.randn(BATCH, N, D)
    assert merge_masks(x[:, :1], N, HEADS, None, None, causal=True) == MergedMask(None, False)
    assert merge_masks(x, N, HEADS, None, None, causal=True) == MergedMask(None, True)


def test_repr_has_the_settings():
    attention = SelfAttention(D, HEADS, causal=True, dropout=0.25)
    assert repr(attention).startswith("SelfAttention(\n  nhead=3, dropout=0.25, causal=True\n")


ATTENTION = SelfAttention(D, HEADS)
CROSSING = CrossAttention(D, HEADS)
X, MEMORY = make_inputs(CROSSING, torch.float32)
REFUSED = {
    "ValueError: x has shape (2, 5, 8), expected (batch, tokens, 12): its last dimension must be 12": lambda: ATTENTION(X[..., :8]),
    "ValueError: x has shape (5, 12), expected (batch, tokens, 12): x.unsqueeze(0) is a batch of one": lambda: ATTENTION(X[0]),
    "ValueError: memory has shape (2, 5, 8), expected (batch, tokens, 12)": lambda: CROSSING(X, X[..., :8]),
    "ValueError: memory has a batch of 1, expected 2, that of x": lambda: CROSSING(X, MEMORY[:1]),
    "TypeError: memory is None, expected the tokens to attend to": lambda: CROSSING(X),
    "TypeError: mask has dtype torch.int64, expected torch.bool (True: may attend) or torch.float32 (added to the scores): give "
    "it as mask.bool()": lambda: ATTENTION(X, torch.ones(N, N, dtype=torch.int64)),
    "give it as key_mask.to(torch.float32)": lambda: ATTENTION(X, key_mask=torch.ones(BATCH, N, dtype=f64)),
    "TypeError: mask is list, expected a tensor": lambda: ATTENTION(X, [[True]]),
    "ValueError: mask has shape (5, 6), expected (queries, keys) = (5, 5)": lambda: ATTENTION(X, torch.ones(N, N + 1)),
    "mask has shape (2, 2, 5, 5), expected (batch, heads, queries, keys) = (2, 3, 5, 5), or 1": lambda: ATTENTION(
        X, torch.ones(BATCH, 2, N, N)
    ),
    "torch.nn.MultiheadAttention's becomes mask.unflatten(0, (2, 3))": lambda: ATTENTION(X, torch.ones(BATCH * HEADS, N, N)),
    "or 1 in the place of any but keys: key_mask is for masks of": lambda: ATTENTION(X, torch.ones(N)),
    "ValueError: memory_key_mask has shape (5, 7), expected (batch, keys) = (2, 7): every key has an entry, also the keys of a "
    "cache; memory_mask is for other shapes": lambda: CROSSING(X, MEMORY, memory_key_mask=torch.ones(N, M)),
    "ValueError: nhead is 3, expected a number that divides d_model = 10": lambda: SelfAttention(10, 3),
    "ValueError: nhead is 0, expected a whole number from 1": lambda: CrossAttention(10, 0),
    "ValueError: dropout is 2.0, expected a probability": lambda: SelfAttention(10, 2, dropout=2.0),
}  # fmt: skip


test_wrong_inputs_raise = make_test(REFUSED)
