"""What options must be: each function is silent, or names the option, what came and what was expected."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from addnorm.ops.validation import FLOATS, is_number

__all__ = ["flag", "number", "one_of", "residual_dtype", "whole"]


def one_of(name: str, value: Any, known: Iterable[Any]) -> None:
    """One of those that are known."""
    known = [*known]
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, known))}.")


def whole(name: str, value: Any, least: int) -> None:
    """A whole number, not below the least."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, expected a whole number from {least}.")


def number(name: str, value: Any, otherwise: str = "") -> float:
    """A finite number, as a float; or, says the sentence, what else may stand there."""
    if not (is_number(value) and math.isfinite(value)):
        raise ValueError(f"{name} is {value!r}, expected a finite number{otherwise}.")
    return float(value)


def residual_dtype(value: Any) -> torch.dtype | None:
    """None, or a dtype that a stream may have."""
    if value is not None and value not in FLOATS:
        words = ", ".join(map(str, FLOATS))
        raise TypeError(f"residual_dtype is {value!r}, expected None (that of x) or one of {words}.")
    return value  # type: ignore[no-any-return]  # judged above


def flag(name: str, value: Any, otherwise: str = "") -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected True or False{otherwise}.")
