"""Write docs/targets.md: each target of the benchmarks with its measured value, missed ones first, from benchmarks/results/."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import page

from addnorm._util.numbers import format_number
from addnorm.bench.pages import headline

TITLES = {
    "functional": "The operation", "limit": "The forward beside its limit", "compile": "The operation under torch.compile",
    "streams": "The boundary of four streams", "stack": "Encoders", "fuse": "Fused models",
    "stream": "Inspecting and recording", "lab": "The lab", "gpu": "The operation on a GPU",
}  # fmt: skip
NORMS = {"layer": "LayerNorm", "rms": "RMSNorm"}


class Row(NamedTuple):
    """One target: the name of the number, its value, the bound, and whether the value meets it."""

    name: str
    value: float | None  # None: not measured
    compare: str
    target: float
    met: bool | None

    def cells(self) -> list[str]:
        """Return the cells of a table."""
        bound = f"{self.compare} {number(self.target)}"
        if self.value is None:
            return [self.name, "not measured", bound, ""]
        return [self.name, number(self.value), bound, "yes" if self.met else "**no**"]


def number(value: float) -> str:
    """Return a number with three significant digits; whole ones with all their digits."""
    return f"{value:,}" if isinstance(value, int) else format_number(value, 3, trim=True, grouped=True)


def documents() -> dict[str, dict[str, Any]]:
    """Return the results that have targets, by name, in the order of `TITLES`."""
    names = [name for name in TITLES if (page.RESULTS / f"{name}.json").exists()]
    return {name: results for name in names if [*rows(results := page.document(name))]}


def rows(results: dict[str, Any]) -> Iterator[Row]:
    """Yield the targets of one file of results."""
    for one in [*results.get("summary", []), *results.get("facts", [])]:
        if one["target"] is not None:
            versus = f" ({one['versus']})" if one.get("versus") else ""
            norm = f", {NORMS[one['norm']]}" if one.get("norm") else ""
            yield Row(f"{one['name']}{norm}{versus}", one["value"], one["compare"], one["target"], one["met"])


def missed() -> str:
    """Return how many targets are met, and the table of the others."""
    by_file = {name: [*rows(results)] for name, results in documents().items()}
    every = [row for some in by_file.values() for row in some]
    lines = [[TITLES[name], *row.cells()[:3]] for name, some in by_file.items() for row in some if row.met is False]
    unmeasured = sum(row.value is None for row in every)
    more = f", {unmeasured} not measured" if unmeasured else ""
    count = f"{sum(row.met is True for row in every)} of {len(every)} targets are met{more}."
    return f"{count} Not met:\n\n{page.table(['part', 'measured', 'value', 'target'], lines)}" if lines else count


def tables() -> str:
    """Return a table for each file of results, with where it was measured."""
    sections = []
    for name, results in documents().items():
        table = page.table(["measured", "value", "target", "met"], [row.cells() for row in rows(results)])
        sections.append(f"### {TITLES[name]}\n\n{table}\n\n{headline(results)}.")
    return "\n\n".join(sections)


SECTIONS = {"targets:missed": missed, "targets:tables": tables}
