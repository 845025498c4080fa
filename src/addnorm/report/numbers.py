"""Numbers as a reader wants them: four significant digits, the same decimals down a column where that loses none.

What is no number is a word. The text of a number can be read back by `float` but for those words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["column", "number", "percent"]

DIGITS = 4
SMALL, LARGE = 1e-3, 1e6  # beyond these a power of ten is written


def number(value: float | None, digits: int = DIGITS) -> str:
    """One number: 0.1235, 1.235e-5, NaN, infinity; empty for None.

    Example:
        >>> from addnorm.report.numbers import number
        >>> [number(value) for value in (0.123456, 1.23456e-5, 12, float("-inf"), None)]
        ['0.1235', '1.235e-5', '12', '-infinity', '']
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"
    if isinstance(value, int):
        return str(value)
    if value == 0:
        return "0"
    if SMALL <= abs(value) < LARGE:
        return f"{value:.{_decimals(value, digits)}f}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def column(values: Sequence[float | None], digits: int = DIGITS) -> list[str]:
    """Numbers that stand below one another: with one number of decimals, if that leaves each two digits at least."""
    sizes = [abs(v) for v in values if v is not None and not isinstance(v, int) and math.isfinite(v) and v]
    if not sizes or not (min(sizes) >= SMALL and max(sizes) < LARGE):
        return [number(value, digits) for value in values]
    decimals = _decimals(max(sizes), digits)
    if min(sizes) < 10.0 ** (1 - decimals):
        return [number(value, digits) for value in values]
    return [
        f"{value:.{decimals}f}" if isinstance(value, float) and math.isfinite(value) else number(value, digits)
        for value in values
    ]


def _decimals(value: float, digits: int) -> int:
    """Behind the point, for so many digits of the number as it is rounded: 0.99999 has one digit before it."""
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return max(digits - 1 - exponent, 0)


def percent(share: float) -> str:
    """A share in percent, with three digits."""
    return f"{number(100 * share, 3)} %"
