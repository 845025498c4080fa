"""Tests of number formats, beside the examples of their docstrings: digits, trimmed, grouped, in a width."""

import pytest

from addnorm._util.numbers import format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12.0, "12.00"), (0.0, "0"), (-0.0, "0"), (123456.7, "123457"), (-1.5e6, "-1.500e6"), (0.99999, "1.000"),
        (1e-300, "1.000e-300"), (10**30, str(10**30)),
    ],
)  # fmt: skip
def test_format_number(value, text):
    assert format_number(value) == text
    assert format_number(value, grouped=True).replace(",", "") == text or abs(value) >= 1e6


@pytest.mark.parametrize(
    ("options", "value", "text"),
    [
        ({"trim": True}, 100.0, "100"), ({"trim": True, "digits": 2}, 2.04e-7, "2e-7"), ({"grouped": True, "digits": 3}, 1234.5, "1,234"),
        ({"grouped": True, "trim": True}, 1000.0, "1,000"), ({"width": 3}, 123456.0, "123456"), ({"width": 5}, 1.23456, "1.235"),
        ({"digits": 1}, 0.96, "1"),
    ],
)  # fmt: skip
def test_format_number_options(options, value, text):
    assert format_number(value, **options) == text
