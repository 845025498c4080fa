"""Tests of published wirings: rows and initializations against the numbers of the papers' formulas."""

import inspect
import math

import pytest

from addnorm import Learned, Row, wirings
from addnorm.nn import Place
from addnorm.wirings.catalog import CONSTRUCTORS, EXAMPLES
from addnorm.wirings.init import RULES, Draw, gpt2

PRE = Row(norm_in=True)


# Placement of the norm


def test_parallel_sublayers_share_in_layers_of_any_size():
    assert wirings.parallel().rows(2, 3) == [PRE, Row(shares="read"), Row(shares="read")] * 2
    assert wirings.parallel(2).rows(2, 3) == [PRE, *[Row(norm_in=True, shares="state")] * 2] * 2


@pytest.mark.parametrize("name", ["post-LN", "Post LN", "POST_LN", " post_ln"])
def test_names_are_taken_as_the_field_writes_them(name):
    assert wirings.get(name) == wirings.as_wiring(name) == wirings.post_ln()


# Factors


@pytest.mark.parametrize(("num_layers", "gamma"), [(23, 1e-4), (24, 1e-5), (35, 1e-5), (36, 1e-6)])
def test_layer_scale_starts_as_in_cait(num_layers, gamma):
    assert set(wirings.layer_scale().rows(num_layers)) == {Row(norm_in=True, b=Learned(gamma, per_feature=True))}
    assert set(wirings.layer_scale(0.1).rows(num_layers)) == {Row(norm_in=True, b=Learned(0.1, per_feature=True))}


DEPTHS = [Place(layer, sublayer, 3, 3) for layer in range(3) for sublayer in range(3)]  # decoder layers: 9 sublayers
COUNTED = {  # a factor of each of the 9 sublayers
    "keel, S = 9": (wirings.keel(), "a", [1.0] * 3 + [9.0] * 6),
    "depth_scaled, a^2 = (k-1)/k": (wirings.depth_scaled(), "a", [math.sqrt((k - 1) / k) for k in range(2, 11)]),
    "depth_scaled, b^2 = 1/k": (wirings.depth_scaled(), "b", [math.sqrt(1 / k) for k in range(2, 11)]),
    "skipinit, 1/sqrt(S)": (wirings.skipinit(None), "b", [1 / 3] * 9),
    "admin, sqrt(S)": (wirings.admin(False, "constant"), "a", [3.0] * 9),
}


@pytest.mark.parametrize("name", COUNTED)
def test_factors_count_the_sublayers_of_any_layer(name):
    wiring, factor, expected = COUNTED[name]
    values = [getattr(wiring.row(*place), factor) for place in DEPTHS]
    values = [value.init if isinstance(value, Learned) else value for value in values]
    assert values == pytest.approx(expected, rel=1e-15)


def test_initializations_count_the_sublayers_of_any_layer():
    for place in DEPTHS:
        assert gpt2("out", place) == Draw("normal", pytest.approx(0.02 / 3, rel=1e-15))
        assert RULES["depth_scaled"]("up", place).gain == pytest.approx(place.number**-0.5, rel=1e-15)


@pytest.mark.parametrize("per_layer", [1, 2, 3])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_x0_residual_starts_as_in_nanochat(num_layers, per_layer):
    """Its code: 1.15 - 0.10 i / max(L - 1, 1) and 0.20 - 0.15 i / max(L - 1, 1) for layer i, and 0.2 of the state in the middle."""
    stages = wirings.x0_residual().stages(num_layers, per_layer)
    starts = [(stage.learned["scale"].init, stage.learned["x0_scale"].init) for stage in stages[::per_layer]]
    line = [i / max(num_layers - 1, 1) for i in range(num_layers)]
    assert starts == [pytest.approx((1.15 - 0.10 * share, 0.20 - 0.15 * share), rel=1e-12) for share in line]
    assert not any(stage.learned for i, stage in enumerate(stages) if i % per_layer)
    head = wirings.x0_residual().last_read(Place(num_layers, 0, num_layers, per_layer))
    assert [entry.init for entry in head.learned.values()] == [-0.2]
    grown = [i for i, stage in enumerate(stages) if stage.n_out > stage.n]
    assert grown == [(num_layers // 2 + 1) * per_layer - 1]  # the state after layer L // 2, counted from 0


def test_attention_residuals_repeat_the_reads_over_the_layers():
    stages = wirings.attention_residuals(reads=(3, 1)).stages(4, 2)
    assert [stage.reads for stage in stages] == [3, 1, 1, 1, 3, 1, 1, 1]


# By name


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_every_wiring_is_complete(name):
    wiring = wirings.get(name, **EXAMPLES.get(name, {}))
    assert wiring.name == name
    assert wiring.source
    assert wiring.use.endswith(".")
    described = inspect.getdoc(CONSTRUCTORS[name])
    for option in inspect.signature(CONSTRUCTORS[name]).parameters:
        assert f"{option}: " in described or option in ("k", "multiplier", "init"), option
