"""Tests of `inspect` on several streams: every wiring of the catalog, models of transformers, and five layouts by hand."""

import importlib

import pytest
import torch

import addnorm
from addnorm import wirings
from support.families import shake
from support.several_streams import CONFIGS, D, FORMS, HandMhc, build_transformers

SEVERAL = [
    *(wiring for wiring in wirings.list_all() if not wiring.has_rows),
    wirings.mhc(n=3, head="mean", iterations=3, eps=1e-4, norm_eps=1e-5),
    wirings.mhc(single_pass=True),
    wirings.independent_hc(n=2, magnitude=1.0),
    wirings.gated_residual(n=3, rank=5),
    wirings.hyper_connections(n=2, dynamic=False),
    wirings.hyper_connections(n=3),
    wirings.attention_residuals(layers_per_block=2),
    wirings.attention_residuals(normed_values=True),
    wirings.denseformer(dilation=2),
    wirings.denseformer(period=2),
    wirings.gated_mix(temperature=0.5),
]


def make_model(wiring, dtype=torch.float32, layers=4):
    torch.manual_seed(0)
    return shake(addnorm.nn.Encoder(layers, D, nhead=2, wiring=wiring).eval()).to(dtype)


@pytest.mark.parametrize("wiring", SEVERAL, ids=repr_of := lambda w: f"{w.name} {dict(w.options)}")
@pytest.mark.parametrize("is_shaken", [False, True])
def test_every_wiring_is_named_with_its_options(wiring, is_shaken):
    torch.manual_seed(0)
    model = addnorm.nn.Encoder(4, D, nhead=2, wiring=wiring).eval()
    found = addnorm.inspect(shake(model) if is_shaken else model, torch.randn(2, 5, D))
    assert (found.wiring, found.closes, found.unknown) == (wiring.name, True, ())
    if found.program is not None:
        assert found.program.expansion < 1e-5
        options = dict(found.program.wiring.options)
        learned = ("scale", "x0_scale", "backout", "alpha")  # initial values, which training changes
        assert all(value == options[name] for name, value in wiring.options if name not in learned)
