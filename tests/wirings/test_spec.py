"""Tests of Row, Learned, Place and Wiring: comparison, hashing, text, errors."""

import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest

from addnorm import Learned, Row, Wiring, wirings
from addnorm.nn import Place
from addnorm.wirings.init import gpt2

INF, NAN = float("inf"), float("nan")


def fading(at):
    return Row(norm_in=True, b=1 / at.number)


# Row and Learned


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("Row()", Row()),
        ("Row(norm_in=True, b=0.5)", Row(norm_in=True, b=0.5)),
        ("Row(norm_out=True, a=Learned(init=0.0, per_feature=True))", Row(norm_out=True, a=Learned(0.0, True))),
        ("Learned(init=1.0, shared=True)", Learned(1.0, shared=True)),
    ],
)
def test_repr_evaluates_to_the_value(written, value):
    assert repr(value) == written
    assert eval(written) == value


def test_rows_and_wirings_survive_pickle_and_copy():
    for item in (Row(b=Learned(0.5)), Place(0, 1, 2, 2), *wirings.list_all()):
        assert pickle.loads(pickle.dumps(item)) == copy.deepcopy(item) == item


@pytest.mark.parametrize(
    ("is_sum", "row"),
    [
        (True, Row()),
        (True, Row(norm_in=True, norm_branch=True, b=0.1, c=Learned(2.0))),
        (False, Row(norm_out=True)),
        (False, Row(a=0.0)),
        (False, Row(a=2.0)),
        (False, Row(a=Learned(1.0))),  # it is 1 only at initialization
    ],
)
def test_is_sum_requires_plain_stream(is_sum, row):
    assert row.is_sum is is_sum


@pytest.mark.parametrize(
    ("error", "sentence", "options"),
    [
        (TypeError, "norm_in is 1, expected True or False: whether the row has that norm.", {"norm_in": 1}),
        (TypeError, "norm_out is None, expected True or False: whether the row has that norm.", {"norm_out": None}),
        (
            ValueError,
            "b is 0, expected another number: the sublayer would never write; for a start at zero use Learned(0.0).",
            {"b": 0},
        ),
        (
            ValueError,
            "c is 0, expected another number: the sublayer would read only zeros; for a start at zero use Learned(0.0).",
            {"c": -0.0},
        ),
        *[
            (
                ValueError,
                f"{name} is {value!r}, expected a finite number, or Learned(...) for a factor that trains.",
                {name: value},
            )
            for name in "abc"
            for value in (NAN, INF, -INF, "2", None, True, 1j, 10**400)
        ],
    ],
)
def test_wrong_row_raises(error, sentence, options):
    with pytest.raises(error) as refusal:
        Row(**options)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("error", "sentence", "options"),
    [
        (ValueError, "init is nan, expected a finite number.", {"init": NAN}),
        (ValueError, "init is True, expected a finite number.", {"init": True}),
        (TypeError, "per_feature is 8, expected True or False.", {"init": 1.0, "per_feature": 8}),
        (TypeError, "shared is 'layer', expected True or False.", {"init": 1.0, "shared": "layer"}),
    ],
)
def test_wrong_learned_raises(error, sentence, options):
    with pytest.raises(error) as refusal:
        Learned(**options)
    assert str(refusal.value) == sentence


# Wiring


def test_wiring_is_frozen_comparable_and_hashable():
    mine = Wiring("mine", fading, options={}, symbols={"b": ("β", "1/l")})
    with pytest.raises(FrozenInstanceError):
        mine.name = "yours"
    assert mine == Wiring("mine", fading, symbols=(("b", ("β", "1/l")),))
    assert len({mine, Wiring("mine", fading, symbols={"b": ("β", "1/l")}), Wiring("mine", fading)}) == 2


def fading_from(at, k):
    return Row(b=1 / max(1, at.number - k))


