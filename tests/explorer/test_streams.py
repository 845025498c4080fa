"""Tests of the streams view's data: its numbers against the library, and the description of each wiring."""

import pytest

from addnorm import wirings
from addnorm.explorer.streams import STEPS, compute, describe, parse
from addnorm.lab.streams_probe import PROBED

SMALL = {"sublayers": 4, "d_model": 8}


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


def test_description_has_the_wirings_settings():
    described = describe()["wirings"]
    assert [name for name in PROBED if not described[name]["is_learned"]] == [
        "pre_ln", "reversible", "resi_dual", "siamese_norm",
    ]  # fmt: skip
    assert {name for name in PROBED if described[name]["has_n"]} == {
        "hyper_connections", "mhc", "independent_hc", "gated_residual",
    }  # fmt: skip
    assert described["pre_ln"]["equation"] == wirings.pre_ln().equation()


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
