"""What a call gives, takes and keeps."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import addnorm
from addnorm.fusion.measure import Times, run, saved_bytes, step, tensors_of, times

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
BYTES = 4 * 8 * 4


# --- outputs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (X, ["output"]),
        ((X, X), ["[0]", "[1]"]),
        ([X, (X, None, X)], ["[0]", "[1].0", "[1].2"]),
        ({"logits": X, "states": (X, X)}, ["logits", "states.0", "states.1"]),
        ({"cache": SimpleNamespace(layers=[SimpleNamespace(keys=X)])}, ["cache.layers.0.keys"]),
        ((None, 3, "word", nn.Linear(2, 2)), []),
        (None, []),
    ],
)
def test_outputs_have_the_name_of_their_place(result, names):
    assert [*tensors_of(result)] == names


def test_what_contains_itself_is_walked_once():
    result = {"x": X}
    result["self"] = result
    assert [*tensors_of(result)] == ["x"]


# --- gradients ------------------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_one_loss_whenever_they_are_taken():
    model = nn.Linear(8, 3)
    wanted = dict(model.named_parameters())
    _, first = run(model, (X,), {}, wanted)
    torch.rand(3)
    once = step(model, (X,), {}, wanted)
    assert {*first} == {"weight", "bias"}
    for _ in range(2):
        assert all(torch.equal(first[name], gradient) for name, gradient in once().gradients.items())
    assert model.weight.grad is None
    assert first["bias"].abs().le(4).all()  # each output counts as plus or minus one


def test_a_call_without_gradients_has_no_graph():
    model = nn.Linear(8, 3)
    ran = step(model, (X,), {})()
    assert ran.gradients == {}
    assert not ran.outputs["output"].requires_grad


def test_a_call_in_low_precision_has_the_same_signs():
    model = nn.Linear(8, 3)
    with torch.no_grad():
        model.weight.zero_()
    high = run(model, (X,), {}, dict(model.named_parameters())).gradients["bias"]
    low = run(model.bfloat16(), (X.bfloat16(),), {}, dict(model.named_parameters())).gradients["bias"]
    assert torch.equal(high, low.float())


# --- seconds --------------------------------------------------------------------------------------------------------------


def test_calls_take_turns_and_the_first_alternates():
    calls = []
    taken = times(lambda: calls.append("b"), lambda: calls.append("a"), seconds=0)
    assert taken.rounds == 5
    assert "".join(calls) == "ba" + "ba" + "ab" + "ba" + "ab" + "ba"


def test_rounds_end():
    taken = times(lambda: None, lambda: None, seconds=60)
    assert taken.rounds == 101
    assert taken.before > 0
    assert taken.after > 0


def test_the_ratio_is_how_many_times_faster():
    taken = Times(before=3.0, after=1.5, rounds=5)
    assert taken.ratio == 2
    assert taken.to_dict() == {"before": 3.0, "after": 1.5, "ratio": 2.0, "rounds": 5}


@pytest.mark.parametrize("fails", [False, True])
def test_timing_leaves_the_model_as_it_was(fails):
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))
    x, state = X.clone(), torch.get_rng_state()

    def after():
        model(x.mul_(2))
        if fails:
            raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt):
            times(after, after, seconds=0, model=model, given=x)
    else:
        times(after, after, seconds=0, model=model, given=x)
    assert model[0].num_batches_tracked == 0
    assert model[0].running_mean.eq(0).all()
    assert torch.equal(x, X)
    assert torch.equal(torch.get_rng_state(), state)


# --- bytes ----------------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.ones(8))
        self.register_buffer("b", torch.ones(8))

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda m, x: x * m.w, 0),  # what is given, and a parameter
        (lambda m, x: m.w * m.b, 0),  # a buffer
        (lambda m, x: m.w + x, 0),  # an add keeps nothing
        (lambda m, x: (m.w + x).exp(), BYTES),  # its result
        (lambda m, x: (m.w + x).exp().exp(), 2 * BYTES),
        (lambda m, x: (y := m.w + x) * y, BYTES),  # the same twice
        (lambda m, x: (y := m.w + x)[:2] * y[2:], BYTES),  # two views of one
        (lambda m, x: (m.w + x).detach().exp(), 0),  # what no gradient goes to
        (lambda m, x: (m.w + x)[:1].sin(), BYTES),  # a part keeps the whole alive
    ],
)
def test_what_is_kept_for_backward_is_counted_once(function, kept):
    model = Plain(function)
    assert saved_bytes(lambda: model(X), model, X) == kept


def test_what_is_given_counts_unless_it_is_told():
    model = Plain(lambda m, x: x * m.w)
    assert saved_bytes(lambda: model(X), model) == BYTES
    assert saved_bytes(lambda: model(X), model, {"x": [X]}) == 0


def test_fused_keeps_less_than_eager():
    model = nn.LayerNorm(64)
    a, b = torch.randn(2, 32, 64, requires_grad=True).unbind()
    eager = saved_bytes(lambda: model(F.dropout(a.sin() + b.sin(), 0.5)), model, (a, b))
    fused = saved_bytes(
        lambda: addnorm.add_layer_norm(a.sin(), b.sin(), model.weight, model.bias, dropout_p=0.5), model, (a, b)
    )
    assert 32 * 64 * 4 <= fused < eager
    assert math.isfinite(fused)


def test_it_leaves_the_model_as_it_was_and_takes_gradients_anywhere():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with torch.no_grad():
        kept = saved_bytes(lambda: model(X), model, X)
    assert kept >= BYTES
    assert model[1].num_batches_tracked == 0
