"""The form of a stage: how its streams are written, and the parts of it that are no numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from addnorm.wirings.row import Factor, Learned

__all__ = [
    "base_name",
    "counted_rows",
    "default_names",
    "find_entries",
    "form",
    "is_counted",
    "is_matrix",
    "is_sum",
    "names_of",
]


def names_of(spec: Any) -> tuple[str, ...]:
    """Return the names of the streams that a stage or a head finds."""
    return spec.names if isinstance(spec.names, tuple) and spec.names else default_names(spec.n)


def default_names(n: int) -> tuple[str, ...]:
    """Return the names of n streams that have none of their own."""
    return {1: ("x",), 2: ("u", "v")}.get(n, tuple(f"x_{k}" for k in range(1, n + 1)))


def is_matrix(spec: Any) -> bool:
    """Return whether the streams are written as one X: they are one tensor, or all weights of their sums are computed."""
    if spec.is_stacked:
        return True
    computed = spec.coefficients
    if spec.n == 1 or computed is None:
        return False
    return "inject" in computed.computes or ("mix" in computed.computes and not computed.appends)


def is_counted(spec: Any) -> bool:
    """Return whether the streams are states that are counted: only the newest one changes, or one is appended."""
    if is_matrix(spec) or (spec.names and isinstance(spec.names, tuple)) or not (spec.names or _reads_sources(spec)):
        return False
    rows, n = getattr(spec, "mix", None) or (), spec.n
    kept = rows[: n if len(rows) > n else n - 1]
    is_kept = all(row[k] == 1.0 and row.count(0.0) == n - 1 for k, row in enumerate(kept))
    inject, norm_out = getattr(spec, "inject", None) or (), getattr(spec, "norm_out", ())
    return is_kept and not any(inject[:-1]) and not any(norm_out[:-1]) and len({*spec.norm_streams}) == 1


def _reads_sources(spec: Any) -> bool:
    computed = spec.coefficients
    return computed is not None and spec.collapse is None and spec.n > 1


def find_entries(spec: Any) -> dict[str, Factor]:
    """Return the entries that are written, by the names of their places."""
    inject = getattr(spec, "inject", None) or ()
    if is_counted(spec):
        found = {place: row[-1] for place, row in counted_rows(spec) if row[-1] != 0.0 or is_sum(row)}
        return found | ({"inject": inject[-1]} if inject and inject[-1] != 0.0 else {})
    found = {
        f"{name}_{k}_{j}": entry
        for name in ("collapse", "mix")
        for k, row in enumerate(getattr(spec, name, None) or ())
        for j, entry in enumerate(row)
        if entry != 0.0
    }
    return found | {f"inject_{k}": entry for k, entry in enumerate(inject) if entry != 0.0}


def counted_rows(spec: Any) -> Iterator[tuple[str, tuple[Factor, ...]]]:
    """Yield the rows of weights of counted states: of the reads, and of the state that goes on."""
    yield from ((f"collapse_{q}", row) for q, row in enumerate(spec.collapse or ()))
    rows = getattr(spec, "mix", None)
    if rows:
        yield "mix", rows[-1]


def is_sum(row: Sequence[Factor]) -> bool:
    """Return whether a row of weights of counted states is written as a sum over them."""
    return isinstance(row[-1], Learned) or any(entry != 0.0 for entry in row[:-1])


def form(spec: Any) -> tuple[object, ...]:
    """Return the parts of a stage that are no numbers: stages that agree in them have one text."""
    names = ("collapse", "mix", "inject", "n", "names", "names_out", "norm_streams", "norm_out")
    rest = tuple(value for name, value in vars(spec).items() if name not in names)
    kinds = tuple(
        (place, (entry.per_feature, entry.shared, base_name(entry.name)) if isinstance(entry, Learned) else None)
        for place, entry in find_entries(spec).items()
    )
    if is_counted(spec):
        sums = tuple((place, is_sum(row)) for place, row in counted_rows(spec))
        return (*rest, kinds, sums, spec.names, spec.n_out - spec.n, spec.norm_streams[-1], spec.norm_out[-1])
    return (
        *rest,
        kinds,
        spec.n,
        spec.n_out,
        spec.names,
        spec.names_out,
        spec.norm_streams,
        spec.norm_out,
        spec.mix is None,
    )


def base_name(name: str) -> str:
    """Return the name of a learned entry without its number."""
    return re.sub(r"_?\d+$", "", name)
