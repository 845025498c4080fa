"""Tests of the parameters of requests: accepted values, defaults, errors."""

import math
import re

import pytest

from addnorm.explorer.params import Choice, Flag, Number, read_params

FIELDS = {
    "sublayers": Number(24, 2, 96, step=2),
    "gain": Number(1.0, 0.1, 3.0),
    "seed": Number(0, 0, 2**31 - 1, step=1),
    "placement": Choice("post", ("post", "pre")),
    "residual": Flag(True),
}


def test_numbers_get_their_type():
    result = read_params(FIELDS, {"sublayers": 48.0, "gain": 3, "seed": -0.0})
    assert [(value, type(value)) for value in list(result.values())[:3]] == [(48, int), (3.0, float), (0, int)]


WHOLE = "expected a whole number from 2 to 96 in steps of 2."


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        *(("sublayers", value, f"sublayers is {value!r}, {WHOLE}") for value in (3, 98, 24.5, True, "24", math.nan)),
        ("sublayers", 10**400, f"sublayers is 1{39 * '0'}..., {WHOLE}"),
        ("gain", -math.inf, "gain is -inf, expected a number from 0.1 to 3."),
        ("seed", 2**31, "seed is 2147483648, expected a whole number from 0 to 2147483647."),
        ("placement", ["post"], "placement is ['post'], expected one of post, pre."),
        ("residual", 1, "residual is 1, expected true or false."),
        ("", 6, "the request has '', which is unknown, expected sublayers, gain, seed, placement, residual."),
    ],
)
def test_wrong_params_are_rejected(name, value, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        read_params(FIELDS, {name: value})
