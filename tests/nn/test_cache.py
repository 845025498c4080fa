"""Tests of KeyValueCache: decoding, beams, drafts, failed calls, wrong use."""

import copy
from itertools import accumulate, pairwise

import pytest
import torch
from torch.testing import assert_close

from addnorm import ResidualStack
from addnorm.nn import Decoder, KeyValueCache, SelfAttention, block
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
from support.pairwise import product
from support.refusals import assert_refused

# Decoding with a cache

ROUND_OFF = {"rtol": 1e-12, "atol": 1e-12}
CHUNKS = [[1] * 9, [9], [4, 5], [1, 3, 1, 4], [6, 1, 1, 1], [2, 0, 7]]


def decoder(cross=True, **options):
    return Decoder(2, D, HEADS, 16, cross_attention=cross, dtype=f64, **options).eval()


def draw(n):
    """Return n tokens of each sample."""
    return torch.randn(BATCH, n, D, dtype=f64)


@pytest.mark.parametrize(
    ("chunks", "batch_first", "cross", "grad"), product(CHUNKS, [True, False], [True, False], [True, False])
)
def test_decoding_in_chunks_matches_the_whole_sequence(chunks, batch_first, cross, grad):
    module = decoder(cross, batch_first=batch_first)
    along, x, memory = int(batch_first), draw(9), draw(M)
    if not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    named = {"memory": memory, "memory_key_mask": random_mask(BATCH, M)} if cross else {}
    mask, keys = torch.randn(9, 9, dtype=f64), random_mask(BATCH, 9)
    cache = KeyValueCache(capacity=4)
    x.requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        expected = module(x, mask=mask, key_mask=keys, **named)
        steps = [
            module(step, mask=mask[end - step.shape[along] : end, :end], key_mask=keys[:, :end], cache=cache, **named)
            for step, end in zip(x.split(chunks, dim=along), accumulate(chunks), strict=True)
        ]
        actual = torch.cat(steps, dim=along)
    assert_close(actual, expected, **ROUND_OFF)
    if grad:  # it reaches cached keys and values
        leaves, dy = [x, *module.parameters()], torch.randn_like(expected)
        gradients = [torch.autograd.grad(y, leaves, dy) for y in (actual, expected)]
        assert_close(*gradients, rtol=1e-11, atol=1e-11)
    assert cache.length == 9


def test_without_causality_queries_see_all_cached_keys():
    attention = SelfAttention(D, HEADS, dtype=f64)
    (x,) = make_inputs(attention)
    cache = KeyValueCache()
    attention(x[:, :2], cache=cache)
    assert_close(attention(x[:, 2:], cache=cache), attention(x)[:, 2:], **ROUND_OFF)


@torch.no_grad()
def test_cache_without_grad_writes_in_place():
    attention, cache, places = SelfAttention(D, HEADS, causal=True), KeyValueCache(capacity=8), []
    for step in torch.randn(100, 1, 1, D):
        attention(step, cache=cache)
        places.append(cache._tokens[attention].pairs.data_ptr())
    assert sum(a != b for a, b in pairwise(places)) == 4  # 8, 16, 32, 64, 128
    assert cache._tokens[attention].pairs.shape[3] == 128


def test_grad_modes_may_alternate():
    module = decoder(cross=False)
    x = draw(9)
    cache, expected = KeyValueCache(), module(x).detach()
    with torch.inference_mode():
        steps = [module(x[:, :2], cache=cache)]
    with torch.no_grad():
        steps.append(module(x[:, 2:4], cache=cache))
    steps.append(module(x[:, 4:6], cache=cache))
    kept = steps[-1]
    with torch.no_grad():
        steps.append(module(x[:, 6:], cache=cache))
    assert_close(torch.cat([s.detach().clone() for s in steps], 1), expected, **ROUND_OFF)
    kept.sum().backward()  # saved tensors were not overwritten


def test_truncate_does_not_overwrite_saved_tensors():
    attention, projections = SelfAttention(D, HEADS, causal=True, dtype=f64), []
    attention.in_proj.register_forward_hook(lambda module, args, output: projections.append(output))
    x, cache = draw(9), KeyValueCache()
    attention(x[:, :6], cache=cache)
    (projected,) = projections
    before = projected.detach().clone()
    cache.truncate(4)
    with torch.no_grad():
        attention(x[:, 6:8], cache=cache)
    assert torch.equal(projected, before)


