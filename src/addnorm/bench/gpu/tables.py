"""A document of a GPU as Markdown: the section of docs/performance.md, and what the script prints."""

from __future__ import annotations

from typing import Any

from addnorm.bench.gpu.cells import DTYPES, JOBS, Cell
from addnorm.bench.gpu.summary import NAMES, Rows, by_cell
from addnorm.bench.jobs import NORMS
from addnorm.bench.tables import digits

Document = dict[str, Any]
Lines = list[list[str]]

COMMAND = "python benchmarks/bench_gpu.py"
UNMEASURED = f"Nothing has been measured on a GPU yet. `{COMMAND}` does it, and writes `benchmarks/results/gpu.json`."


def section(document: Document | None) -> str:
    """Everything, or the sentence that there is nothing.

    Raises:
        ValueError: the document is not of a GPU.
    """
    if document is None:
        return UNMEASURED
    if document["device"]["type"] != "cuda":
        raise ValueError(
            f"the document is of {document['device']['name']}, whose times are no GPU's: run {COMMAND} where there is one"
        )
    return report(document)


def report(document: Document) -> str:
    """The device, the targets, a table for each norm, who is missing, what failed."""
    found = by_cell(document["rows"])
    norms = [f"{NORMS[norm]}:\n\n{times(found, norm)}" for norm in NORMS if any(cell.norm == norm for cell in found)]
    parts = [headline(document), targets(document), *norms, *notes(document)]
    return "\n\n".join(part for part in parts if part)


def headline(document: Document) -> str:
    """On what, with what and when, and how fast it copies."""
    device, versions = document["device"], document["versions"]
    at = f"commit {document['commit'][:10]}{' with changes' if document['dirty'] else ''}" if document["commit"] else ""
    if device["type"] == "cuda":
        what = f"{device['name']}, {device['multiprocessors']} multiprocessors"
        made = f"CUDA {device['cuda']}, driver {device['driver']}, triton {versions['triton']}"
    else:
        what, made = f"{device['name']}, which is no GPU: a trial of the script, whose times say nothing of one", ""
    copied = f"copies at {digits(document['copy']['median'] / 1e9)} GB/s"
    mine = f"torch {versions['torch']}, addnorm {versions['addnorm']}"
    return (
        "; ".join(filter(None, [what, copied, ", ".join(filter(None, [mine, made, at])), document["date"][:10]])) + "."
    )


def targets(document: Document) -> str:
    """The summary: what was measured next to its target, a column a norm."""
    norms = [norm for norm in NORMS if any(one["norm"] == norm for one in document["summary"])]
    goals: dict[tuple[str, str], dict[str, str]] = {}
    for one in document["summary"]:
        if one["norm"]:
            target = "" if one["target"] is None else f"{one['compare']} {digits(one['target'])}"
            goals.setdefault((one["name"], target), {})[one["norm"]] = _judged(one)
    lines = [
        ["measured over the cells", "target", *(NORMS[norm] for norm in norms)],
        [":--", ":--", *["--:"] * len(norms)],
    ]
    lines += [[*what, *(found.get(norm, "") for norm in norms)] for what, found in goals.items()]
    return _markdown(lines) if goals else ""


def _judged(one: dict[str, Any]) -> str:
    if one["value"] is None:
        return "not measured"
    if one["met"] is not False:
        return digits(one["value"])
    return f"{digits(one['value'])} (missed, {one['cells_met']} of {one['cells']} cells reach it)"


def times(found: dict[Cell, Rows], norm: str) -> str:
    """A line a cell: addnorm's device time and its share of the copy's bandwidth, call time, host time, and the peers'."""
    cells = {cell: rows for cell, rows in found.items() if cell.norm == norm and "addnorm" in rows}
    peers = [name for name in NAMES if any(name in rows for rows in cells.values())]
    head = ["rows x d", "dtype", "", "device", "share of the copy", *(f"/ {NAMES[name]}" for name in peers), "call",
            *(f"/ {NAMES[name]}" for name in peers), "host"]  # fmt: skip
    lines = [head, ["--:", ":--", ":--", *["--:"] * (len(head) - 3)]]
    order = [*JOBS]
    for cell in sorted(cells, key=lambda cell: (order.index(cell.job), [*DTYPES].index(cell.dtype), cell.d, cell.rows)):
        rows = cells[cell]
        ours = rows["addnorm"]
        ratios = {part: [_ratio(rows, name, part) for name in peers] for part in ("device", "call")}
        warm, late = "" if ours["cold"] else " (warm)", "" if ours["queued"] else " (waits)"
        lines.append([
            f"{cell.rows} x {cell.d}", cell.dtype, JOBS[cell.job].title, f"{digits(ours['device_us'])}{late}",
            f"{ours['share_of_copy']:.0%}{warm}", *ratios["device"], digits(ours["call_us"]), *ratios["call"],
            digits(ours["host_us"]),
        ])  # fmt: skip
    return _markdown(lines) if cells else "addnorm was measured in no cell."


def _ratio(rows: Rows, peer: str, part: str) -> str:
    return f"**{rows[peer][f'{part}_us'] / rows['addnorm'][f'{part}_us']:.2f}**" if peer in rows else ""


def notes(document: Document) -> list[str]:
    """In sentences: who was missing, what failed, what was left."""
    said = []
    if document["missing"]:
        said.append(" ".join(f"{one}." for one in document["missing"].values()))
    if document["failures"]:
        lines = [["variant", "cell", "what was wrong"], [":--"] * 3]
        for one in document["failures"]:
            cell = Cell(*(one[name] for name in Cell._fields))
            lines.append([one["variant"], cell.title, " ".join(one["error"].split()).replace("|", "\\|")])
        said.append(f"Failed, and left out of the times:\n\n{_markdown(lines)}")
    if document["left"]:
        done = len(document["cells"])
        ended = {"budget": "the time that it was given was over"}.get(document["ended"], document["ended"])
        said.append(f"{done} of {done + len(document['left'])} cells were measured ({ended}).")
    return said


def _markdown(lines: Lines) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
