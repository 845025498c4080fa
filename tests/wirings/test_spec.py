"""Tests of Row, Stage, Learned, Place and Wiring: comparison, hashing, what they derive, text."""

import copy
import pickle

import pytest

from addnorm import Learned, Row, Wiring, wirings
from addnorm.nn import Place
from addnorm.wirings import Computed, Stage, coefficients
from addnorm.wirings.init import gpt2

NAMES = {**vars(wirings), "gpt2": gpt2}


def fading(at):
    return Row(norm_in=True, b=1 / at.number)


# Row and Learned


def test_rows_and_wirings_survive_pickle_copy_and_repr():
    for item in (Row(b=Learned(0.5)), Place(0, 1, 2, 2), *wirings.list_all()):
        assert pickle.loads(pickle.dumps(item)) == copy.deepcopy(item) == eval(repr(item), NAMES) == item


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


def test_options_of_a_module_say_what_it_computes():
    read = Computed(coefficients.GatedRead, {"injects": False, "rank": 2})
    assert read.computes == ("collapse",)
    assert Stage(2, inject=(1, 2), coefficients=read).n_out == 2
    assert Computed(coefficients.DynamicSources).appends
    assert not Computed(coefficients.DynamicSources, {"residual": False}).appends


# Wiring


def test_wiring_is_comparable_and_hashable():
    mine = Wiring("mine", fading, options={}, symbols={"b": ("β", "1/l")})
    assert mine == Wiring("mine", fading, symbols=(("b", ("β", "1/l")),))
    assert len({mine, Wiring("mine", fading, symbols={"b": ("β", "1/l")}), Wiring("mine", fading)}) == 2


def fading_from(at, k):
    return Row(b=1 / max(1, at.number - k))


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
    assert repr(eval(written, NAMES)) == written


def test_repr_of_custom_wiring_has_its_fields():
    assert repr(Wiring("mine", Row(b=2.0), final_norm=True)) == "Wiring(name='mine', rule=Row(b=2.0), final_norm=True)"
    assert repr(Wiring("mine", fading, init=gpt2)) == "Wiring(name='mine', rule=fading, init=gpt2)"


def test_repr_of_same_name_is_not_the_constructors():
    assert repr(Wiring("pre_ln", Row(b=2.0))) == "Wiring(name='pre_ln', rule=Row(b=2.0))"
    other_options = Wiring("mix_ln", fading_from, options={"k": "x"})
    assert repr(other_options) == "Wiring(name='mix_ln', rule=fading_from, options=(('k', 'x'),))"
