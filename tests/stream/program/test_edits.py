"""Tests of `ablate` on several streams against models edited by hand, and of the tools that refuse such models."""

import copy
import itertools

import pytest
import torch

import addnorm
from support.expansion import record_mhc
from support.families import shake
from support.stacks import encoder


@pytest.fixture(scope="module")
def run():
    return record_mhc("stacked")


EDITS = {
    "zero": (addnorm.ablate, lambda w: w * 0.0),
    "half": (lambda site: addnorm.scale_write(site, 0.5), lambda w: w * 0.5),
    "mean": (lambda site: addnorm.ablate(site, "mean"), lambda w: w.mean((0, 1), keepdim=True).expand_as(w)),
}


def assert_edited(model, x, edited, block):
    """Compare the output in a block of an edit, and its gradients, with those of an edited model."""
    before = model(x)
    with block:
        found = model(x)
        (found * x).sum().backward()
    expected = edited(x)
    (expected * x).sum().backward()
    assert torch.equal(found, expected)
    assert not torch.equal(found, before)
    assert torch.equal(model(x), before)
    for parameter, other in zip(model.parameters(), edited.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-6)
        parameter.grad = None


@pytest.mark.parametrize(
    ("name", "form"), [("zero", "stacked"), *itertools.product(("half", "mean"), ("tuple", "batch"))]
)
def test_changed_write_equals_edited_model_to_the_bit(name, form):
    edit, by_hand = EDITS[name]
    run = record_mhc(form)
    for k, site in enumerate(addnorm.inspect(run.model, run.x).program.sites):
        edited = copy.deepcopy(run.model)
        own = edited.layers[k // 2][k % 2]
        own.branch = lambda r, real=own.branch: by_hand(real(r))
        assert_edited(run.model, run.x, edited, edit(site))


def test_ablate_each_has_an_effect_of_each_sublayer(run):
    inspection = addnorm.inspect(run.model, run.x)
    effects = addnorm.ablate_each(inspection, run.x)
    assert [one.site.id for one in effects] == [site.id for site in inspection.program.sites]
    assert all(one.output_change > 0.01 for one in effects)
    with (
        addnorm.ablate(inspection.site(1)),
        pytest.raises(RuntimeError, match=r"inside addnorm\.ablate"),
    ):
        addnorm.decompose(run.model, run.x)


@pytest.mark.parametrize("wiring", ["ngpt", "gated_mix"])
def test_changed_normed_write_equals_edited_model_to_the_bit(wiring):
    model, x = shake(encoder(wiring)), torch.randn(2, 5, 16)
    site = addnorm.inspect(model, x).program.sites[1]
    edited = copy.deepcopy(model)
    edited.stack.layers[0].connections[1].norm_branch.register_forward_hook(lambda module, args, out: 0.5 * out)
    assert_edited(model, x, edited, addnorm.scale_write(site, 0.5))
