"""Checks of arguments. An error is one sentence: the argument, its value, the expected value."""

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOAT_WORDS = " or".join(", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES).rsplit(",", 1))


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Check that a value is one of the choices.

    Example:
        >>> from addnorm._util.arguments import check_choice
        >>> check_choice("norm", "batch", ("layer", "rms"))
        Traceback (most recent call last):
        ValueError: norm is 'batch', expected one of 'layer', 'rms'.
    """
    choices = [*choices]
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}.")


def check_int(name: str, value: Any, minimum: int) -> None:
    """Check that a value is an int (not a bool) of at least the minimum.

    Example:
        >>> from addnorm._util.arguments import check_int
        >>> check_int("d_model", 0, 1)
        Traceback (most recent call last):
        ValueError: d_model is 0, expected a whole number from 1.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} is {value!r}, expected a whole number from {minimum}.")


def check_float(name: str, value: Any, alternative: str = "") -> float:
    """Check that a value is a finite number and return it as a float.

    Args:
        name: the argument.
        value: its value.
        alternative: end of the error message, which names further accepted values: ", or None".

    Example:
        >>> from addnorm._util.arguments import check_float
        >>> check_float("a", 2)
        2.0
        >>> check_float("a", "2", ", or Learned")
        Traceback (most recent call last):
        ValueError: a is '2', expected a finite number, or Learned.
    """
    if not (is_number(value) and math.isfinite(value)):
        raise ValueError(f"{name} is {value!r}, expected a finite number{alternative}.")
    return float(value)


def check_not_negative(name: str, value: Any) -> float:
    """Check that a value is a finite number from 0 and return it as a float.

    Example:
        >>> from addnorm._util.arguments import check_not_negative
        >>> check_not_negative("eps", -1)
        Traceback (most recent call last):
        ValueError: eps is -1, expected a number that is not negative.
    """
    if not is_number(value) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r}, expected a number that is not negative.")
    return float(value)


def check_positive(name: str, value: Any) -> float:
    """Check that a value is a finite number above 0 and return it as a float.

    Example:
        >>> from addnorm._util.arguments import check_positive
        >>> check_positive("temperature", 0)
        Traceback (most recent call last):
        ValueError: temperature is 0, expected a positive number.
    """
    if not is_number(value) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}, expected a positive number.")
    return float(value)


def check_probability(name: str, value: Any) -> float:
    """Check that a value is a number from 0 to 1 and return it as a float.

    Example:
        >>> from addnorm._util.arguments import check_probability
        >>> check_probability("dropout", 1.5)
        Traceback (most recent call last):
        ValueError: dropout is 1.5, expected a probability: a number from 0 to 1.
    """
    if not (is_number(value) and 0.0 <= value <= 1.0):
        raise ValueError(f"{name} is {value!r}, expected a probability: a number from 0 to 1.")
    return float(value)


def check_dtype(name: str, value: Any) -> torch.dtype | None:
    """Check that a value is None or a floating-point dtype that the operation supports, and return it.

    Example:
        >>> from addnorm._util.arguments import check_dtype
        >>> check_dtype("residual_dtype", torch.float32)
        torch.float32
    """
    if value is not None and value not in FLOAT_DTYPES:
        raise TypeError(f"{name} is {value!r}, expected {FLOAT_WORDS} (or None).")
    return value  # type: ignore[no-any-return]  # one of FLOAT_DTYPES


def check_bool(name: str, value: Any, alternative: str = "") -> None:
    """Check that a value is True or False.

    Args:
        name: the argument.
        value: its value.
        alternative: end of the error message, as in `check_float`.

    Example:
        >>> from addnorm._util.arguments import check_bool
        >>> check_bool("checkpoint", 1)
        Traceback (most recent call last):
        TypeError: checkpoint is 1, expected True or False.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected True or False{alternative}.")


def is_number(value: Any) -> bool:
    """Return whether a value is a real number, known or symbolic, but no bool and no int beyond a float's range."""
    if value.__class__ is float:  # the usual case; the checks below take half a microsecond
        return True
    if isinstance(value, int) and not -(2**1023) < value < 2**1023:
        return False
    return isinstance(value, Real | torch.SymFloat | torch.SymInt) and not isinstance(value, bool)
