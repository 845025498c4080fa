"""Tests of JSON documents: special numbers, records a line, round trips."""

import json
import math
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from addnorm._util.jsonio import dumps, dumps_line, float_of, loads, to_jsonable


@dataclass(frozen=True)
class Site:
    id: str
    rms: float


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, "NaN"), (-math.inf, "-Infinity"), (True, True), (2**70, 2**70),
        ((1, [2.5]), [1, [2.5]]), ({1: {"a": math.nan}}, {"1": {"a": "NaN"}}),
        (Pair(1, math.inf), [1, "Infinity"]), (Site("a", math.nan), {"id": "a", "rms": "NaN"}), ([Site("a", 1.0)], [{"id": "a", "rms": 1.0}]),
        (np.float64(1.5), 1.5), (np.float64("inf"), "Infinity"), (Site, str(Site)), (torch.Size([2, 3]), [2, 3]), ({1}, "{1}"),
    ],
)  # fmt: skip
def test_to_jsonable(value, expected):
    result = to_jsonable(value)
    assert result == expected
    assert type(result) is type(expected)
    json.dumps(result, allow_nan=False)


def test_round_trip_restores_numbers():
    document = {"losses": [1.5, math.inf, -math.inf], "nested": [{"a": math.nan}], "text": "α"}
    for write in (dumps, dumps_line):
        result = loads(write(document))
        assert math.isnan(result["nested"][0].pop("a"))
        assert result == {"losses": [1.5, math.inf, -math.inf], "nested": [{}], "text": "α"}


@pytest.mark.parametrize("value", [{}, [], [1, 2], [{"a": 1}], "x", None, 1.5])
def test_dumps_accepts_any_value(value):
    assert loads(dumps(value)) == value


def test_dumps_writes_names_that_are_not_utf8():
    text = dumps({"path": "a\udcff", "letter": "α"})
    assert "α" in text
    assert loads(text.encode()) == {"path": "a\udcff", "letter": "α"}


@pytest.mark.parametrize("value", ["x", "nan", "1.5", None, True, [], {}, 10**400])
def test_float_of_refuses(value):
    with pytest.raises(
        ValueError, match=r"^value is '.*', expected a number, or one of 'NaN', 'Infinity', '-Infinity'\.$"
    ):
        float_of(value)
