"""Numbers as text: significant digits, columns with equal decimals, percentages, durations, sizes, counts; lists of words.

`float` reads the text of a number back. Powers of ten are short: 1.2e-5, not 1.2e-05.
"""

import math
from collections.abc import Sequence

DIGITS = 4
SMALL, LARGE = 1e-3, 1e6  # smaller and larger numbers are written with a power of ten


def format_number(
    value: float | None, digits: int = DIGITS, *, trim: bool = False, grouped: bool = False, width: int | None = None
) -> str:
    """Return a float as text with `digits` significant digits, an int with all its digits, and None as empty text.

    Args:
        value: the number.
        digits: significant digits of a float.
        trim: remove trailing zeros behind the decimal point.
        grouped: separate thousands with commas, and write no power of ten for large numbers.
        width: maximum number of characters, if one digit fits. Longer texts get fewer digits.

    Example:
        >>> from addnorm._util.numbers import format_number
        >>> [format_number(value) for value in (0.123456, 0.5, 1.23456e-5, 12, float("-inf"), None)]
        ['0.1235', '0.5000', '1.235e-5', '12', '-inf', '']
        >>> format_number(0.5, trim=True), format_number(12345678.9, grouped=True), format_number(-1.23456e-15, width=8)
        ('0.5', '12,345,679', '-1.2e-15')
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return f"{float(value)}"
    if isinstance(value, int):
        return f"{value:,}" if grouped else f"{value}"
    text = _digits(value, digits, trim, grouped)
    while width is not None and len(text) > width and digits > 1:
        digits -= 1
        text = _digits(value, digits, trim, grouped)
    return text


def format_column(values: Sequence[float | None]) -> list[str]:
    """Return the numbers of a column, with equal decimals if each number keeps at least two significant digits.

    Example:
        >>> from addnorm._util.numbers import format_column
        >>> format_column([1.0, 0.25, None, float("nan"), 3]), format_column([1.0, 0.0, None])
        (['1.000', '0.250', '', 'nan', '3'], ['1.000', '0.000', ''])
        >>> format_column([1.0, 0.0025]), format_column([100.0, 0.001])  # with equal decimals 0.001 would show one digit
        (['1.000', '0.002500'], ['100.0', '0.001000'])
        >>> format_column([1e-9, 1.0]), format_column([float("inf")]), format_column([])
        (['1.000e-9', '1.000'], ['inf'], [])
    """
    sizes = [abs(v) for v in values if v is not None and not isinstance(v, int) and math.isfinite(v) and v]
    if sizes and min(sizes) >= SMALL and max(sizes) < LARGE:
        decimals = _decimals(max(sizes), DIGITS)
        if min(sizes) >= 10.0 ** (1 - decimals):
            return [
                f"{value:.{decimals}f}" if isinstance(value, float) and math.isfinite(value) else format_number(value)
                for value in values
            ]
    return [*map(format_number, values)]


def format_percent(share: float | None, digits: int = 3, *, trim: bool = False) -> str:
    """Return a share of 1 in percent.

    Example:
        >>> from addnorm._util.numbers import format_percent
        >>> format_percent(0.2), format_percent(0.2, trim=True), format_percent(0.0049, 2), format_percent(0.00001)
        ('20.0%', '20%', '0.49%', '0.00100%')
        >>> format_percent(1), format_percent(float("nan")), format_percent(None)
        ('100%', 'nan%', '')
    """
    return "" if share is None else f"{format_number(100.0 * share, digits, trim=trim)}%"


def format_seconds(seconds: float) -> str:
    """Return a duration with three significant digits in s, ms or µs.

    Example:
        >>> from addnorm._util.numbers import format_seconds
        >>> format_seconds(0.25), format_seconds(1.5e-6), format_seconds(0.9999), format_seconds(123.4)
        ('250 ms', '1.50 µs', '1.00 s', '123 s')
        >>> format_seconds(0.000999), format_seconds(0.0009996), format_seconds(5e-8), format_seconds(0.0)
        ('999 µs', '1.00 ms', '0.0500 µs', '0 µs')
    """
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))


def format_bytes(count: float) -> str:
    """Return a size with three significant digits in B, kB, MB or GB (powers of 1000).

    Example:
        >>> from addnorm._util.numbers import format_bytes
        >>> format_bytes(5), format_bytes(1536), format_bytes(2_000_000), format_bytes(1_540_000_000)
        ('5 B', '1.54 kB', '2.00 MB', '1.54 GB')
        >>> format_bytes(999), format_bytes(1000), format_bytes(999_999)
        ('999 B', '1.00 kB', '1.00 MB')
    """
    if abs(count) < 999.5:
        return f"{count:.0f} B"
    return _scaled(count, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun in the right number.

    Example:
        >>> from addnorm._util.numbers import format_count
        >>> format_count(1, "site"), format_count(0, "site")
        ('1 site', '0 sites')
    """
    return f"{count} {noun if count == 1 else f'{noun}s'}"


def join_words(words: Sequence[str]) -> str:
    """Join words to a text: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _digits(value: float, digits: int, trim: bool, grouped: bool) -> str:
    """Return a finite float as text with `digits` significant digits."""
    if value == 0:
        return "0"
    if abs(value) >= SMALL and (grouped or abs(value) < LARGE):
        text, power = f"{value:{',' if grouped else ''}.{_decimals(value, digits)}f}", ""
    else:
        text, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        power = f"e{int(exponent)}"
    if trim and "." in text:
        text = text.rstrip("0").rstrip(".")
    return f"{text}{power}"


def _decimals(value: float, digits: int) -> int:
    """Return the number of decimals that gives `digits` significant digits after rounding: with 4 digits, 3 for 0.99999."""
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return max(digits - 1 - exponent, 0)


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Return a value in the largest unit in which it is at least 1 after rounding to three digits."""
    rounded = abs(float(f"{value:.2e}")) if math.isfinite(value) else math.inf
    scale, unit = next((pair for pair in units if rounded >= pair[0]), units[-1])
    return f"{format_number(value / scale, 3)} {unit}"
