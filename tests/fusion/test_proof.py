"""The proof: what changes nothing passes, outputs and gradients by their names."""

import json

import pytest
import torch
from torch import nn

from addnorm.fusion.proof import prove
from addnorm.fusion.tolerance import Difference, worst
from support.changed import Function, X, fused, layer, of, varied, without
from support.families import families

# --- what changes nothing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_in_another_rounding_holds(dtype, training):
    model = layer(dropout=0.2).to(dtype).train(training)
    proof = prove(model, model, fused(model), (X.to(dtype),), {})
    assert proof.holds
    assert proof.oracle == "float64"
    assert proof.mode == ("training" if training else "evaluation")
    assert [one.name for one in proof.outputs] == ["output"]
    assert {one.name for one in proof.gradients} == {name for name, _ in model.named_parameters()}
    eps = torch.finfo(dtype).eps
    for one in (*proof.outputs, *proof.gradients):
        assert one.tolerance <= 40 * eps * max(one.magnitude, 1)  # it is no empty promise


def test_the_model_itself_is_off_by_nothing():
    model = layer()
    proof = prove(model, model, model, (X,), {})
    assert {one.max_abs for one in (*proof.outputs, *proof.gradients)} == {0.0}
    assert all(one.eager_error > 0 for one in proof.outputs)


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "torch Transformer pre_ln"])
@pytest.mark.parametrize("training", [True, False])
def test_whole_models_hold(name, training):
    model, args, kwargs = families()[name].build()
    model.train(training)
    proof = prove(model, model, fused(model), args, kwargs)
    assert proof.holds
    assert proof.oracle == "float64"
    assert proof.gradients


def test_every_output_has_the_name_of_its_place():
    model, args, kwargs = families()["llama"].build()
    names = [one.name for one in prove(model, model, model, args, kwargs).outputs]
    assert names[0] == "last_hidden_state"
    assert {"past_key_values.layers.0.keys", "past_key_values.layers.1.values"} <= {*names}


def test_a_model_under_autocast_is_measured_by_the_precision_it_has_there():
    model = layer(dropout=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        proof = prove(model, model, fused(model), (X,), {})
    assert proof.holds
    assert proof.oracle == "float64"
    assert of(proof.gradients, "linear1.weight").eager_error > 1e-4


def test_it_is_for_json():
    model = layer()
    proof = prove(model, model, varied(model, without(bias=True)), (X,), {})
    told = json.loads(json.dumps(proof.to_dict(), allow_nan=False))
    assert told["holds"] is False
    assert {"name", "max_abs", "eager_error", "magnitude", "tolerance", "holds"} == {*told["outputs"][0]}


def test_the_worst_is_that_which_uses_most_of_its_limit():
    one, two = Difference("one", 1.0, None, 1.0, 10.0), Difference("two", 0.5, None, 1.0, 1.0)
    assert worst([one, two]) is two
    assert worst([Difference("none", 0.0, None, 0.0, 0.0), one]) is one
    assert worst([one, Difference("zero", 1e-9, None, 0.0, 0.0)]).name == "zero"
    assert worst([]) is None


# --- which gradients -------------------------------------------------------------------------------------------------------


def test_without_parameters_that_learn_there_are_no_gradients():
    model = layer(dropout=0.0)
    assert prove(model, model, model, (X,), {}, gradients=False).gradients == ()
    assert prove(model.requires_grad_(False), model, model, (X,), {}).gradients == ()


def test_parameters_that_learn_without_an_output_that_does():
    model = Function(lambda m, x: (x @ m.w).argmax(-1), 16, 4)
    proof = prove(model, model, model, (X,), {})
    assert proof.holds
    assert proof.gradients == ()


def test_a_parameter_that_is_not_used_has_no_gradient():
    model = Function(lambda m, x: x @ m.w, 16, 4)
    model.other = nn.Parameter(torch.ones(3))
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    assert [one.name for one in prove(model, model, model, (X,), {}).gradients] == ["w"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_compared_wherever_it_is_called(mode):
    model = layer(dropout=0.0)
    with mode():
        proof = prove(model, model, model, (X * 1,), {})
    assert len(proof.gradients) == len([*model.parameters()])
