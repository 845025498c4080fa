"""Factors, places of sublayers, and the text of numbers and calls."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from addnorm._util.arguments import check_bool, check_float
from addnorm._util.numbers import format_number

FACTORS = ("a", "b", "c")  # of a `Row`
FINE = 8  # significant digits of a factor near 1


@dataclass(frozen=True, repr=False)
class Learned:
    """A factor that is trained, with its initial value.

    Args:
        init: the initial value.
        per_feature: whether each of the `d_model` features has its own factor, shape `(d_model,)`, instead of a scalar.
        shared: whether all sublayers of a layer share one factor (as in ReZero).
        name: in a `Stage`, the name of the parameter; entries with the same name are one parameter.

    Example:
        >>> str(addnorm.Row(norm_in=True, b=addnorm.Learned(1e-4, per_feature=True)))
        "x' = x + b ⊙ f(N(x)),   b starts at 1e-4"
    """

    init: float
    per_feature: bool = False
    shared: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "init", check_float("init", self.init))
        for name in ("per_feature", "shared"):
            check_bool(name, getattr(self, name))
        if not (self.name == "" or (isinstance(self.name, str) and self.name.isidentifier())):
            raise ValueError(f"name is {self.name!r}, expected a Python identifier: the parameter's name.")

    def __repr__(self) -> str:
        return format_call("Learned", changed_fields(self))


Factor = float | Learned


class Place(NamedTuple):
    """A sublayer's position in a stack, counted from 0.

    Example:
        >>> place = addnorm.nn.Place(layer=1, sublayer=0, num_layers=6, sublayers_per_layer=2)
        >>> place.position, place.number
        (2, 2)
    """

    layer: int
    sublayer: int  # in its layer
    num_layers: int
    sublayers_per_layer: int

    @property
    def number(self) -> int:
        """The layer's number counted from 1, as in the papers' formulas."""
        return self.layer + 1

    @property
    def num_sublayers(self) -> int:
        """The number of sublayers in a stack of whole layers."""
        return self.num_layers * self.sublayers_per_layer

    @property
    def position(self) -> int:
        """The sublayer's position among all sublayers of the stack, counted from 0."""
        return self.layer * self.sublayers_per_layer + self.sublayer


def format_factor(value: float) -> str:
    """Return a number with at most four significant digits, with more if it would be rounded to 1.

    Example:
        >>> from addnorm.wirings.factors import format_factor
        >>> format_factor(200**0.25), format_factor(1e-5), format_factor(2.0), format_factor(1.0001)
        ('3.761', '1e-5', '2', '1.0001')
    """
    text = format_number(float(value), trim=True)
    return format_number(float(value), FINE, trim=True) if text in ("1", "-1") else text


def format_interval(values: Iterable[float]) -> str:
    """Return numbers as text: one if equal, "first ... last" if these are the extremes, else "least to most"."""
    values = [*values]
    ends, limits = (values[0], values[-1]), (min(values), max(values))
    if limits[0] == limits[1]:
        return format_factor(values[0])
    separator, pair = (" ... ", ends) if tuple(sorted(ends)) == limits else (" to ", limits)
    return separator.join(map(format_factor, pair))


def changed_fields(instance: Any) -> list[tuple[str, Any]]:
    """Return the arguments of a dataclass that differ from their defaults."""
    values = [(field, getattr(instance, field.name)) for field in fields(instance) if field.init]
    return [(field.name, value) for field, value in values if value != field.default]


def format_call(name: str, arguments: Iterable[tuple[str, Any]]) -> str:
    """Return the source text of a call with keyword arguments."""
    texts = (f"{key}={value.__name__ if inspect.isfunction(value) else repr(value)}" for key, value in arguments)
    return f"{name}({', '.join(texts)})"
