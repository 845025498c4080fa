"""The proof: what changes nothing passes, what changes something is found, and all is as it was afterwards."""

import copy
import json
import math
import random
from unittest import mock

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import addnorm
from addnorm.convert.proof import Difference, prove, worst
from families import families

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


def layer(**options):
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, layer_norm_eps=1e-12, **options)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return made


def fused(model):
    """The same with norms that round elsewhere."""

    def after(*args, **kwargs):
        ours = lambda x, shape, weight=None, bias=None, eps=1e-5: addnorm.layer_norm(x, weight, bias, eps=eps)  # noqa: E731
        with mock.patch.object(F, "layer_norm", ours):
            return model(*args, **kwargs)

    return after


def varied(model, change):
    """The same parameters in a copy of the model that `change` has changed."""
    twin = copy.deepcopy(model)
    change(twin)
    return lambda *args, **kwargs: functional_call(twin, dict(model.named_parameters()), args, kwargs)


def without(weight=False, bias=False):
    """A change: the first norm has no weight or no bias."""

    def change(twin):
        norm = twin.norm1
        norm.forward = lambda x: F.layer_norm(
            x, (16,), None if weight else norm.weight, None if bias else norm.bias, norm.eps
        )

    return change


class Backward(torch.autograd.Function):
    """x, with another gradient."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change(gradient), None


def backward(model, name, change):
    """The same model, one of its gradients changed."""
    return lambda *args: functional_call(
        model, {n: Backward.apply(p, change) if n == name else p for n, p in model.named_parameters()}, args
    )


def of(differences, name):
    return next(one for one in differences if one.name == name)


class Function(nn.Module):
    """A function as a model, with a parameter `w`."""

    def __init__(self, function, *shape, **buffers):
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, math.prod(shape)).view(shape))
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


# --- what changes nothing -------------------------------------------------------------------------------------------------


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
        assert one.limit <= 40 * eps * max(one.size, 1)  # it is no empty promise


def test_the_model_itself_is_off_by_nothing():
    model = layer()
    proof = prove(model, model, model, (X,), {})
    assert {one.off for one in (*proof.outputs, *proof.gradients)} == {0.0}
    assert all(one.error > 0 for one in proof.outputs)


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
    assert of(proof.gradients, "linear1.weight").error > 1e-4


def test_it_is_for_json():
    model = layer()
    proof = prove(model, model, varied(model, without(bias=True)), (X,), {})
    told = json.loads(json.dumps(proof.to_dict(), allow_nan=False))
    assert told["holds"] is False
    assert {"name", "off", "error", "size", "limit", "holds"} == {*told["outputs"][0]}


def test_the_worst_is_that_which_uses_most_of_its_limit():
    one, two = Difference("one", 1.0, None, 1.0, 10.0), Difference("two", 0.5, None, 1.0, 1.0)
    assert worst([one, two]) is two
    assert worst([Difference("none", 0.0, None, 0.0, 0.0), one]) is one
    assert worst([one, Difference("zero", 1e-9, None, 0.0, 0.0)]).name == "zero"
    assert worst([]) is None


# --- faults ---------------------------------------------------------------------------------------------------------------

FAULTS = {
    "another eps": lambda m: varied(m, lambda t: setattr(t.norm1, "eps", 1e-5)),
    "another eps at the end": lambda m: varied(m, lambda t: setattr(t.norm2, "eps", 1e-5)),
    "no bias": lambda m: varied(m, without(bias=True)),
    "no weight": lambda m: varied(m, without(weight=True)),
    "another activation": lambda m: varied(m, lambda t: setattr(t, "activation", F.silu)),
    "another gradient of a weight": lambda m: backward(m, "norm1.weight", lambda g: g * 1.001),
    "another gradient of a matrix": lambda m: backward(m, "linear1.weight", lambda g: g * 1.001),
    "another gradient of a bias": lambda m: backward(m, "norm2.bias", lambda g: g * 1.001),
    "one element of a gradient": lambda m: backward(m, "linear1.bias", lambda g: g + 1e-3 * F.one_hot(torch.tensor(3), 32)),
    "no gradient": lambda m: backward(m, "norm1.bias", lambda g: None),
    "a gradient of zeros": lambda m: backward(m, "norm1.bias", torch.zeros_like),
    "not a number": lambda m: lambda x: m(x).index_fill(-1, torch.tensor(3), math.nan),
    "infinity": lambda m: lambda x: m(x).index_fill(-1, torch.tensor(3), math.inf),
    "another dtype": lambda m: lambda x: m(x).double(),
    "another shape": lambda m: lambda x: m(x)[:1],
    "another structure": lambda m: lambda x: (m(x),),
    "one more": lambda m: lambda x: {"output": m(x), "more": x},
    "none": lambda m: lambda x: None,
    "a graph cut off": lambda m: lambda x: m(x).detach(),
    "only without gradients": lambda m: lambda x: m(x) * (1.0 if torch.is_grad_enabled() else 1.001),
    "only with gradients": lambda m: lambda x: m(x) * (1.001 if torch.is_grad_enabled() else 1.0),
}  # fmt: skip


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
    assert of(gone.gradients, "norm1.bias").off == of(new.gradients, "norm1.bias").off == math.inf


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
    assert [one.name for one in proof.outputs if one.off == math.inf] == ["ids"]


def test_large_integers_are_compared_to_the_last_digit():
    model = Function(lambda m, x: torch.tensor(2**60), 4)
    assert prove(model, model, model, (X,), {}).holds
    assert not prove(model, model, lambda x: torch.tensor(2**60 + 1), (X,), {}).holds


@pytest.mark.parametrize("wrong_with_gradients", [True, False])
def test_an_output_is_told_by_the_worse_of_both_runs(wrong_with_gradients):
    model = layer(dropout=0.0)
    after = lambda x: model(x) + (3.0 if torch.is_grad_enabled() == wrong_with_gradients else 0.0)  # noqa: E731
    (output,) = prove(model, model, after, (X,), {}).outputs
    assert output.off == pytest.approx(3.0)


# --- limits ---------------------------------------------------------------------------------------------------------------


def test_a_gradient_that_is_zero_but_for_rounding_may_be_other_noise():
    model = Function(lambda m, x: F.scaled_dot_product_attention(x, x + m.w, x * 2), 16)
    after = lambda x: (x @ (x + model.w).mT / 4).softmax(-1) @ (x * 2)  # noqa: E731
    proof = prove(model, model, after, (X,), {})
    assert proof.gradients[0].size < 1e-5
    assert proof.holds
    assert not prove(model, model, backward(model, "w", lambda g: g + 1e-4), (X,), {}).holds


def test_the_gradient_of_attentions_key_bias_makes_no_limit_loose():
    model, args, kwargs = families()["vit"].build()
    proof = prove(model, model, fused(model), args, kwargs)
    assert proof.holds
    noise = [one for one in proof.gradients if one.name.endswith("k_proj.bias") or one.size < 1e-4]
    assert noise
    assert all(one.limit < 1e-5 * one.size for one in proof.gradients if one.size > 1)


def test_masked_elements_say_nothing_of_the_size_of_the_others():
    mask = torch.tensor([0.0, 0.0, -math.inf, torch.finfo(torch.float32).min])
    model = Function(lambda m, x: x @ m.w + mask, 16, 4)
    proof = prove(model, model, lambda x: x @ (model.w * 1) + mask, (X,), {})
    assert proof.holds
    assert proof.outputs[0].size < 100
    assert not prove(model, model, lambda x: x @ (model.w * 1.0001) + mask, (X,), {}).holds
    assert not prove(model, model, lambda x: x @ model.w + mask.roll(1), (X,), {}).holds


def test_not_a_number_may_be_where_there_was_none_before():
    model = Function(lambda m, x: (x @ m.w).log(), 16, 4)
    proof = prove(model, model, model, (X,), {})
    assert proof.outputs[0].off == 0
    assert proof.outputs[0].holds


def test_complex_outputs_count():
    model = Function(lambda m, x: torch.fft.fft(x @ m.w), 16, 4)
    assert prove(model, model, model, (X,), {}).holds
    assert not prove(model, model, lambda x: torch.fft.fft(x @ model.w).conj().resolve_conj(), (X,), {}).holds


def test_an_empty_output_holds():
    model = Function(lambda m, x: (x[:0] @ m.w, x @ m.w), 16, 4)
    proof = prove(model, model, model, (X,), {})
    assert proof.holds
    assert proof.outputs[0].size == 0


def test_sparse_gradients_count():
    model = nn.Embedding(9, 4, sparse=True)
    ids = torch.tensor([1, 3])
    assert prove(model, model, model, (ids,), {}).holds
    assert not prove(model, model, lambda x: F.embedding(x, model.weight * 1.001, sparse=False), (ids,), {}).holds


def test_what_float64_computes_otherwise_is_judged_without_it():
    def otherwise(m, x):  # as an expert that is chosen by the last digit
        y = x @ m.w
        return {"a": y, "b": y * 2, "c": y * (3.0 if x.dtype == torch.float64 else 1.0)}

    model = Function(otherwise, 16, 4)
    proof = prove(model, model, model, (X,), {})
    assert proof.oracle == "float64"
    assert of(proof.outputs, "c").error > 1
    assert of(proof.outputs, "c").limit < 1e-4 * of(proof.outputs, "c").size


# --- float64 --------------------------------------------------------------------------------------------------------------


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("no second one\nof this")


def test_a_model_that_cannot_be_copied_is_told():
    model = Uncopied(16, 4)
    proof = prove(model, model, lambda x: model(x * 1), (X,), {})
    assert proof.oracle == "no float64 run: RuntimeError: no second one"
    assert proof.holds
    assert {one.error for one in (*proof.outputs, *proof.gradients)} == {None}
    assert not prove(model, model, lambda x: model(x * 1.001), (X,), {}).holds


def no_float64(m, x):
    if x.dtype == torch.float64:
        raise TypeError("never in float64")
    return x @ m.w


def test_an_operator_without_float64_is_told():
    model = Function(no_float64, 16, 4)
    proof = prove(model, model, model, (X,), {})
    assert proof.oracle == "no float64 run: TypeError: never in float64"
    assert proof.holds


def test_low_precision_without_float64_is_measured_in_float32():
    model = Function(no_float64, 16, 4).bfloat16()
    proof = prove(model, model, model, (X.bfloat16(),), {})
    assert proof.oracle == "float32"
    assert proof.outputs[0].error > 0


def test_a_model_in_float64_has_nothing_to_be_measured_by():
    model = layer(dropout=0.0).double()
    proof = prove(model, model, fused(model), (X.double(),), {})
    assert proof.holds
    assert proof.oracle == "the model itself is in float64"
    assert not prove(model, model, FAULTS["another eps"](model), (X.double(),), {}).holds


def test_a_run_with_other_random_numbers_measures_nothing():
    def forward(m, x):
        noise = numpy.random.default_rng().standard_normal(x.shape) if x.dtype == torch.float64 else numpy.ones(x.shape)
        return (x * torch.from_numpy(noise).to(x.dtype)) @ m.w

    model = Function(forward, 16, 4)
    proof = prove(model, model, model, (X,), {})
    assert "something else" in proof.oracle
    assert proof.outputs[0].error is None
    assert proof.holds


def test_tensors_that_are_no_buffers_are_in_float64_too():
    model = Function(lambda m, x: x @ m.w @ m.plain, 16, 4)
    model.plain = torch.eye(4)
    assert prove(model, model, model, (X,), {}).oracle == "float64"


# --- which gradients ------------------------------------------------------------------------------------------------------


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


# --- all is as it was -----------------------------------------------------------------------------------------------------


def state():
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()  # noqa: NPY002


def test_nothing_of_the_model_changes():
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(5), nn.Dropout(0.5))
    model[0].weight.grad = torch.full_like(model[0].weight, 7.0)
    held, before = copy.deepcopy(model.state_dict()), state()
    proof = prove(model, model, model, (X,), {})
    assert proof.holds
    assert proof.oracle == "float64"
    assert state() == before
    assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad.eq(7).all()
    assert model[0].bias.grad is None


def test_a_forward_that_writes_into_a_parameter_begins_each_time_with_the_same():
    model = nn.Embedding(9, 4, max_norm=0.5)
    held = model.weight.detach().clone()
    assert prove(model, model, model, (torch.tensor([1, 3]),), {}).holds
    assert torch.equal(model.weight, held)


def test_a_forward_that_counts_begins_each_time_with_the_same():
    def count(m, x):
        m.steps += 1
        m.last = m.last * 2
        m.fresh = x
        return x @ m.w * m.steps * m.last, m.steps

    model = Function(count, 16, 4, steps=torch.tensor(0), last=torch.ones(4))
    model.fresh = None
    proof = prove(model, model, model, (X,), {})
    assert proof.holds
    assert of(proof.outputs, "[1]").size == 1
    assert model.steps == 0
    assert model.last.eq(1).all()
    assert model.fresh is None


def test_a_forward_that_writes_what_learns_into_the_models_memory_leaves_no_graph_there():
    def write(m, x, memory):
        m.held.copy_((x @ m.w).mean((0, 1)))
        memory.copy_(m.held)
        return x @ m.w * memory

    model = Function(write, 16, 4, held=torch.zeros(4))
    memory = torch.zeros(4)
    proof = prove(model, model, model, (X, memory), {})
    assert proof.holds
    assert proof.oracle == "float64"
    for one in (model.held, memory):
        assert one.eq(0).all()
        assert one.is_leaf
        assert not one.requires_grad


def test_a_generator_of_the_models_own_begins_each_time_with_the_same():
    model = Function(lambda m, x: torch.rand(x.shape, generator=m.generator, dtype=x.dtype) * x @ m.w, 16, 4)
    model.generator = torch.Generator().manual_seed(3)
    held = model.generator.get_state()
    assert prove(model, model, model, (X,), {}).holds
    assert torch.equal(model.generator.get_state(), held)


def test_what_is_given_begins_each_time_with_the_same():
    def write(m, x, cache, memory):
        assert cache["x"] is x  # the same tensor, as it is outside
        x.mul_(2)
        cache["seen"] = cache.get("seen", 0) + 1
        memory.append(x)
        return x @ m.w * cache["seen"] * len(memory)

    model = Function(write, 16, 4)
    x, memory = X.clone(), []
    cache = {"x": x}
    assert prove(model, model, model, (x,), {"cache": cache, "memory": memory}).holds
    assert torch.equal(x, X)
    assert memory == []
    assert cache == {"x": x}


def test_what_is_given_twice_is_one_and_the_same():
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
def test_a_cache_that_is_given_is_as_it_was(kind):
    from transformers import DynamicCache, StaticCache

    model, args, kwargs = families()["llama"].build()
    cache = DynamicCache() if kind == "dynamic" else StaticCache(model.config, max_cache_len=16)
    kwargs.pop("attention_mask")
    with torch.no_grad():
        model(*args, **kwargs, past_key_values=cache)
    keys = cache.layers[0].keys
    held = keys.clone()
    proof = prove(model, model, fused(model), args, {**kwargs, "past_key_values": cache})
    assert proof.holds
    assert proof.oracle == "float64"
    assert cache.layers[0].keys is keys
    assert torch.equal(keys, held)


def test_a_graph_of_the_callers_is_not_used_up():
    model = layer(dropout=0.0)
    scale = torch.ones(16, requires_grad=True)
    x = X * scale.exp()
    assert prove(model, model, model, (x,), {}).holds
    x.sum().backward()
    assert scale.grad is not None


def test_leaves_stay_leaves_and_keep_no_gradient():
    x = X.clone().requires_grad_()
    seen = []
    model = Function(lambda m, x: (seen.append((x.is_leaf, x.requires_grad)), x @ m.w)[1], 16, 4)
    assert prove(model, model, model, (x,), {}).holds
    assert {*seen} == {(True, True)}
    assert x.grad is None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_all_is_as_it_was_when_a_run_fails(error):
    model = nn.BatchNorm1d(5)
    held, before = copy.deepcopy(model.state_dict()), state()
    x = X.clone()

    def after(x):
        model(x.mul_(2))
        random.random()
        numpy.random.rand()  # noqa: NPY002
        raise error("in the middle")

    with pytest.raises(error, match="in the middle"):
        prove(model, model, after, (x,), {})
    assert state() == before
    assert torch.equal(x, X)
    assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())


def test_outputs_that_are_memory_of_the_models_are_compared_as_they_were():
    def forward(m, x):
        m.held.add_(x.mean())
        return m.held

    model = Function(forward, 4, held=torch.zeros(4))
    assert prove(model, model, model, (X,), {}).outputs[0].size == pytest.approx(float(X.mean().abs()))
    assert not prove(model, model, lambda x: model(x * 1.001), (X,), {}).holds


def test_what_is_not_a_number_in_the_model_stays():
    model = Function(lambda m, x: x @ m.w, 16, 4, held=torch.full((3,), math.nan))
    assert prove(model, model, model, (X,), {}).holds
    assert model.held.isnan().all()


def test_an_expanded_input_may_be_given():
    model = layer(dropout=0.0)
    x = torch.tensor([math.nan, 0.5]).view(2, 1, 1).expand(2, 5, 16)
    assert prove(model, model, model, (x,), {}).holds
