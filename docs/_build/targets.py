"""Write docs/targets.md: each target of the benchmarks with its measured value, missed ones first, from benchmarks/results/."""

from __future__ import annotations

from typing import Any

import page

from addnorm.bench.jobs import NORMS
from addnorm.bench.pages import bound, digits, headline

TITLES = {
    "functional": "The operation", "limit": "The forward beside its limit", "compile": "The operation under torch.compile",
    "streams": "The boundary of four streams", "stack": "Encoders", "fuse": "Fused models",
    "stream": "Inspecting and recording", "gpu": "The operation on a GPU",
}  # fmt: skip


def number(value: float | None) -> str:
    """Return a number with three significant digits; whole ones with all their digits."""
    return "not measured" if value is None else digits(value, trim=True)


def documents() -> dict[str, dict[str, Any]]:
    """Return the results that have targets, by name, in the order of `TITLES`."""
    names = [name for name in TITLES if (page.RESULTS / f"{name}.json").exists()]
    return {name: results for name in names if targets(results := page.document(name))}


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the numbers of one file of results that have a target."""
    return [one for one in [*results.get("summary", []), *results.get("facts", [])] if one["target"] is not None]


def cells(one: dict[str, Any]) -> list[str]:
    """Return the cells of a target: the name of the number, its value, the bound, and whether it is met."""
    versus = f" ({one['versus']})" if one.get("versus") else ""
    norm = f", {NORMS[one['norm']]}" if one.get("norm") else ""
    met = {True: "yes", False: "**no**", None: ""}[one["met"]]
    return [f"{one['name']}{norm}{versus}", number(one["value"]), bound(one), met]


def missed() -> str:
    """Return how many targets are met, and the table of the others."""
    by_title = [(TITLES[name], one) for name, results in documents().items() for one in targets(results)]
    lines = [[title, *cells(one)[:3]] for title, one in by_title if one["met"] is False]
    unmeasured = sum(one["value"] is None for _, one in by_title)
    more = f", {unmeasured} not measured" if unmeasured else ""
    count = f"{sum(one['met'] is True for _, one in by_title)} of {len(by_title)} targets are met{more}."
    return f"{count} Not met:\n\n{page.table(['part', 'measured', 'value', 'target'], lines)}" if lines else count


def tables() -> str:
    """Return a table for each file of results, with the reasons for the bounds and where it was measured."""
    sections = []
    for name, results in documents().items():
        found = targets(results)
        table = page.table(["measured", "value", "target", "met"], [cells(one) for one in found])
        whys = dict.fromkeys(f"- {bound(one)}: {one['why']}" for one in found if "why" in one)
        sections.append(
            "\n\n".join([f"### {TITLES[name]}", table, *(["\n".join(whys)] if whys else []), f"{headline(results)}."])
        )
    return "\n\n".join(sections)


SECTIONS = {"targets:missed": missed, "targets:tables": tables}
