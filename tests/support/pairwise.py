"""Pairwise covers of products of test parameters. Every pair of values runs by default, the full product under `-m slow`."""

import itertools

import pytest


def pairwise(*axes):
    """Return a few rows of the product of the axes in which every pair of values of two axes occurs."""
    sizes = [range(len(axis)) for axis in axes]
    planes = list(itertools.combinations(range(len(axes)), 2))
    missing = {plane: set(itertools.product(sizes[plane[0]], sizes[plane[1]])) for plane in planes}
    rows = []
    for plane in sorted(planes, key=lambda plane: -len(missing[plane])):
        for pair in sorted(missing[plane]):
            if pair not in missing[plane]:
                continue
            row = dict(zip(plane, pair, strict=True))
            for axis in range(len(axes)):  # complete the row: the value with the most pairs that are still missing
                if axis not in row:
                    row[axis] = max(sizes[axis], key=lambda value: (_new_pairs(row, axis, value, missing), -value))
            for a, b in planes:
                missing[a, b].discard((row[a], row[b]))
            rows.append(tuple(row[axis] for axis in range(len(axes))))
    return [tuple(axis[i] for axis, i in zip(axes, row, strict=True)) for row in sorted(rows)]


def _new_pairs(row, axis, value, missing):
    count = 0
    for other, index in row.items():
        plane, pair = ((other, axis), (index, value)) if other < axis else ((axis, other), (value, index))
        count += pair in missing[plane]
    return count


def product(*axes, always=()):
    """Return the product as pytest parameters. Those outside a pairwise cover, and not in `always`, are slow."""
    chosen = [*pairwise(*axes), *always] if len(axes) > 1 else [*always]
    rows = list(itertools.product(*axes))
    return [row if row in chosen else pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def rotate(first, second, times):
    """Return the product as pytest parameters: each value of `first` with `times` of `second` in turn. The others are slow."""
    rows = []
    for i, value in enumerate(first):
        chosen = {(i * times + k) % len(second) for k in range(times)}
        rows += [
            (value, other) if j in chosen else pytest.param(value, other, marks=pytest.mark.slow)
            for j, other in enumerate(second)
        ]
    return rows


def some(names, chosen):
    """Return the names as pytest parameters. Those that are not chosen are slow."""
    assert set(chosen) <= set(names)
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


def mark_slow(rows, chosen):
    """Return the rows as pytest parameters. Those that are not chosen are slow."""
    rows = list(rows)
    assert set(chosen) <= set(rows)
    return [row if row in chosen else pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def with_values(rows, *values, swap=False):
    """Return rows of `rotate` with more values at their end; `swap` exchanges the first two."""
    result = []
    for row in rows:
        first, second = getattr(row, "values", row)
        both = (second, first) if swap else (first, second)
        result.append(pytest.param(*both, *values, marks=getattr(row, "marks", ())))
    return result
