"""Cases of a benchmark as data, and the rows of the results: dicts with a case's values and the numbers of one variant."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

Row = dict[str, Any]
Rows = Mapping[str, Row]  # of a case, by variant
Results = dict[str, list[Row]]  # rows by part of the document
Document = dict[str, Any]
Progress = Callable[[str], object]
Selection = Mapping[str, Sequence[Any]]


class Case(SimpleNamespace):
    """Case of a benchmark: named values, such as the norm and the shape. Each result row of the case has these values first.

    Example:
        >>> from addnorm.bench.case import Case
        >>> case = Case(norm="rms", rows=128)
        >>> case.rows, case.but(rows=1).row(variant="eager")
        (128, {'norm': 'rms', 'rows': 1, 'variant': 'eager'})
    """

    def __hash__(self) -> int:  # type: ignore[override]  # a case is never changed
        return hash(frozenset(vars(self).items()))

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


class Stop(RuntimeError):  # it ends a run, which need not be an error
    """Exception that ends a run before its last case, with the reason for the document."""


def grid(**values: Iterable[Any]) -> list[Case]:
    """Return a case for every combination of the values. The first name changes last. The values of `a__b` are pairs (a, b).

    Example:
        >>> from addnorm.bench.case import grid
        >>> [(case.rows, case.d, case.job) for case in grid(rows__d=((1, 64), (8, 256)), job=("forward", "backward"))]
        [(1, 64, 'forward'), (1, 64, 'backward'), (8, 256, 'forward'), (8, 256, 'backward')]
    """
    names = [name for joined in values for name in joined.split("__")]
    axes = [[each if "__" in joined else (each,) for each in some] for joined, some in values.items()]
    lines = (itertools.chain(*line) for line in itertools.product(*axes))
    return [Case(**dict(zip(names, line, strict=True))) for line in lines]


def has(**values: Any) -> Callable[[Case], bool]:
    """Return a predicate that is true for cases with these values; a list, tuple or range matches any of its members."""
    choices = {name: some if isinstance(some, list | tuple | range) else (some,) for name, some in values.items()}
    return lambda case: all(getattr(case, name, None) in some for name, some in choices.items())


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


def by_case(rows: Iterable[Row], fields: Iterable[str]) -> dict[Case, dict[str, Row]]:
    """Return the result rows by case, then by variant."""
    fields = tuple(fields)
    results: dict[Case, dict[str, Row]] = {}
    for row in rows:
        results.setdefault(Case.of(row, fields), {})[row.get("variant", "")] = row
    return results
