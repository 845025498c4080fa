"""A document as tables: the ratio first, then the times it comes from. Fits 100 columns."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from addnorm.bench.accuracy import COLUMNS as ERRORS
from addnorm.bench.jobs import JOBS, NORMS, Cell
from addnorm.bench.summary import by_cell
from addnorm.bench.timing import Row
from addnorm.reference import Norm

if TYPE_CHECKING:  # imported where something is drawn, as in __init__.py
    from rich.console import Console
    from rich.table import Table

WIDTH = 100


def console(*, stderr: bool = False) -> Console:
    """A console that is 100 columns wide where nobody says how wide it is (a pipe, a file)."""
    from rich.console import Console

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
    kernels, n = document["isa"] or "no C++ kernels", document["threads"]
    return (
        f"{where['cpu']}, {kernels}, {n} thread{'s'[: n > 1]}; torch {versions['torch']}, "
        f"Python {versions['python']}, addnorm {versions['addnorm']}{at}; {document['date'][:10]}"
    )


def show(document: dict[str, Any], screen: Console) -> None:
    """Prints the tables of every norm and job, the summary, the facts."""
    screen.print(headline(document))
    screen.print(
        f"Medians of up to {document['protocol']['rounds']} interleaved rounds, in microseconds; "
        "spread: from quartile to quartile. "
        "Bandwidth: of the bytes that must move, as a share of what torch.add(out=) of that size reaches. "
        "Error: relative L2, against float64 over the same z."
    )
    warn_if_busy(document, screen)
    tables: dict[str, dict[Cell, dict[str, Row]]] = {}
    for cell, row in by_cell(document["rows"]).items():
        tables.setdefault(title(cell), {})[cell] = row
    for name, cells in tables.items():
        _times(name, cells, screen)
    if document["summary"]:
        _claims("What the times must show", document["summary"], screen)
    if document["facts"]:
        _claims("What is so on every machine", document["facts"], screen)
    if document["accuracy"]:
        _accuracy(document["accuracy"], screen)
    for failure in document["failures"]:
        size = f"{failure['rows']} x {failure['d']} {failure['dtype']}"
        what = f"[yellow]{failure['variant']} failed[/] at {size}, {failure['job']}"
        screen.print(f"{what}: {failure['error']}", soft_wrap=True)
    if not document["complete"]:
        done, planned = len(by_cell(document["rows"])), document["protocol"]["cells"]
        screen.print(f"[yellow]Interrupted:[/] {done} of {planned} cells were measured.")


def warn_if_busy(document: dict[str, Any], screen: Console) -> None:
    """Says so where others were using the cores: two threads on one core wait for each other in whole time slices."""
    load = document["load"]
    if load > document["machine"]["cores"] / 2:
        screen.print(f"[yellow]The machine was busy[/] (load {load:.1f}) before this began: do not trust the times.")


def title(cell: Cell) -> str:
    """Of the table that the cell belongs to."""
    threads = f", {cell.threads} thread{'s'[: cell.threads > 1]}"
    return f"{NORMS[cell.norm]}: {JOBS[cell.job].title}{threads}"


def _times(name: str, cells: dict[Cell, dict[str, Row]], screen: Console) -> None:
    table = _table(name)
    variants = {variant for row in cells.values() for variant in row}
    columns = [column for column in COLUMNS if PEER.get(column, "eager") in variants]
    for column in columns:
        table.add_column(
            column, justify="left" if column == "dtype" else "right", style="bold" if column == "x eager" else ""
        )
    for cell, row in cells.items():
        table.add_row(*(COLUMNS[column](cell, row) for column in columns))
    screen.print(table)


def _median(row: dict[str, Row], name: str) -> str:
    return digits(row[name]["median_us"])


def _times_as_fast(row: dict[str, Row], name: str) -> str:
    return f"{row[name]['median_us'] / row['addnorm']['median_us']:.2f}" if name in row else "-"


def _spread(row: Row) -> str:
    return f"{(row['q3_us'] - row['q1_us']) / row['median_us']:.0%}"


PEER = {"x compile": "compile", "x onnx": "onnxruntime"}  # the columns of those that are not always measured
COLUMNS: dict[str, Callable[[Cell, dict[str, Row]], str]] = {
    "x eager": lambda _, row: _times_as_fast(row, "eager"),
    "x compile": lambda _, row: _times_as_fast(row, "compile"),
    "x onnx": lambda _, row: _times_as_fast(row, "onnxruntime"),
    "rows x d": lambda cell, _: f"{cell.rows} x {cell.d}",
    "dtype": lambda cell, _: cell.dtype,
    "addnorm": lambda _, row: _median(row, "addnorm"),
    "spread": lambda _, row: _spread(row["addnorm"]),
    "eager": lambda _, row: _median(row, "eager"),
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
        target = "-" if one["target"] is None else f"{one['compare']} {digits(one['target'])}"
        # The claims that have no target because they are of fewer threads say so.
        what = one["name"] + (f", {one['threads']} thread" if one.get("threads") == 1 else "")
        table.add_row(value, *extra, target, MARKS[one["met"]], _name(one["norm"]), what)
    screen.print(table)


def _accuracy(rows: list[Row], screen: Console) -> None:
    table = _table("All options: relative error against float64")
    for column in ("norm", "dtype", *ERRORS):
        # The longest names in two lines: the table is as wide as a page.
        table.add_column(column.replace("_", "_\n"), justify="right" if column in ERRORS else "left")
    for one in rows:
        head, style = (
            ((_name(one["norm"]), one["dtype"]), "") if one["variant"] == "addnorm" else (("", "PyTorch"), "dim")
        )
        table.add_row(*head, *(f"{one[name]:.1e}" if name in one else "" for name in ERRORS), style=style)
    screen.print(table)


MARKS = {True: "[green]yes[/]", False: "[bold red]no[/]", None: "[dim]-[/]"}


def _name(norm: Norm | None) -> str:
    return NORMS[norm] if norm else ""


def _table(title: str) -> Table:
    from rich.table import Table

    return Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
