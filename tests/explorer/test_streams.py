"""Tests of the streams view's data: its numbers against the library, and the description of each wiring."""

import pytest

from addnorm import wirings
from addnorm.explorer.streams import compute, describe, parse
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
