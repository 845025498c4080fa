"""Tests of `record`, `decompose` and copies of the model inside `ablate` and `scale_write`."""

import copy

import pytest
import torch

import addnorm
from support.instrumented_model import column, record
from support.scaled_model import edit
from support.stream_steps import X, make_steps, repeat


def writes(rec):
    return column(rec, "write", "l2")


@pytest.mark.parametrize(
    ("inner", "scale"), [("record", 0.5), ("edit", 0.5), ("record", 0.0), ("record", "mean")], ids=str
)
def test_record_measures_edited_write(model, inner, scale):
    site = addnorm.inspect(model, X).sites[1]
    if inner == "record":
        with edit(site, scale):
            rec = record(model, X)
    else:
        with addnorm.record(model, grads=False) as rec, edit(site, scale), torch.no_grad():
            model(X)
    plain = writes(record(model, X))
    model.scales = [1.0, scale, 1.0, 1.0]
    expected = record(model, X)
    assert writes(rec) == pytest.approx(writes(expected), rel=1e-5)
    assert writes(rec) != pytest.approx(plain, rel=0.05)
    sheet, other = rec.balances["stream"], expected.balances["stream"]
    assert sheet.reason == ""
    assert sheet.amounts == pytest.approx(other.amounts, rel=1e-4, abs=1e-6)


def test_decompose_refuses_edited_model(model):
    with (
        addnorm.ablate(addnorm.inspect(model, X).sites[0]),
        pytest.raises(RuntimeError, match=r"inside addnorm\.ablate or scale_write, expected outside"),
    ):
        addnorm.decompose(model, X)
    assert addnorm.decompose(model, X).closure < 1e-5


def test_copy_of_edited_model_is_not_edited(model):
    with addnorm.ablate(addnorm.inspect(model, X).sites[0]), torch.no_grad():
        clone = copy.deepcopy(model)
        inside = clone(X)
    with torch.no_grad():
        assert torch.equal(inside, model(X))
        assert torch.equal(clone(X), model(X))


def test_copy_of_recorded_model_is_not_recorded(model):
    with addnorm.record(model, grads=False) as rec, torch.no_grad():
        clone = copy.deepcopy(model)
        model(X)
        clone(X)
    clone(X)
    assert rec.steps == (0,)


def test_mean_of_write_with_token_factor_is_refused():
    model, mask = make_steps(repeat(lambda m, k, x, mask: torch.addcmul(x, mask, m.branch(k, x)))), torch.rand(2, 5, 1)
    site = addnorm.inspect(model, X, mask).sites[1]
    with (
        pytest.raises(RuntimeError, match="its write by another factor for each token"),
        addnorm.ablate(site, "mean"),
    ):
        model(X, mask)
    with addnorm.ablate(site), torch.no_grad():
        assert not torch.equal(model(X, mask), model(X, 2 * mask))