@torch.no_grad()
@pytest.mark.parametrize("batch_first", [True, False])
def test_memory_is_projected_once(batch_first):
    module, calls, along = decoder(batch_first=batch_first), [], int(batch_first)
    for connection in module.stack.connections[1::3]:
        connection.sublayer.kv_proj.register_forward_hook(lambda *_: calls.append(1))
    x, memory, other = torch.randn(3, BATCH, BATCH, D, dtype=f64)
    cache = KeyValueCache()
    steps = [module(step, memory, cache=cache) for step in x.split(1, dim=along)]
    assert len(calls) == 2  # once per layer
    assert_close(torch.cat(steps, along), module(x, memory), **ROUND_OFF)
    calls.clear()
    last = x.narrow(along, 1, 1)
    cache.truncate(1)
    assert_close(module(last, cache=cache), steps[1], rtol=1e-15, atol=1e-15)  # the cached memory
    assert not calls
    cache.truncate(1)
    changed = module(last, other, cache=cache)
    assert len(calls) == 2  # a new tensor is a new memory
    assert not torch.allclose(changed, steps[1])


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("index", [[1, 0], [1, 1], [0, 0, 1, 1, 1], [1]], ids=str)
def test_reorder_selects_samples(index, again):
    """Also of a memory that is projected again, for gradients."""
    module = decoder()
    x, memory = draw(4), draw(M)
    new = torch.randn(len(index), 3, D, dtype=f64)
    cache = KeyValueCache(capacity=4)
    with torch.inference_mode():
        index = torch.tensor(index)
        for step in x.split([3, 1], 1):
            module(step, memory, cache=cache)
        cache.reorder(index.flip(0))
        cache.reorder(torch.arange(len(index)).flip(0))
    with torch.set_grad_enabled(again):
        steps = zip(new.split([1, 2], 1), (memory if again else None, None), strict=True)
        actual = torch.cat([module(step, given, cache=cache) for step, given in steps], 1)
    expected = module(torch.cat([x[index], new], 1), memory[index])[:, 4:]
    assert_close(actual, expected, **ROUND_OFF)


@torch.no_grad()
def test_truncate_drops_last_tokens_and_clear_drops_all():
    module = decoder(cross=False)
    x = draw(9)
    cache, expected = KeyValueCache(), module(x)
    module(torch.cat([x[:, :4], draw(3)], 1), cache=cache)
    assert_refused("ValueError: length is -1", lambda: cache.truncate(-1))
    cache.truncate(4)
    assert repr(cache) == "KeyValueCache(length=4)"
    assert_close(module(x[:, 4:], cache=cache), expected[:, 4:], **ROUND_OFF)
    cache.clear()
    assert cache.length == 0
    assert_close(module(x, cache=cache), expected, **ROUND_OFF)


# Wrong use


SHARED = SelfAttention(16, 4, causal=True)
REFUSED = {
    "ValueError: sublayers[2] is sublayers[0] too and cache is given": ResidualStack([SHARED, torch.tanh] * 2, 16),
    "ValueError: cache is given to a stack with checkpoint=True": ResidualStack(
        block(16, 4, causal=True), 16, checkpoint=True
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_stack_that_cannot_use_a_cache_raises(sentence):
    stack, x = REFUSED[sentence], torch.randn(1, 3, 16)
    stack(x)
    assert_refused(sentence, lambda: stack(x, cache=KeyValueCache()))


@pytest.mark.parametrize("grad", [True, False])
def test_failed_call_restores_tokens_and_memory(grad):
    module, cache, expected = decoder(), KeyValueCache(), KeyValueCache()
    x, memory = draw(9), draw(M)
    with torch.set_grad_enabled(grad):
        for each in (cache, expected):
            module(x[:, :4], memory, cache=each)
        last = module.stack.connections[-1].sublayer
        handle = last.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            module(x[:, 4:], draw(M), cache=cache)
        handle.remove()
        other = torch.randn(3, M, D, dtype=f64)
        assert_refused("ValueError: memory has a batch of 3", lambda: module(x[:, 4:], other, cache=cache))
        assert cache.length == 4
        assert torch.equal(module(x[:, 4:], cache=cache), module(x[:, 4:], cache=expected))


def test_failed_first_call_and_truncate_to_zero_empty_the_cache():
    module, cache, x = decoder(), KeyValueCache(), draw(1)
    memory = draw(M)
    with torch.no_grad():
        wrong = {"cache": cache, "mask": torch.ones(5, 5, dtype=torch.bool)}
        assert_refused("ValueError: mask has shape", lambda: module(torch.cat([x, x]), memory, **wrong))
        expected = module(x, memory, cache=cache)
        cache.reorder(torch.tensor([1, 0, 0]))
        cache.truncate(0)
        assert torch.equal(module(x, memory, cache=cache), expected)
    assert cache.length == 1


def test_cache_belongs_to_one_decoder_and_its_copy_is_independent():
    module, cache, x = decoder(cross=False), KeyValueCache(), torch.randn(1, 5, D, dtype=f64)
    with torch.no_grad():
        module(x[:, :3], cache=cache)
        draft = copy.deepcopy(cache)
        module(x[:, :2], cache=draft)
        assert (cache.length, draft.length) == (3, 5)
        sentence = "ValueError: cache has 3 tokens of another stack and none of this one"
        assert_refused(sentence, lambda: copy.deepcopy(module)(x, cache=cache))
        assert_close(module(x[:, 3:], cache=cache), module(x)[:, 3:])


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_gradients_reach_memory_first_cached_without_grad(guard):
    module, cache, x = decoder(), KeyValueCache(), torch.randn(1, 1, D, dtype=f64)
    memory = torch.randn(1, M, D, dtype=f64, requires_grad=True)
    with guard():
        module(x, memory, cache=cache)
    if guard is torch.inference_mode:
        cache._tokens.clear()  # inference tensors
    module(x, memory, cache=cache).sum().backward()
    assert memory.grad is not None
    assert module.stack.connections[1].sublayer.kv_proj.weight.grad is not None


def test_cache_of_another_batch_raises():
    cache = KeyValueCache()
    attention, x = SelfAttention(D, HEADS), torch.randn(BATCH, N, D)
    attention(x, cache=cache)
    assert_refused(
        "x has a batch of 1, expected 2, that of the cache: cache.reorder", lambda: attention(x[:1], cache=cache)
    )
