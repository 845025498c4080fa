"""The proof: what changes something is found, in an output or in a gradient."""

import math

import pytest
import torch

from addnorm.fusion.proof import prove
from support.changed import FAULTS, Function, X, layer, of, varied
from support.families import families


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    model = layer(dropout=0.0)
    proof = prove(model, model, FAULTS[fault](model), (X,), {})
    assert not proof.holds


@pytest.mark.parametrize("fault", ["no bias", "no weight", "another activation", "a gradient of zeros", "not a number"])
def test_a_fault_is_found_in_low_precision(fault):
    model = layer(dropout=0.0).bfloat16()
    assert not prove(model, model, FAULTS[fault](model), (X.bfloat16(),), {}).holds


def test_only_the_gradient_that_is_wrong_is_found():
    model = layer(dropout=0.0)
    proof = prove(model, model, FAULTS["another gradient of a weight"](model), (X,), {})
    assert all(one.holds for one in proof.outputs)
    assert [one.name for one in proof.gradients if not one.holds] == ["norm1.weight"]


def test_a_gradient_that_is_new_or_gone_is_off_by_infinity():
    model = layer(dropout=0.0)
    gone = prove(model, model, FAULTS["no gradient"](model), (X,), {})
    new = prove(model, FAULTS["no gradient"](model), model, (X,), {})
    assert of(gone.gradients, "norm1.bias").max_abs == of(new.gradients, "norm1.bias").max_abs == math.inf


def test_another_eps_in_a_deep_model_is_found():
    model, args, kwargs = families()["bert"].build()
    wrong = varied(model, lambda t: setattr(t.encoder.layer[0].attention.output.LayerNorm, "eps", 1e-5))
    assert not prove(model, model, wrong, args, kwargs).holds


def test_another_mask_of_dropout_is_found():
    model = layer(dropout=0.1).train()

    def after(x):
        torch.rand(1)
        return model(x)

    assert not prove(model, model, after, (X,), {}).holds


@pytest.mark.parametrize(
    "other", [torch.tensor([1, 3]), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([True, True])]
)
def test_integers_are_equal_or_wrong(other):
    model = Function(lambda m, x: {"y": x @ m.w, "ids": torch.tensor([1, 2])}, 16, 4)
    assert prove(model, model, model, (X,), {}).holds
    proof = prove(model, model, lambda x: {"y": x @ model.w, "ids": other}, (X,), {})
    assert [one.name for one in proof.outputs if one.max_abs == math.inf] == ["ids"]


def test_large_integers_are_compared_to_the_last_digit():
    model = Function(lambda m, x: torch.tensor(2**60), 4)
    assert prove(model, model, model, (X,), {}).holds
    assert not prove(model, model, lambda x: torch.tensor(2**60 + 1), (X,), {}).holds


@pytest.mark.parametrize("wrong_with_gradients", [True, False])
def test_an_output_is_told_by_the_worse_of_both_runs(wrong_with_gradients):
    model = layer(dropout=0.0)
    after = lambda x: model(x) + (3.0 if torch.is_grad_enabled() == wrong_with_gradients else 0.0)  # noqa: E731
    (output,) = prove(model, model, after, (X,), {}).outputs
    assert output.max_abs == pytest.approx(3.0)
