"""A document as tables: the ratio first, then the times it comes from. Fits 100 columns."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from addnorm.bench.summary import by_cell
from addnorm.bench.timing import JOBS, NORMS, Cell, Row
from addnorm.reference import Norm

WIDTH = 100


def console(*, stderr: bool = False) -> Console:
    """A console that is 100 columns wide where nobody says how wide it is (a pipe, a file)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Greek letters gets ?, not a traceback
    screen = Console(stderr=stderr, highlight=False)
    return screen if screen.is_terminal else Console(stderr=stderr, highlight=False, width=WIDTH)


def digits(value: float) -> str:
    """Three significant digits, whole above 100, without an exponent where a reader can do without."""
    rounded = abs(float(f"{value:.3g}"))
    if rounded >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if rounded >= 10 else f"{value:.2f}" if rounded >= 1 else f"{value:.3g}"


def headline(document: dict[str, Any]) -> str:
    """Where, with what and when it was measured."""
    where, versions = document["machine"], document["versions"]
    found = document["commit"]
    at = f", commit {found[:10]}{' with changes' if document['dirty'] else ''}" if found else ""
    kernels = document["isa"] or "no C++ kernels"
    return (
        f"{where['cpu']}, {kernels}, {document['threads']} threads; torch {versions['torch']}, "
        f"Python {versions['python']}, addnorm {versions['addnorm']}{at}; {document['date'][:10]}"
    )


def show(document: dict[str, Any], screen: Console) -> None:
    """Prints the tables of every norm and job, the summary, the facts."""
    screen.print(headline(document))
    screen.print(
        f"Medians of {document['protocol']['rounds']} interleaved rounds, in microseconds; "
        "spread: from quartile to quartile. "
        "Bandwidth: of the bytes that must move, as a share of what torch.add(out=) of that size reaches. "
        "Error: relative L2, against float64 over the same z."
    )
    warn_if_busy(document, screen)
    for norm in NORMS:
        for job in JOBS:
            _times(document["rows"], norm, job, screen)
    if document["summary"]:
        _claims("What the times must show", document["summary"], screen)
    if document["facts"]:
        _claims("What is so on every machine", document["facts"], screen)
    for failure in document["failures"]:
        size = f"{failure['rows']} x {failure['d']} {failure['dtype']}"
        screen.print(f"[yellow]torch.compile failed[/] at {size}, {failure['job']}: {failure['error']}", soft_wrap=True)
    if not document["complete"]:
        done, planned = len(by_cell(document["rows"])), document["protocol"]["cells"]
        screen.print(f"[yellow]Interrupted:[/] {done} of {planned} cells were measured.")


def warn_if_busy(document: dict[str, Any], screen: Console) -> None:
    """Says so where others were using the cores: two threads on one core wait for each other in whole time slices."""
    load = document["load"]
    if load > document["machine"]["cores"] / 2:
        screen.print(f"[yellow]The machine was busy[/] (load {load:.1f}) before this began: do not trust the times.")


def _times(rows: list[Row], norm: Norm, job: str, screen: Console) -> None:
    cells = {cell: row for cell, row in by_cell(rows).items() if (cell.norm, cell.job) == (norm, job)}
    if not cells:
        return
    table = _table(f"{NORMS[norm]}: {JOBS[job].title}")
    compiled = any("compile" in row for row in cells.values())
    columns = [name for name in COLUMNS if compiled or "compile" not in name]
    for name in columns:
        table.add_column(
            name, justify="left" if name == "dtype" else "right", style="bold" if name == "x eager" else ""
        )
    for cell, row in cells.items():
        table.add_row(*(COLUMNS[name](cell, row) for name in columns))
    screen.print(table)


def _median(row: dict[str, Row], name: str) -> str:
    return digits(row[name]["median_us"]) if name in row else "failed"


def _times_as_fast(row: dict[str, Row], name: str) -> str:
    return f"{row[name]['median_us'] / row['addnorm']['median_us']:.2f}" if name in row else "-"


def _spread(row: Row) -> str:
    return f"{(row['q3_us'] - row['q1_us']) / row['median_us']:.0%}"


COLUMNS: dict[str, Callable[[Cell, dict[str, Row]], str]] = {
    "x eager": lambda _, row: _times_as_fast(row, "eager"),
    "x compile": lambda _, row: _times_as_fast(row, "compile"),
    "rows x d": lambda cell, _: f"{cell.rows} x {cell.d}",
    "dtype": lambda cell, _: cell.dtype,
    "addnorm": lambda _, row: _median(row, "addnorm"),
    "spread": lambda _, row: _spread(row["addnorm"]),
    "eager": lambda _, row: _median(row, "eager"),
    "compile": lambda _, row: _median(row, "compile"),
    "add(out=)": lambda _, row: _median(row, "add"),
    "bandwidth": lambda _, row: f"{row['addnorm']['share_of_add_bandwidth']:.0%}",
}


def _claims(title: str, claims: list[Row], screen: Console) -> None:
    table = _table(title)
    more = {"versus": "", "torch": "PyTorch"}
    shown = [name for name in more if any(name in one for one in claims)]
    for heading in ("addnorm", *(more[name] for name in shown), "target", "met"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column("norm")
    table.add_column("what")
    for one in claims:
        value = "-" if one["value"] is None else digits(one["value"])
        extra = [digits(one[name]) if name == "torch" else one.get(name, "") for name in shown]
        target = f"{one['compare']} {digits(one['target'])}"
        table.add_row(value, *extra, target, MARKS[one["met"]], _name(one["norm"]), one["name"])
    screen.print(table)


MARKS = {True: "[green]yes[/]", False: "[bold red]no[/]", None: "[dim]-[/]"}


def _name(norm: Norm | None) -> str:
    return NORMS[norm] if norm else ""


def _table(title: str) -> Table:
    return Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
