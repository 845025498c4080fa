"""Tests of `ablate` on several streams against models edited by hand, and of the tools that refuse such models."""

import copy

import pytest
import torch

import addnorm
from support.expansion import record_mhc
from support.real_models import make_model


@pytest.fixture(scope="module")
def run():
    return record_mhc("stacked")


def test_ablate_equals_edited_model_to_the_bit(run):
    model, x = run.model, run.x
    inspection = addnorm.inspect(model, x)
    for k, site in enumerate(inspection.program.sites):
        edited = copy.deepcopy(model)
        own = edited.layers[k // 2][k % 2]
        own.branch = lambda r, real=own.branch: real(r) * 0.0
        before = model(x)
        with addnorm.ablate(site):
            found = model(x)
            found.square().sum().backward()
            with pytest.raises(RuntimeError, match=r"inside addnorm\.ablate"):
                addnorm.decompose(model, x)
        expected = edited(x)
        expected.square().sum().backward()
        assert torch.equal(found, expected)
        assert not torch.equal(found, before)
        assert torch.equal(model(x), before)
        for parameter, other in zip(model.parameters(), edited.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)
            parameter.grad = None
    effects = addnorm.ablate_each(inspection, x)
    assert [one.site.id for one in effects] == [site.id for site in inspection.program.sites]
    with torch.no_grad(), addnorm.ablate(inspection.site(1)):
        change = (model(x) - run.model(x)).norm()
    assert change == 0.0
    assert all(one.output_change > 0.01 for one in effects)


EDITS = {
    "half": (lambda site: addnorm.scale_write(site, 0.5), lambda w: w * 0.5),
    "mean": (lambda site: addnorm.ablate(site, "mean"), lambda w: w.mean((0, 1), keepdim=True).expand_as(w)),
}


@pytest.mark.parametrize("form", ["tuple", "batch"])
@pytest.mark.parametrize("name", EDITS)
def test_changed_write_equals_edited_model_to_the_bit(name, form):
    edit, by_hand = EDITS[name]
    run = record_mhc(form)
    model, x = run.model, run.x
    site = addnorm.inspect(model, x).program.sites[2]
    edited = copy.deepcopy(model)
    own = edited.layers[1][0]
    own.branch = lambda r, real=own.branch: by_hand(real(r))
    with edit(site):
        found = model(x)
        found.square().sum().backward()
    expected = edited(x)
    expected.square().sum().backward()
    assert torch.equal(found, expected)
    assert not torch.equal(found, model(x))
    for parameter, other in zip(model.parameters(), edited.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad) or torch.allclose(
            parameter.grad, other.grad, rtol=1e-5, atol=1e-6
        )


def test_ablate_equals_edited_deepseek_to_the_bit():
    model, tokens = make_model("deepseek_v4:DeepseekV4", torch.float32), torch.randint(4, 64, (2, 12))
    inspection = addnorm.inspect(model, tokens, use_cache=False)
    with torch.no_grad(), addnorm.ablate(inspection.site("layers.1.mlp")):
        found = model(tokens, use_cache=False).last_hidden_state
    zero = model.layers[1].mlp.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    with torch.no_grad():
        assert torch.equal(model(tokens, use_cache=False).last_hidden_state, found)
        zero.remove()
        assert not torch.equal(model(tokens, use_cache=False).last_hidden_state, found)


def test_fuse_names_the_streams(run):
    assert "HandMhc with 4 streams" in str(addnorm.fuse(run.model, run.x)).replace("\n", " ")
