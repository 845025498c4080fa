"""Tests that `record` does not change results, and leaves no hook, tensor or token in a cache."""

import gc

import pytest
import torch
from torch import Tensor, nn

import addnorm
from support.instrumented_model import D, Model, backward, column, step


@pytest.fixture
def hooks():
    def count(model):
        modules = nn.modules.module
        mine = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        params = sum(len(p._backward_hooks or ()) for p in model.parameters())
        return mine + params + len(modules._global_forward_hooks) + len(modules._global_forward_pre_hooks)

    return count


def test_hooks_are_removed_after_an_error(ids, hooks):
    model = Model()
    with addnorm.record(model):
        model(ids)
        with pytest.raises(IndexError):
            model(ids + 100)
    assert hooks(model) == 0
    assert torch.backends.mha.get_fastpath_enabled()
    step(model, ids)


def test_gradients_are_unchanged(ids):
    model = Model(post=True)
    backward(model, ids)
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    step(model, ids)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True) if p.grad is not None)


def test_memory_does_not_grow_with_steps(ids, frozen_heap):
    model = Model()

    def tensors():
        gc.collect()
        return sum(type(o) is Tensor for o in gc.get_objects())

    with addnorm.record(model):
        counts = []
        for _ in range(4):
            model.zero_grad(set_to_none=False)
            backward(model, ids)
            counts.append(tensors())
    assert counts[1] == counts[2] == counts[3]


def test_two_recorders(ids):
    model = Model()
    with addnorm.record(model) as first, addnorm.record(model, grads=False) as second:
        backward(model, ids)
    assert column(first, "write", "rms") == pytest.approx(column(second, "write", "rms"))


def test_cache_is_appended_once():
    """Leave the cache unchanged in the inspection before the first forward."""
    torch.manual_seed(0)
    decoder = addnorm.nn.Decoder(2, D, nhead=2).eval()
    memory = torch.randn(2, 4, D)
    x = torch.randn(2, 5, D)
    cache, plain = addnorm.nn.KeyValueCache(), addnorm.nn.KeyValueCache()
    with torch.no_grad():
        expected = decoder(x, memory=memory, cache=plain)
        with addnorm.record(decoder):
            y = decoder(x, memory=memory, cache=cache)
    assert torch.equal(y, expected)
    assert cache.length == plain.length
