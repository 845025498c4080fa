"""Tests of the streams view's data: its numbers against the library, and the description of each wiring."""

import pytest

from addnorm import wirings
from addnorm.explorer.streams import FIELDS, STEPS, compute, describe, parse
from addnorm.lab import StreamsProbe
from addnorm.lab.streams_probe import PROBED

SMALL = {"sublayers": 4, "d_model": 8}


@pytest.mark.parametrize("wiring", ["hyper_connections", "attention_residuals"])
def test_streams_equal_library(wiring):
    asked = {"wiring": wiring, **SMALL, "n": 3, "seed": 5, "perturbation": 0.5}
    actual, expected = compute(parse(asked)), StreamsProbe(**asked).measure()
    for site in expected["coefficients"]["sites"] if wiring == "attention_residuals" else ():
        del site["mix"], site["inject"]
    assert {name: actual[name] for name in expected} == expected
    options = {"n": 3} if wiring == "hyper_connections" else {}
    assert actual["equation"] == wirings.get(wiring, **options).equation()


@pytest.mark.parametrize("wiring", PROBED)
def test_only_growing_wirings_keep_states(wiring):
    result = compute(parse({"wiring": wiring, **SMALL}))
    assert result["keeps_states"] == (wiring in ("attention_residuals", "denseformer", "muddformer"))
    assert all(("mix" in site) != result["keeps_states"] for site in result["coefficients"]["sites"])
    assert len(result["sources"]) == len(result["streams"][-1]) == len(result["coefficients"]["head"])
    if wiring == "attention_residuals":
        assert result["sources"] == result["labels"]
    if wiring == "denseformer":
        assert result["sources"] == ["x_0", "attention 1", "attention 2"], "each state begins in a layer's attention"


def test_path_leads_from_pre_ln_to_attention():
    meta = describe()
    assert [step["wiring"] for step in meta["steps"]] == [
        "pre_ln", "reversible", "hyper_connections", "mhc", "attention_residuals",
    ]  # fmt: skip
    assert all(step.change.endswith(".") and step.look.endswith(".") for step in STEPS)
    learned = {name for name, of in meta["wirings"].items() if of["is_learned"]}
    assert {*PROBED} - learned == {"pre_ln", "reversible", "resi_dual", "siamese_norm"}
    assert {name for name, of in meta["wirings"].items() if of["has_n"]} == {
        "hyper_connections", "mhc", "independent_hc", "gated_residual",
    }  # fmt: skip
    assert meta["wirings"]["pre_ln"]["equation"] == wirings.pre_ln().equation()
    assert meta["fields"]["sublayers"]["maximum"] == FIELDS["sublayers"].maximum == 24


def test_sentences_of_the_steps_hold():
    """The step's text states numbers: the direct path in steps 1 and 2, and A's gain in step 4."""
    ask = {**SMALL, "sublayers": 8, "perturbation": 1.0, "seed": 2}
    results = {step.wiring: compute(parse({"wiring": step.wiring, **ask})) for step in STEPS}
    assert results["pre_ln"]["coefficients"]["direct_path"] == pytest.approx([1.0] * 9)
    assert results["reversible"]["coefficients"]["direct_path"][1:] == pytest.approx([0.5] * 8)
    for site in results["mhc"]["coefficients"]["sites"]:
        assert min(min(row) for row in site["mix"]) > 0
        assert [sum(row) for row in site["mix"]] == pytest.approx([1.0] * 4, abs=1e-5)
    gains = results["mhc"]["gains"]["mhc"]
    assert gains["forward"] == pytest.approx([1.0] * 8, abs=1e-4)
    assert max(gains["backward"]) <= 4
    for site in results["attention_residuals"]["coefficients"]["sites"]:
        assert sum(site["collapse"][0]) == pytest.approx(1.0, abs=1e-5)
