"""Cases of a benchmark as data, the rows of the results, and the targets of their numbers.

A row is a dict with a case's values and the numbers of one variant. A target is a statistic of the measured cases, and the bound
that it must meet.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

Row = dict[str, Any]
Rows = Mapping[str, Row]  # the rows of a case, by variant
Results = dict[str, list[Row]]  # rows by part of the document
Document = dict[str, Any]
Progress = Callable[[str], object]
Call = Callable[..., Any]  # a function that is timed
Makers = Mapping[str, Callable[[], Call]]  # functions that make the variants of a case
Selection = Mapping[str, Sequence[Any]]
Number = Callable[[Rows], float | None]
Condition = Callable[["Case"], bool]
Measured = Sequence[tuple["Case", Rows]]
COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "<": operator.lt, "==": operator.eq,
}  # fmt: skip


class Case(SimpleNamespace):
    """Case of a benchmark: named values, such as the norm and the shape. Each result row of the case has these values first.

    Example:
        >>> from addnorm.bench.case import Case
        >>> case = Case(norm="rms", rows=128)
        >>> case.rows, case.but(rows=1).row(variant="eager"), str(case)
        (128, {'norm': 'rms', 'rows': 1, 'variant': 'eager'}, 'norm rms, rows 128')
    """

    def __init__(self, **values: Any) -> None:
        # JSON stores tuples as lists. Converted back, a case that was read equals the one that was written.
        super().__init__(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    def __hash__(self) -> int:  # type: ignore[override]  # a case is never changed
        return hash(frozenset(vars(self).items()))

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items())

    def but(self, **values: Any) -> Case:
        """Return a copy of the case with `values` changed or added."""
        return Case(**{**vars(self), **values})

    def row(self, **values: Any) -> Row:
        """Return a result row of this case: the case's values, then `values`."""
        return {**vars(self), **values}

    @classmethod
    def of(cls, row: Row, fields: Iterable[str]) -> Case:
        """Return the case that a result row belongs to, by its values of `fields`."""
        return cls(**{name: row[name] for name in fields})


def grid(**values: Any) -> list[Case]:
    """Return a case for every combination of the values. The first name changes last. The values of `a__b` are pairs (a, b).

    Example:
        >>> from addnorm.bench.case import grid
        >>> [(case.rows, case.d, case.job) for case in grid(rows__d=((1, 64), (8, 256)), job=("y", "training"), norm="rms")]
        [(1, 64, 'y'), (1, 64, 'training'), (8, 256, 'y'), (8, 256, 'training')]
    """
    names = [name for joined in values for name in joined.split("__")]
    axes = [[each if "__" in joined else (each,) for each in _choices(some)] for joined, some in values.items()]
    lines = (itertools.chain(*line) for line in itertools.product(*axes))
    return [Case(**dict(zip(names, line, strict=True))) for line in lines]


def has(**values: Any) -> Condition:
    """Return a predicate that is true for cases with these values. A list of values stands for any of them."""
    return lambda case: all(getattr(case, name, None) in _choices(some) for name, some in values.items())


def _choices(some: Any) -> Any:
    """Return a list, tuple, range or dict as it is, and any other value in a list."""
    return some if isinstance(some, list | tuple | range | dict) else [some]


def select(cases: Iterable[Case], selected: Selection) -> list[Case]:
    """Return the cases whose value is one of `selected[field]` for every field in `selected`.

    Raises:
        ValueError: there is no such case.
    """
    chosen = [*filter(has(**selected), cases)]
    if not chosen:
        words = ", ".join(f"{name} {'/'.join(map(str, some))}" for name, some in selected.items())
        raise ValueError(f"no case of the plan has {words}")
    return chosen


def by_case(rows: Iterable[Row], fields: Sequence[str]) -> Measured:
    """Return each case of the result rows, with its rows by variant."""
    results: dict[Case, dict[str, Row]] = {}
    for row in rows:
        results.setdefault(Case.of(row, fields), {})[row.get("variant", "")] = row
    return [*results.items()]


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
    where: Condition = lambda case: True
    by: tuple[str, ...] = ()
    labels: Mapping[str, Any] = {}
    why: str = ""

    def met(self, value: float | None) -> bool | None:
        """Return whether a number meets the target, or None without a number or without a bound."""
        return None if value is None or self.bound is None else COMPARE[self.compare](value, self.bound)

    def row(self, value: float | None, **more: Any) -> Row:
        """Return a summary row: the number beside its target.

        Example:
            >>> from addnorm.bench.case import Target
            >>> Target("lowest", ">=", 0.95).row(0.9, cells=3)
            {'name': 'lowest', 'cells': 3, 'value': 0.9, 'compare': '>=', 'target': 0.95, 'met': False}
        """
        return {
            "name": self.name, **self.labels, **more, "value": value, "compare": self.compare, "target": self.bound,
            "met": self.met(value), **({"why": self.why} if self.why and self.bound is not None else {}),
        }  # fmt: skip

    def rows(self, cases: Measured, title: Callable[[Case], str]) -> Iterator[Row]:
        """Yield the summary rows of this target. A target without a bound has no row if no case counts."""
        for group in dict.fromkeys(Case.of(vars(case), self.by) for case, _ in cases) or [Case()]:
            numbers = {
                case: number for case, rows in cases
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
