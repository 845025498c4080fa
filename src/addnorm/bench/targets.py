"""Targets: statistics of the measured cases, and whether they meet a bound."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from addnorm.bench.case import Case, Row, Rows, has

COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "<": operator.lt, "==": operator.eq,
}  # fmt: skip

Number = Callable[[Rows], float | None]
Where = Callable[[Case], bool]


class Target(NamedTuple):
    """Number of a benchmark, and the bound that it must meet.

    Attributes:
        name: name of the number.
        compare: ">=", "<=", "<" or "==".
        bound: the bound; None where the number is only reported.
        number: function of a case's result rows; it returns None if a row that it needs is missing.
        statistic: function of the numbers of all cases. None: each case has its own row, with its title in place of `{}` in the
            name.
        where: function that tells whether a case counts.
        by: fields of a case: each combination of their values has its own row.
        labels: further columns of the row.
        why: why the bound is this number: the bytes that must move, or what the peer does.
    """

    name: str
    compare: str = ">="
    bound: float | None = None
    number: Number = lambda rows: None
    statistic: Callable[[list[float]], float] | None = min
    where: Where = lambda case: True
    by: tuple[str, ...] = ()
    labels: Mapping[str, Any] = {}
    why: str = ""

    def met(self, value: float | None) -> bool | None:
        """Return whether a number meets the target, or None without a number or without a bound."""
        return None if value is None or self.bound is None else COMPARE[self.compare](value, self.bound)

    def row(self, value: float | None, **more: Any) -> Row:
        """Return a summary row: the number beside its target.

        Example:
            >>> from addnorm.bench.targets import Target
            >>> Target("lowest", ">=", 0.95).row(0.9, cells=3)
            {'name': 'lowest', 'cells': 3, 'value': 0.9, 'compare': '>=', 'target': 0.95, 'met': False}
        """
        return {
            "name": self.name, **self.labels, **more, "value": value, "compare": self.compare, "target": self.bound,
            "met": self.met(value), **({"why": self.why} if self.why and self.bound is not None else {}),
        }  # fmt: skip

    def rows(self, cases: Mapping[Case, Rows], title: Callable[[Case], str]) -> Iterator[Row]:
        """Yield the summary rows of this target. A target without a bound has no row if no case counts."""
        for group in dict.fromkeys(Case.of(vars(case), self.by) for case in cases) if self.by else [Case()]:
            numbers = {
                case: number for case, rows in cases.items()
                if has(**vars(group))(case) and self.where(case) and (number := self.number(rows)) is not None
            }  # fmt: skip
            if self.statistic is None:
                for case, number in numbers.items():
                    yield self._replace(name=self.name.replace("{}", title(case))).row(number, cells=1)
            elif numbers or self.bound is not None:
                more: Row = {**vars(group), "cells": len(numbers)}
                if self.bound is not None:
                    worst = min if self.compare == ">=" else max
                    more["cells_met"] = sum(map(bool, map(self.met, numbers.values())))
                    more["worst"] = title(worst(numbers, key=numbers.__getitem__)) if numbers else None
                yield self.row(self.statistic([*numbers.values()]) if numbers else None, **more)


def ratio(ours: str, theirs: str, key: str = "median_us") -> Number:
    """Return a function of a case's result rows: the time of `theirs` divided by that of `ours`. Above 1 `ours` is faster."""
    return lambda rows: rows[theirs][key] / rows[ours][key] if {ours, theirs} <= rows.keys() else None


def value(variant: str, key: str) -> Number:
    """Return a function of a case's result rows: the value of `variant` in column `key`."""
    return lambda rows: rows[variant].get(key) if variant in rows else None
