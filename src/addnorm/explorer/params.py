"""What a request may hold, as data: the server checks it with this table, and the page is sent it for its controls.

FIELDS = {"sublayers": Number(24, 2, 96, step=2), "placement": Choice("post", ("post", "pre"))}
read(FIELDS, {"sublayers": 48})  ->  {"sublayers": 48, "placement": "post"}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Choice", "Field", "Flag", "Number", "described", "read"]


@dataclass(frozen=True)
class Number:
    """A number within bounds; a whole one, perhaps in steps."""

    initial: float
    least: float
    most: float
    step: int | None = None  # of a whole number; 0: any number between

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return self.step is not None

    def take(self, name: str, value: Any) -> float:
        """The value, if it is one of these."""
        number = value if type(value) in (int, float) else math.nan
        fits = self.least <= number <= self.most
        if self.step is not None and fits:
            fits = number == int(number) and (int(number) - int(self.least)) % self.step == 0
        if not fits:
            steps = f" in steps of {self.step}" if self.step is not None and self.step > 1 else ""
            kind = "a whole number" if self.whole else "a number"
            raise ValueError(
                f"{name} is {shown(value)}, expected {kind} from {self.least:.15g} to {self.most:.15g}{steps}."
            )
        return int(number) if self.whole else float(number)


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    initial: str
    among: tuple[str, ...]

    def take(self, name: str, value: Any) -> str:
        """The value, if it is one of these."""
        if not isinstance(value, str) or value not in self.among:
            raise ValueError(f"{name} is {shown(value)}, expected one of {', '.join(self.among)}.")
        return value


@dataclass(frozen=True)
class Flag:
    """Yes or no."""

    initial: bool

    def take(self, name: str, value: Any) -> bool:
        """The value, if it is one of these."""
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {shown(value)}, expected true or false.")
        return value


Field = Number | Choice | Flag


def read(fields: Mapping[str, Field], given: Any) -> dict[str, Any]:
    """What a request says, each thing checked, and what it leaves out as it is at first.

    Raises:
        ValueError: it is no object, it has what no field is for, or a value does not fit its field.

    Example:
        >>> from addnorm.explorer.params import Number, read
        >>> read({"d": Number(64, 8, 256, step=8)}, {"d": 100})
        Traceback (most recent call last):
        ...
        ValueError: d is 100, expected a whole number from 8 to 256 in steps of 8.
    """
    if not isinstance(given, dict):
        raise ValueError(f"the request is {shown(given)}, expected an object with {', '.join(fields)}.")
    for name in given:
        if name not in fields:
            raise ValueError(f"the request has {shown(name)}, which is unknown, expected {', '.join(fields)}.")
    return {name: field.take(name, given[name]) if name in given else field.initial for name, field in fields.items()}


def described(fields: Mapping[str, Field]) -> dict[str, Any]:
    """The table as JSON types, for the page."""
    return {name: {"kind": type(field).__name__.lower(), **asdict(field)} for name, field in fields.items()}


def shown(value: Any) -> str:
    """What came, in a few characters."""
    try:
        text = repr(value)
    except RecursionError:  # it could just be read
        return "deeply nested"
    return text if len(text) <= 40 else f"{text[:40]}..."
