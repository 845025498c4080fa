"""Tests of the proof: it accepts another rounding of a model, detects faults, and restores the model and its arguments."""

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
from support.changed_models import (
    FAULTS,
    Function,
    X,
    change_copy,
    find_difference,
    make_layer,
    prove_call,
    with_library_norms,
)
from support.equality import assert_same
from support.families import families

# --- equal models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_proof_holds_for_another_rounding(dtype, training):
    model = make_layer(dropout=0.2).to(dtype).train(training)
    proof = prove_call(model, with_library_norms(model), x=X.to(dtype))
    assert proof.holds
    assert proof.oracle == "float64"
    assert proof.mode == ("training" if training else "evaluation")
    assert [difference.name for difference in proof.outputs] == ["output"]
    names = [name for name, _ in model.named_parameters()]
    assert {difference.name for difference in proof.gradients} == {*names, "input [0]"}
    eps = torch.finfo(dtype).eps
    for difference in (*proof.outputs, *proof.gradients):
        assert difference.tolerance <= 40 * eps * max(difference.magnitude, 1)  # the tolerance is small


def test_proof_uses_the_precision_of_autocast():
    model = make_layer()
    with torch.autocast("cpu", torch.bfloat16):
        proof = prove_call(model, with_library_norms(model))
    assert proof.holds
    assert proof.oracle == "float64"
    assert find_difference(proof.gradients, "linear1.weight").eager_error > 1e-4


# --- gradients -------------------------------------------------------------------------------------------------------------


def test_frozen_model_has_gradients_of_inputs_only():
    model = make_layer().requires_grad_(False)
    assert [difference.name for difference in prove_call(model).gradients] == ["input [0]"]


def test_proof_compares_gradients_of_all_floating_inputs():
    model = Function(lambda m, x, y, ids, memory: x @ m.w * y[ids] + memory["a"][0].sum(), 16, 4)
    y, ids, memory = torch.randn(3, 4), torch.tensor([1, 0]), {"a": [torch.randn(5)]}
    arguments = (X[0, :2],), {"y": y, "ids": ids, "memory": memory}
    proof = prove(model, model, model, *arguments)
    assert [one.name for one in proof.gradients] == ["w", "input [0]", "input y", "input memory.a.0"]
    assert proof.holds
    assert all(one.eager_error is not None for one in proof.gradients)

    def detached(x, y, ids, memory):
        return model(x, y, ids, {"a": [memory["a"][0].detach()]})

    wrong = prove(model, model, detached, *arguments)
    assert [one.name for one in wrong.gradients if not one.holds] == ["input memory.a.0"]


def test_input_that_the_model_overwrites_has_no_gradient():
    model = Function(lambda m, x: x.mul_(2.0) @ m.w, 16, 4)
    x = X[0].clone()
    proof = prove_call(model, x=x)
    assert [one.name for one in proof.gradients] == ["w"]
    assert proof.gradient_error.startswith(
        "RuntimeError: a leaf Variable that requires grad is being used in an in-place"
    )
    assert x.equal(X[0])


def test_proof_omits_unused_parameters():
    model = Function(lambda m, x: x @ m.w, 16, 4)
    model.other = nn.Parameter(torch.ones(3))
    assert [difference.name for difference in prove_call(model).gradients] == ["w", "input [0]"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_proof_compares_gradients_in_any_grad_mode(mode):
    model = make_layer()
    with mode():
        proof = prove_call(model, x=X * 1)
    assert len(proof.gradients) == len([*model.parameters()]) + 1


@pytest.mark.parametrize("fault", FAULTS)
def test_proof_finds_faults(fault):
    model = make_layer()
    assert not prove_call(model, FAULTS[fault](model)).holds


@pytest.mark.parametrize("fault", ["another activation", "a gradient of zeros", "not a number"])
def test_proof_finds_faults_in_low_precision(fault):
    model = make_layer().bfloat16()
    assert not prove_call(model, FAULTS[fault](model), x=X.bfloat16()).holds


def test_new_gradient_differs_infinitely():
    model = make_layer()
    proof = prove(model, FAULTS["no gradient"](model), model, (X,), {})
    assert find_difference(proof.gradients, "norm1.bias").max_abs == math.inf


def test_proof_finds_another_eps_in_a_deep_model():
    model, args, kwargs = families()["bert"].build()
    wrong = change_copy(model, lambda t: setattr(t.encoder.layer[0].attention.output.LayerNorm, "eps", 1e-5))
    assert not prove(model, model, wrong, args, kwargs).holds


def test_proof_finds_another_dropout_mask():
    model = make_layer(dropout=0.1).train()

    def after(x):
        torch.rand(1)
        return model(x)

    assert not prove_call(model, after).holds


@pytest.mark.parametrize(
    "other", [torch.tensor([1, 3]), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([True, True])]
)
def test_integers_must_be_equal(other):
    model = Function(lambda m, x: (x @ m.w, torch.tensor([1, 2])), 16, 4)
    assert prove_call(model).holds
    proof = prove_call(model, lambda x: (x @ model.w, other))
    assert [difference.name for difference in proof.outputs if not difference.holds] == ["[1]"]


# --- state ------------------------------------------------------------------------------------------------------------------


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
    model = make_layer()
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
    model = make_layer()
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
