"""Pairwise covers of products of test parameters: every pair of values by default, the full product under `-m slow`."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return a few rows of the product of the axes in which every pair of values of two axes occurs."""
    sizes = [range(len(axis)) for axis in axes]
    planes = list(itertools.combinations(range(len(axes)), 2))
    missing = {plane: set(itertools.product(sizes[plane[0]], sizes[plane[1]])) for plane in planes}
    rows: list[tuple[int, ...]] = []
    for plane in sorted(planes, key=lambda plane: -len(missing[plane])):
        for pair in sorted(missing[plane]):
            if pair not in missing[plane]:
                continue
            row: dict[int, int] = dict(zip(plane, pair, strict=True))
            for axis in range(len(axes)):  # complete the row: the value with the most pairs that are still missing
                if axis not in row:
                    row[axis] = max(sizes[axis], key=lambda value: (_new_pairs(row, axis, value, missing), -value))
            for a, b in planes:
                missing[a, b].discard((row[a], row[b]))
            rows.append(tuple(row[axis] for axis in range(len(axes))))
    return [tuple(axis[i] for axis, i in zip(axes, row, strict=True)) for row in sorted(rows)]


def _new_pairs(row: dict[int, int], axis: int, value: int, missing: dict[tuple[int, int], set[tuple[int, int]]]) -> int:
    count = 0
    for other, index in row.items():
        plane, pair = ((other, axis), (index, value)) if other < axis else ((axis, other), (value, index))
        count += pair in missing[plane]
    return count


def product(*axes: Sequence[Any], always: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
    """Return the product as parameters of pytest: those outside a pairwise cover, and not in `always`, are slow."""
    chosen = [*pairwise(*axes), *always] if len(axes) > 1 else [*always]
    rows = list(itertools.product(*axes))
    return [row if row in chosen else pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def sample(rows: Sequence[Any], every: int) -> list[Any]:
    """Return rows as parameters of pytest, of which only every n-th is not slow."""
    return [
        row if i % every == 0 else pytest.param(*row, marks=pytest.mark.slow)
        for i, row in enumerate(row if isinstance(row, tuple) else (row,) for row in rows)
    ]
