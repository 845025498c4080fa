"""Tests of repeatable calls of a model: names of outputs, and gradients."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from addnorm.fusion.runs import named_tensors, run

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
CYCLE = {"x": X}
CYCLE["self"] = CYCLE


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
        (CYCLE, ["x"]),
    ],
)
def test_named_tensors_names_the_place(result, names):
    assert [*named_tensors(result)] == names


def test_run_repeats_the_same_loss():
    model = nn.Linear(8, 3)
    parameters = dict(model.named_parameters())
    _, first = run(model, (X,), {}, parameters)
    torch.rand(3)
    assert {*first} == {"weight", "bias"}
    again = run(model, (X,), {}, parameters).gradients
    assert all(torch.equal(first[name], gradient) for name, gradient in again.items())
    assert model.weight.grad is None
    assert first["bias"].abs().le(4).all()  # each output counts as plus or minus one


def test_run_has_the_same_signs_in_low_precision():
    model = nn.Linear(8, 3)
    with torch.no_grad():
        model.weight.zero_()
    high = run(model, (X,), {}, dict(model.named_parameters())).gradients["bias"]
    low = run(model.bfloat16(), (X.bfloat16(),), {}, dict(model.named_parameters())).gradients["bias"]
    assert torch.equal(high, low.float())