@pytest.mark.parametrize(
    ("error", "sentence", "options"),
    [
        (TypeError, "name is '', expected a text: what the wiring is called.", {"name": ""}),
        (TypeError, "name is 3, expected a text: what the wiring is called.", {"name": 3}),
        (
            TypeError,
            "rule is 'pre_ln', expected a Row or a Stage, or a function that returns that of a Place.",
            {"rule": "pre_ln"},
        ),
        (
            TypeError,
            "final_norm is 1, expected True or False, or a function of the number of layers.",
            {"final_norm": 1},
        ),
        (TypeError, "embedding_norm is 'layer', expected True or False.", {"embedding_norm": "layer"}),
        (
            TypeError,
            "init is 'gpt2', expected a function of a role and a Place, as in addnorm.wirings.init.",
            {"init": "gpt2"},
        ),
        (
            ValueError,
            "a key of symbols is 'd', expected 'a', 'b' or 'c', or an entry of a stage, such as 'inject_0'.",
            {"symbols": {"d": ("δ", "")}},
        ),
    ],
)
def test_wrong_wiring_raises(error, sentence, options):
    with pytest.raises(error) as refusal:
        Wiring(**{"name": "mine", "rule": Row(), **options})
    assert str(refusal.value) == sentence


def test_rule_that_returns_no_row_raises():
    with pytest.raises(TypeError) as refusal:
        Wiring("mine", lambda at: {"b": 1.0}).row(0, 1, num_layers=2)
    place = "Place(layer=0, sublayer=1, num_layers=2, sublayers_per_layer=2)"
    assert str(refusal.value) == f"the rule of wiring 'mine' gave {{'b': 1.0}} for {place}, expected a Row or a Stage."


@pytest.mark.parametrize(("layer", "sublayer"), [(4, 0), (-1, 0), (0, 2), (0, -1)])
def test_place_outside_the_stack_raises(layer, sublayer):
    with pytest.raises(
        ValueError, match=f"^layer {layer} of 4, sublayer {sublayer} of 2: expected each below its number"
    ):
        wirings.pre_ln().row(layer, sublayer, num_layers=4)


@pytest.mark.parametrize("num_layers", [0, -1, 1.5, "12", True])
def test_equation_of_zero_layers_raises(num_layers):
    with pytest.raises(ValueError, match=f"^num_layers is {num_layers!r}, expected a whole number from 1.$"):
        wirings.pre_ln().equation(num_layers)


# Text


@pytest.mark.parametrize(
    "written",
    [
        "pre_ln()", "pre_ln(init=gpt2)", "deepnorm()", "deepnorm(kind='encoder', other_layers=6)", "mix_ln(k=3)",
        "layer_scale(gamma=0.1)", "residual_multiplier(multiplier=0.22)", "parallel(norms=2)", "admin(profiled=False)",
        "no_residual(norm=False)",
    ],
)  # fmt: skip
def test_repr_is_the_constructors_call(written):
    wiring = eval(written, {**vars(wirings), "gpt2": gpt2})
    assert repr(wiring) == written


def test_repr_evaluates_for_every_wiring():
    for wiring in wirings.list_all():
        assert eval(repr(wiring), dict(vars(wirings))) == wiring


def test_repr_of_custom_wiring_has_its_fields():
    assert repr(Wiring("mine", Row(b=2.0), final_norm=True)) == "Wiring(name='mine', rule=Row(b=2.0), final_norm=True)"
    assert repr(Wiring("mine", fading, init=gpt2)) == "Wiring(name='mine', rule=fading, init=gpt2)"


def test_repr_of_same_name_is_not_the_constructors():
    assert repr(Wiring("pre_ln", Row(b=2.0))) == "Wiring(name='pre_ln', rule=Row(b=2.0))"
    other_options = Wiring("mix_ln", fading_from, options={"k": "x"})
    assert repr(other_options) == "Wiring(name='mix_ln', rule=fading_from, options=(('k', 'x'),))"
