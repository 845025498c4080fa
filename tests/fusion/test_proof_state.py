"""Tests that the proof restores the model, its arguments and the random states."""

import copy
import itertools
import math
import random

import numpy
import pytest
import torch
from torch import nn

from addnorm.fusion.proof import prove
from addnorm.stream.dataflow import snapshot
from support.changed_models import Function, X, make_layer, prove_call, with_library_norms
from support.equality import assert_same
from support.families import families


def state():
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()  # noqa: NPY002


def test_argument_passed_twice_stays_one_object():
    class Cache:
        seen = 0

    def forward(m, x, y, a, b):
        assert x is y
        assert a is b
        a.seen += 1
        return x @ m.w * b.seen

    model = Function(forward, 16, 4)
    cache = Cache()
    assert prove(model, model, model, (X, X, cache), {"b": cache}).holds
    assert cache.seen == 0


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_proof_restores_a_cache(kind):
    from transformers import DynamicCache, StaticCache

    model, args, kwargs = families()["llama"].build()
    cache = DynamicCache() if kind == "dynamic" else StaticCache(model.config, max_cache_len=16)
    kwargs.pop("attention_mask")
    with torch.no_grad():
        model(*args, **kwargs, past_key_values=cache)
    keys = cache.layers[0].keys
    held = keys.clone()
    proof = prove(model, model, with_library_norms(model), args, {**kwargs, "past_key_values": cache})
    assert proof.holds
    assert proof.oracle == "float64"
    assert cache.layers[0].keys is keys
    assert torch.equal(keys, held)


def test_proof_keeps_the_graph_of_the_caller():
    model = make_layer(dropout=0.0)
    scale = torch.ones(16, requires_grad=True)
    x = X * scale.exp()
    assert prove_call(model, x=x).holds
    x.sum().backward()
    assert scale.grad is not None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_proof_restores_after_an_error(error):
    model = nn.BatchNorm1d(5)
    held, before = copy.deepcopy(model.state_dict()), state()
    x = X.clone()

    def after(x):
        model(x.mul_(2))
        random.random()
        numpy.random.rand()  # noqa: NPY002
        raise error("in the middle")

    with pytest.raises(error, match="in the middle"):
        prove_call(model, after, x=x)
    assert state() == before
    assert torch.equal(x, X)
    assert_same(model.state_dict(), held)


def test_interrupt_while_restoring_leaves_the_state(monkeypatch):
    model, equal, calls = nn.BatchNorm1d(5), snapshot._equal, itertools.count(1)
    held = copy.deepcopy(model.state_dict())

    def interrupted(a, b):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return equal(a, b)

    monkeypatch.setattr(snapshot, "_equal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prove_call(model)
    assert_same(model.state_dict(), held)


def test_proof_copies_outputs_that_alias_buffers():
    def forward(m, x):
        m.held.add_(x.mean())
        return m.held

    model = Function(forward, 4, held=torch.zeros(4))
    assert prove_call(model).outputs[0].magnitude == pytest.approx(float(X.mean().abs()))
    assert not prove_call(model, lambda x: model(x * 1.001)).holds


def test_proof_accepts_expanded_inputs():
    model = make_layer(dropout=0.0)
    x = torch.tensor([math.nan, 0.5]).view(2, 1, 1).expand(2, 5, 16)
    assert prove_call(model, x=x).holds


def test_leaf_arguments_stay_leaves():
    def forward(m, x):
        assert x.is_leaf
        assert x.requires_grad
        return x @ m.w

    x = X.clone().requires_grad_()
    model = Function(forward, 16, 4)
    assert prove_call(model, x=x).holds
    assert x.grad is None
