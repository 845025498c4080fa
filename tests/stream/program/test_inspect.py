"""Tests of `inspect` on several streams: every wiring of the catalog, models of transformers, and five layouts by hand."""

import json

import pytest
import torch

import addnorm
from addnorm import wirings
from support.families import shake
from support.real_models import FAMILIES
from support.several_streams import FORMS, build_transformers, make_mhc
from support.stacks import encoder
from support.stream_steps import X

SEVERAL = [
    *(wiring for wiring in wirings.list_all() if not wiring.has_rows),
    wirings.mhc(n=3, head="mean", iterations=3, eps=1e-4, norm_eps=1e-5),
    wirings.mhc(single_pass=True),
    wirings.independent_hc(n=2, magnitude=1.0),
    wirings.gated_residual(n=3, rank=5),
    wirings.hyper_connections(n=2, dynamic=False),
    wirings.attention_residuals(layers_per_block=2),
    wirings.attention_residuals(normed_values=True),
    wirings.denseformer(dilation=2),
    wirings.denseformer(period=2),
    wirings.gated_mix(temperature=0.5),
]
INITIAL = ("scale", "x0_scale", "backout", "alpha")  # options that are initial values, which training changes


@pytest.mark.parametrize("wiring", SEVERAL, ids=repr)
def test_every_wiring_is_named_with_its_options(wiring):
    model = shake(encoder(wiring, 4 if wiring.name == "denseformer" else 3))
    found = addnorm.inspect(model, X)
    assert (found.wiring, found.closes, found.unknown) == (wiring.name, True, ())
    assert addnorm.verify(found, wiring=wiring).agrees
    if found.program is not None:
        assert found.program.closure < 1e-5
        assert found.program.expansion < 1e-5
        options = dict(found.program.wiring.options)
        assert all(value == options[name] for name, value in wiring.options if name not in INITIAL)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_transformers_are_named(name):
    model = shake(build_transformers(name))
    found = addnorm.inspect(model, input_ids=torch.randint(4, 64, (2, 12)), use_cache=False)
    wiring = FAMILIES[name].wiring(model.config)
    if wiring.name == "neomme":  # it is not in the catalog
        assert (found.wiring, found.closes) == ("unknown", False)
        assert found.unnamed.closes
        assert found.unnamed.expansion < 1e-5
    else:
        assert (found.wiring, found.closes, found.unknown) == (wiring.name, True, ())
    if wiring.name in ("mhc", "independent_hc"):
        assert addnorm.verify(found, wiring=wiring).agrees
    assert found.closure < 1e-5
    assert len(found.list_sites()) == 2 * model.config.num_hidden_layers
    if found.program is not None:
        assert found.program.expansion < 1e-5
        options = dict(found.program.wiring.options if found.program.wiring else wiring.options)
        assert all(value == options[key] for key, value in wiring.options)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, torch.float32) for form in FORMS), ("first", torch.float64), ("stacked", torch.bfloat16)],
    ids=str,
)
def test_streams_are_found_in_every_layout(form, dtype):
    model = make_mhc(form).to(dtype)
    program = addnorm.inspect(model, X.to(dtype)).program
    assert program.wiring.name == "mhc"
    assert program.closure <= {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 0.0625}[dtype]
    assert {*program.sizes[1:]} == {4}
    site = program.sites[3]
    assert site.parameters["project"] == "layers.1.1.phi"
    assert site.parameters["scale"] == "layers.1.1.alpha"


def test_inspection_with_a_program_gives_json():
    document = json.loads(json.dumps(addnorm.inspect(make_mhc(), X).to_dict()))
    assert document["wiring"] == document["program"]["wiring"] == "mhc"
    assert document["streams"] == []
    assert [site["C"]["source"] for site in document["program"]["sites"]] == ["computed"] * 4
    assert document["program"]["sites"][0]["A"]["rows"] == 4


def test_several_streams_are_found_in_inference_mode():
    model = make_mhc("flat")
    with torch.inference_mode():
        found = addnorm.inspect(model, X)
        with addnorm.record(model) as rec:
            model(X)
            model(2.0 * X)
        assert torch.is_inference_mode_enabled()
    assert (found.wiring, found.closes) == ("mhc", True)
    assert rec.metadata["wiring"] == "mhc"
    assert len(rec.series("out", "rms_3", step=1)) == 1 + len(found.program.sites)
