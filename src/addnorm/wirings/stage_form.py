"""The form of a stage: how its streams are written, and the parts of it that are no numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from addnorm.wirings.factors import Factor, Learned

__all__ = [
    "base_name", "counted_rows", "default_names", "find_entries", "form", "is_counted", "is_matrix", "is_sum", "names_of",
]  # fmt: skip


def names_of(spec: Any) -> tuple[str, ...]:
    """Return the names of the streams that a stage or a head finds."""
    return spec.names if isinstance(spec.names, tuple) and spec.names else default_names(spec.n)


def default_names(n: int) -> tuple[str, ...]:
    """Return the names of n streams that have none of their own."""
    return {1: ("x",), 2: ("u", "v")}.get(n, tuple(f"x_{k}" for k in range(1, n + 1)))


def is_matrix(spec: Any) -> bool:
    """Return whether the streams are written as one X: they are one tensor, or all weights of their sums are computed."""
    if spec.is_stacked or spec.n == 1:
        return bool(spec.is_stacked)
    return "inject" in spec.computes or ("mix" in spec.computes and not spec.coefficients.appends)


def is_counted(spec: Any) -> bool:
    """Return whether the streams are states that are counted: only the newest one changes, or one is appended."""
    reads_sources = "collapse" in spec.computes and spec.n > 1
    if is_matrix(spec) or (spec.names and isinstance(spec.names, tuple)) or not (spec.names or reads_sources):
        return False
    rows, n = spec.mix or (), spec.n
    kept = rows[: n if len(rows) > n else n - 1]
    is_kept = all(row[k] == 1.0 and row.count(0.0) == n - 1 for k, row in enumerate(kept))
    return (
        is_kept
        and not any((spec.inject or ())[:-1])
        and not any(spec.norms_out[:-1])
        and len({*spec.norm_streams}) == 1
    )


def find_entries(spec: Any) -> dict[str, Factor]:
    """Return the entries that are written, by the names of their places."""
    inject = spec.inject or ()
    if is_counted(spec):
        found = {place: row[-1] for place, row in counted_rows(spec) if row[-1] != 0.0 or is_sum(row)}
        return found | ({"inject": inject[-1]} if inject and inject[-1] != 0.0 else {})
    found = {
        f"{name}_{k}_{j}": entry
        for name in ("collapse", "mix")
        for k, row in enumerate(getattr(spec, name) or ())
        for j, entry in enumerate(row)
        if entry != 0.0
    }
    return found | {f"inject_{k}": entry for k, entry in enumerate(inject) if entry != 0.0} | {"c": spec.c}


def counted_rows(spec: Any) -> Iterator[tuple[str, tuple[Factor, ...]]]:
    """Yield the rows of weights of counted states: of the reads, and of the state that goes on."""
    yield from ((f"collapse_{q}", row) for q, row in enumerate(spec.collapse or ()))
    if spec.mix:
        yield "mix", spec.mix[-1]


def is_sum(row: Sequence[Factor]) -> bool:
    """Return whether a row of weights of counted states is written as a sum over them."""
    return isinstance(row[-1], Learned) or any(entry != 0.0 for entry in row[:-1])


def form(spec: Any) -> tuple[object, ...]:
    """Return the parts of a stage that are no numbers: stages that agree in them have one text."""
    kinds = tuple(
        (place, (entry.per_feature, entry.shared, base_name(entry.name)) if isinstance(entry, Learned) else None)
        for place, entry in find_entries(spec).items()
    )
    parts = (
        spec.coefficients,
        spec.reads,
        spec.delayed,
        spec.norm_in,
        spec.norm_branch,
        spec.shares,
        kinds,
        spec.names,
    )
    norms = spec.norm_streams, spec.norms_out
    if is_counted(spec):
        sums = tuple((place, is_sum(row)) for place, row in counted_rows(spec))
        return (*parts, sums, spec.n_out - spec.n, *(flags[-1] for flags in norms))
    return (*parts, spec.n, spec.n_out, spec.names_out, *norms, spec.mix is None)


def base_name(name: str) -> str:
    """Return the name of a learned entry without its number."""
    return re.sub(r"_?\d+$", "", name)
