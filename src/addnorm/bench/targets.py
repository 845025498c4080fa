"""Targets, goals over many cases, and whether a measured number meets them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from addnorm.bench.harness import Case, Row

__all__ = ["Goal", "Target"]

COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "<": operator.lt, "==": operator.eq,
}  # fmt: skip


class Target(NamedTuple):
    """Name of a number, and the bound that it must meet.

    Attributes:
        name: name of the number.
        compare: ">=", "<=", "<" or "==".
        bound: the bound; None where the number is only reported.
    """

    name: str
    compare: str
    bound: float | None

    def met(self, value: float | None) -> bool | None:
        """Return whether a number meets the target; None without a number or without a bound."""
        return None if value is None or self.bound is None else COMPARE[self.compare](value, self.bound)

    def row(self, value: float | None, norm: str | None = None, **more: Any) -> Row:
        """Return the row of a summary: the number beside its target.

        Example:
            >>> from addnorm.bench.targets import Target
            >>> Target("lowest", ">=", 0.95).row(0.9, cells=3)
            {'name': 'lowest', 'norm': None, 'cells': 3, 'value': 0.9, 'compare': '>=', 'target': 0.95, 'met': False}
        """
        return {
            "name": self.name, "norm": norm, **more, "value": value, "compare": self.compare, "target": self.bound,
            "met": self.met(value),
        }  # fmt: skip


class Goal(NamedTuple):
    """Target of a statistic over cases.

    Attributes:
        target: the target.
        number: function of a case's rows by variant; None where they lack what it needs.
        statistic: of the numbers of all cases.
        where: which cases count.
    """

    target: Target
    number: Callable[[Mapping[str, Row]], float | None]
    statistic: Callable[[list[float]], float]
    where: Callable[[Case], bool] = lambda case: True

    def numbers(self, cases: Mapping[Case, Mapping[str, Row]]) -> dict[Case, float]:
        """Return the number of each case that counts."""
        numbers = {case: self.number(rows) for case, rows in cases.items() if self.where(case)}
        return {case: number for case, number in numbers.items() if number is not None}


def ratio(ours: str, theirs: str, key: str = "median_us") -> Callable[[Mapping[str, Row]], float | None]:
    """Return the function of a case's rows that divides the time of `theirs` by that of `ours`: above 1, `ours` is faster."""

    def number(rows: Mapping[str, Row]) -> float | None:
        return float(rows[theirs][key] / rows[ours][key]) if ours in rows and theirs in rows else None

    return number
