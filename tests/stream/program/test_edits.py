"""Tests of `ablate_each` and `scale_write` on several streams; those of the recorder compare more models edited by hand."""

import copy

import pytest
import torch

import addnorm
from support.families import shake
from support.scaled_model import run_backward
from support.several_streams import make_mhc
from support.stacks import encoder
from support.stream_steps import X


def test_ablate_each_has_an_effect_of_each_sublayer():
    inspection = addnorm.inspect(make_mhc(), X)
    effects = addnorm.ablate_each(inspection, X)
    assert [one.site.id for one in effects] == [site.id for site in inspection.program.sites]
    assert all(one.output_change > 0.01 for one in effects)


@pytest.mark.parametrize("wiring", ["ngpt", "gated_mix"])
def test_changed_normed_write_equals_edited_model_to_the_bit(wiring):
    model = shake(encoder(wiring))
    site, before = addnorm.inspect(model, X).site(1), model(X)
    edited = copy.deepcopy(model)
    edited.stack.layers[0].connections[1].norm_branch.register_forward_hook(lambda module, args, out: 0.5 * out)
    expected = run_backward(edited, X)
    with addnorm.scale_write(site, 0.5):
        actual = run_backward(model, X)
    assert torch.equal(actual[0], expected[0])
    assert not torch.equal(actual[0], before)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(model(X), before)
