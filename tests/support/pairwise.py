"""Pairwise covers of products of test parameters. Every pair of values runs by default, the full product under `-m slow`."""

import itertools
import math

import pytest


def pairwise(*axes):
    """Return a few rows of the product of the axes in which every pair of values of two axes occurs.

    Rows all of whose pairs are new come first, then those with fewer and fewer.
    """
    rows, covered, chosen = list(itertools.product(*(range(len(axis)) for axis in axes))), set(), []
    for fewest in range(math.comb(len(axes), 2), 0, -1):
        for row in rows:
            pairs = set(itertools.combinations(enumerate(row), 2))
            if len(pairs - covered) >= fewest:
                covered |= pairs
                chosen.append(row)
    return [tuple(axis[i] for axis, i in zip(axes, row, strict=True)) for row in sorted(chosen)]


def product(*axes, always=()):
    """Return the product as pytest parameters. Those outside a pairwise cover, and not in `always`, are slow."""
    return mark_slow(itertools.product(*axes), [*(pairwise(*axes) if len(axes) > 1 else ()), *always])


def rotate(first, second, times):
    """Return the product as pytest parameters: each value of `first` with `times` of `second` in turn. The others are slow."""
    chosen = [(i, (i * times + k) % len(second)) for i in range(len(first)) for k in range(times)]
    return [
        (value, other) if (i, j) in chosen else pytest.param(value, other, marks=pytest.mark.slow)
        for i, value in enumerate(first)
        for j, other in enumerate(second)
    ]


def some(names, chosen):
    """Return the names as pytest parameters. Those that are not chosen are slow."""
    assert set(chosen) <= set(names)
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


def mark_slow(rows, chosen):
    """Return the rows as pytest parameters. Those that are not chosen are slow."""
    rows = list(rows)
    assert all(row in rows for row in chosen)
    return [row if row in chosen else pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def with_values(rows, *values, swap=False):
    """Return rows of `rotate` with more values at their end; `swap` exchanges the first two."""
    result = []
    for row in rows:
        first, second = getattr(row, "values", row)
        both = (second, first) if swap else (first, second)
        result.append(pytest.param(*both, *values, marks=getattr(row, "marks", ())))
    return result
