"""Parameters of a request, declared as data: the server checks requests with a table, and the page builds its controls from it.

FIELDS = {"sublayers": Number(24, 2, 96, step=2), "placement": Choice("post", ("post", "pre"))}
read_params(FIELDS, {"sublayers": 48})  ->  {"sublayers": 48, "placement": "post"}
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Number:
    """Parameter whose value is a number within bounds.

    Attributes:
        default: value of a request that leaves the parameter out.
        minimum: smallest value.
        maximum: largest value.
        step: distance of two values; None for a parameter that is not a whole number.
    """

    default: float
    minimum: float
    maximum: float
    step: int | None = None

    def check(self, name: str, value: Any) -> float:
        """Return the value as an int or a float, or raise ValueError."""
        number = value if type(value) in (int, float) else math.nan
        valid = self.minimum <= number <= self.maximum
        if self.step is not None and valid:
            valid = number == int(number) and (int(number) - int(self.minimum)) % self.step == 0
        if not valid:
            steps = f" in steps of {self.step}" if self.step is not None and self.step > 1 else ""
            kind = "a number" if self.step is None else "a whole number"
            bounds = f"from {self.minimum:.15g} to {self.maximum:.15g}{steps}"
            raise ValueError(f"{name} is {shorten(value)}, expected {kind} {bounds}.")
        return float(number) if self.step is None else int(number)


@dataclass(frozen=True)
class Choice:
    """Parameter whose value is one of several strings."""

    default: str
    choices: tuple[str, ...]

    def check(self, name: str, value: Any) -> str:
        """Return the value if it is one of the choices; otherwise raise ValueError."""
        if not isinstance(value, str) or value not in self.choices:
            raise ValueError(f"{name} is {shorten(value)}, expected one of {', '.join(self.choices)}.")
        return value


@dataclass(frozen=True)
class Flag:
    """Parameter whose value is true or false."""

    default: bool

    def check(self, name: str, value: Any) -> bool:
        """Return the value if it is a bool; otherwise raise ValueError."""
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {shorten(value)}, expected true or false.")
        return value


Field = Number | Choice | Flag


def read_params(fields: Mapping[str, Field], params: Any) -> dict[str, Any]:
    """Return the checked parameters of a request, with defaults for those that it leaves out.

    Raises:
        ValueError: the request is not an object, has an unknown parameter, or a parameter has a wrong value.

    Example:
        >>> from addnorm.explorer.params import Number, read_params
        >>> read_params({"d_model": Number(64, 8, 256, step=8)}, {"d_model": 100})
        Traceback (most recent call last):
        ...
        ValueError: d_model is 100, expected a whole number from 8 to 256 in steps of 8.
    """
    if not isinstance(params, dict):
        raise ValueError(f"the request is {shorten(params)}, expected an object with {', '.join(fields)}.")
    for name in params:
        if name not in fields:
            raise ValueError(f"the request has {shorten(name)}, which is unknown, expected {', '.join(fields)}.")
    return {
        name: field.check(name, params[name]) if name in params else field.default for name, field in fields.items()
    }


def describe_fields(fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the parameters of a view, by name, as JSON types from which the page makes its controls."""
    return {name: {"kind": type(field).__name__.lower(), **asdict(field)} for name, field in fields.items()}


def shorten(value: Any) -> str:
    """Return a value as text of at most about 40 characters, for an error."""
    try:
        text = repr(value)
    except RecursionError:
        return "deeply nested"
    return text if len(text) <= 40 else f"{text[:40]}..."
