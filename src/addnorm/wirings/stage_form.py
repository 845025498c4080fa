"""The form of a stage: how texts write its streams, and the parts of the stage that are no numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from addnorm.wirings.factors import Factor, Learned
from addnorm.wirings.matrices import Vector, find_place, unit


def names_of(spec: Any) -> tuple[str, ...]:
    """Return the names of the input streams of a stage or a head."""
    return spec.names if isinstance(spec.names, tuple) and spec.names else default_names(spec.n)


def default_names(n: int) -> tuple[str, ...]:
    """Return the default names of n streams."""
    return {1: ("x",), 2: ("u", "v")}.get(n, tuple(f"x_{k}" for k in range(1, n + 1)))


def is_matrix(spec: Any) -> bool:
    """Return whether the streams are written as one X: they are one tensor, or all weights of their sums are computed."""
    is_computed = "inject" in spec.computes or ("mix" in spec.computes and not spec.coefficients.appends)
    return bool(spec.is_stacked or (spec.n > 1 and is_computed))


def is_counted(spec: Any) -> bool:
    """Return whether the streams are written as numbered states x_0 .. x_n.

    A stage keeps the earlier states then, and changes only the newest or appends one.
    """
    n, has_names = spec.n, isinstance(spec.names, tuple) and spec.names
    has_letter = spec.names or ("collapse" in spec.computes and n > 1)
    if is_matrix(spec) or has_names or not has_letter:
        return False
    rows = spec.mix or ()
    kept = rows[: n if len(rows) > n else n - 1]
    earlier = (spec.inject or ())[:-1] + spec.norms_out[:-1]
    return not any(earlier) and len({*spec.norm_streams}) == 1 and all(row == unit(n, k) for k, row in enumerate(kept))


def find_entries(spec: Any) -> dict[str, Factor | Vector]:
    """Return the entries of C, A and B that texts write one by one, by the names of their places, and the factor c.

    Of counted states only the newest one is written, as stream 0. Its entry is the whole row if the row weighs several states or
    is learned.
    """
    found: dict[str, Factor | Vector] = {}
    for matrix, rows in spec.matrices.items():
        if matrix != "collapse" and is_matrix(spec):
            continue  # written as A and b
        written = _newest(matrix, rows) if is_counted(spec) else rows
        found |= {find_place(matrix, k, j): entry for k, row in enumerate(written) for j, entry in enumerate(row)}
    return {place: entry for place, entry in found.items() if entry != 0.0} | {"c": spec.c}


def _newest(matrix: str, rows: Sequence[Vector]) -> list[tuple[Factor | Vector]]:
    """Return the rows of a matrix of counted states as texts need them, each as one entry.

    The entry is the whole row if the row is written as a sum over the states, else the newest state's factor. Of the matrices of
    the write only the newest state's row is returned, since the other states stay as they are.
    """
    newest: list[tuple[Factor | Vector]] = [(row if _is_sum(row) and matrix != "inject" else row[-1],) for row in rows]
    return newest if matrix == "collapse" else newest[-1:]


def _is_sum(row: Sequence[Factor]) -> bool:
    """Return whether a row of weights of counted states is written as a sum over them."""
    return isinstance(row[-1], Learned) or any(row[:-1])


def form(spec: Any) -> tuple[object, ...]:
    """Return a key of all that a stage has but its numbers: stages with equal keys share one equation."""
    kinds = tuple((place, _kind(entry)) for place, entry in find_entries(spec).items())
    norms = spec.norm_streams, spec.norms_out
    counts: tuple[object, ...] = spec.n, spec.n_out, spec.names_out, spec.mix is None
    if is_counted(spec):
        counts, norms = (spec.n_out - spec.n,), tuple(flags[-1:] for flags in norms)
    flags = spec.reads, spec.delayed, spec.norm_in, spec.norm_branch, spec.shares
    return (spec.coefficients, spec.names, *flags, *counts, *norms, *kinds)


def _kind(entry: Factor | Vector) -> object:
    """Return a key for the kind of an entry, whatever its number: constant, learned factor, or sum over states."""
    if isinstance(entry, tuple):
        return "sum", _kind(entry[-1])
    return (entry.per_feature, entry.shared, base_name(entry.name)) if isinstance(entry, Learned) else None


def base_name(name: str) -> str:
    """Return the name of a learned entry without its index: "a" for "a_3"."""
    return re.sub(r"_?\d+$", "", name)
