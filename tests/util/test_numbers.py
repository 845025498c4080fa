"""Tests of number formats, beside the examples of their docstrings: digits, columns, percentages, seconds, bytes."""

import math

import pytest

from addnorm._util.numbers import (
    format_bytes,
    format_column,
    format_number,
    format_percent,
    format_seconds,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12.0, "12.00"), (0.0, "0"), (-0.0, "0"), (123456.7, "123457"), (1.5e6, "1.500e6"), (-1.5e12, "-1.500e12"), (math.nan, "nan"),
        (math.inf, "inf"), (99.9999, "100.0"), (0.99999, "1.000"), (1e-300, "1.000e-300"), (10**30, str(10**30)),
    ],
)  # fmt: skip
def test_format_number(value, text):
    assert format_number(value) == text
    assert format_number(value, grouped=True).replace(",", "") == text or abs(value) >= 1e6


@pytest.mark.parametrize(
    ("options", "value", "text"),
    [
        ({"trim": True}, 1e-5, "1e-5"), ({"trim": True}, 200**0.25, "3.761"), ({"trim": True}, 2.0, "2"), ({"trim": True}, 100.0, "100"),
        ({"trim": True, "digits": 2}, 2.04e-7, "2e-7"), ({"grouped": True, "digits": 3}, 1234.5, "1,234"), ({"grouped": True}, 1e7, "10,000,000"),
        ({"grouped": True, "trim": True}, 1000.0, "1,000"), ({"grouped": True}, 12345, "12,345"), ({"digits": 3, "width": 8}, -1.234e-15, "-1.2e-15"),
        ({"width": 3}, 123456.0, "123456"), ({"width": 5}, 1.23456, "1.235"), ({"digits": 1}, 0.96, "1"),
    ],
)  # fmt: skip
def test_format_number_options(options, value, text):
    assert format_number(value, **options) == text


def test_format_column():
    assert format_column([1.0, 0.25, None, math.nan, 3]) == ["1.000", "0.250", "", "nan", "3"]
    assert format_column([1.0, 0.0, None]) == ["1.000", "0.000", ""]
    assert format_column([100.0, 0.001]) == ["100.0", "0.001000"]  # with equal decimals the second would show no digit
    assert format_column([1e-9, 1.0]) == ["1.000e-9", "1.000"]
    assert format_column([math.inf]) == ["inf"]
    assert format_column([]) == []


def test_format_percent():
    assert [format_percent(share) for share in (0.123456, 1, 0, 0.00001, math.nan, None)] == [
        "12.3%", "100%", "0%", "0.00100%", "nan%", "",
    ]  # fmt: skip
    assert format_percent(0.5, trim=True) == "50%"
    assert format_percent(0.25, 4) == "25.00%"


def test_format_seconds():
    texts = [format_seconds(s) for s in (4.0, 123.4, 0.002, 0.0009996, 0.000999, 5e-8, 0.0)]
    assert texts == ["4.00 s", "123 s", "2.00 ms", "1.00 ms", "999 µs", "0.0500 µs", "0 µs"]


def test_format_bytes():
    assert [format_bytes(n) for n in (0, 1, 999, 1000, 999_999, 2_000_000, 1_540_000_000)] == [
        "0 B", "1 B", "999 B", "1.00 kB", "1.00 MB", "2.00 MB", "1.54 GB",
    ]  # fmt: skip
