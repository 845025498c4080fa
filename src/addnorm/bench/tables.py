"""The document of the operation's benchmark as tables: the ratio first, then the times. Fits 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from addnorm._util.blocks import Block, Column, Paragraph, Span, Table, TableRow
from addnorm._util.numbers import format_count, format_number
from addnorm._util.render import make_console, to_rich
from addnorm.bench.accuracy import COLUMNS as ERRORS
from addnorm.bench.cases import FIELDS, NORMS, title
from addnorm.bench.harness import MAX_OTHERS, Case, Document, Progress, Row, by_case

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "WIDTH",
    "blocks",
    "busy_warning",
    "console",
    "digits",
    "headline",
    "is_busy",
    "printed_progress",
    "show",
    "warn_if_busy",
]

WIDTH = 100


def console(*, stderr: bool = False) -> Console:
    """Return a console that is 100 columns wide where the output is not a terminal."""
    return make_console(stderr=stderr, width=WIDTH)


def digits(value: float | None, *, trim: bool = False) -> str:
    """Return a number with three significant digits and thousands separators."""
    return format_number(value, 3, trim=trim, grouped=True)


def headline(document: Document) -> str:
    """Return where, with what, when and at which load a document was measured."""
    versions, commit = document["versions"], document["commit"]
    at = f", commit {commit[:10]}{' with changes' if document['dirty'] else ''}" if commit else ""
    kernels, n = document["isa"] or "no C++ kernels", document.get("threads")
    threads = f", {n} thread{'s'[: n > 1]}" if n else ""
    busy = ": the machine was busy, so the times are uncertain" if is_busy(document) else ""
    after, others = document.get("load_after"), document.get("load_of_others")
    load = f"load {document['load']:.1f} before it began" + (f", {after:.1f} after" if after is not None else "")
    load += f", {others:.1f} of it by others" if others is not None else ""
    return (
        f"{document['machine']['cpu']}, {kernels}{threads}; torch {versions['torch']}, Python {versions['python']}, "
        f"addnorm {versions['addnorm']}{at}; {document['date'][:10]}; {load}{busy}"
    )


def is_busy(document: Document) -> bool:
    """Return whether others used the cores: two threads on one core wait for each other in whole time slices."""
    others = document.get("load_of_others")
    return bool(document["load"] > document["machine"]["cores"] / 2 or (others is not None and others > MAX_OTHERS))


def busy_warning(document: Document) -> Iterator[Paragraph]:
    """Yield a warning if others used the cores before the run began."""
    if is_busy(document):
        others = document.get("load_of_others")
        used = "" if others is None else f", others used {others:.1f} cores meanwhile"
        load = f" (load {document['load']:.1f} before this began{used}): do not trust the times."
        yield Paragraph(("The machine was busy", "warning"), load)


def warn_if_busy(document: Document, screen: Console) -> None:
    """Print `busy_warning`."""
    for part in to_rich(busy_warning(document), screen.width):
        screen.print(part)


def show(document: Document, screen: Console) -> None:
    """Print a document."""
    for part in to_rich(blocks(document), screen.width):
        screen.print(part)


def blocks(document: Document) -> Iterator[Block]:
    """Yield the tables of every norm and job, the summary, the facts, the errors and the failures."""
    yield Paragraph(headline(document))
    rounds = format_count(document["protocol"]["rounds"], "interleaved round")
    yield Paragraph(
        f"Medians of up to {rounds}, in microseconds; spread: from quartile to "
        "quartile. Bandwidth: of the bytes that must move, as a share of what torch.add(out=) of that size reaches. "
        "Error: relative L2, against float64 over the same z."
    )
    yield from busy_warning(document)
    cases = by_case(document["rows"], FIELDS)
    tables: dict[str, dict[Case, dict[str, Row]]] = {}
    for case, rows in cases.items():
        tables.setdefault(title(case), {})[case] = rows
    for name, some in tables.items():
        yield from _titled(name, _times(some))
    if document["summary"]:
        yield from _titled("Targets of the times", _targets(document["summary"]))
    if document["facts"]:
        yield from _titled("Facts on every machine", _targets(document["facts"]))
    if document["accuracy"]:
        yield from _titled("All options: relative error against float64", _accuracy(document["accuracy"]))
    for failure in document["failures"]:
        where = (
            f" failed at {failure['rows']} x {failure['d']} {failure['dtype']}, {failure['job']}: {failure['error']}"
        )
        yield Paragraph((failure["variant"], "warning"), where)
    if not document["complete"]:
        planned = document["protocol"]["cells"]
        yield Paragraph(("Interrupted:", "warning"), f" {len(cases)} of {planned} cases were measured.")


def _titled(name: str, table: Table) -> Iterator[Block]:
    yield Paragraph((name, "strong"), space=True)
    yield table


def _times_as_fast(rows: Mapping[str, Row], name: str) -> str:
    return f"{rows[name]['median_us'] / rows['addnorm']['median_us']:.2f}" if name in rows else "-"


def _spread(row: Row) -> str:
    if row["rounds"] < 2:
        return "-"
    return f"{(row['q3_us'] - row['q1_us']) / row['median_us']:.0%}"


PEER = {"x compile": "compile", "x onnx": "onnxruntime"}  # columns of peers that are not always measured
COLUMNS: dict[str, Callable[[Case, Mapping[str, Row]], str]] = {
    "x eager": lambda _, rows: _times_as_fast(rows, "eager"),
    "x compile": lambda _, rows: _times_as_fast(rows, "compile"),
    "x onnx": lambda _, rows: _times_as_fast(rows, "onnxruntime"),
    "rows x d": lambda case, _: f"{case.rows} x {case.d}",
    "dtype": lambda case, _: str(case.dtype),
    "addnorm": lambda _, rows: digits(rows["addnorm"]["median_us"]),
    "spread": lambda _, rows: _spread(rows["addnorm"]),
    "eager": lambda _, rows: digits(rows["eager"]["median_us"]),
    "add(out=)": lambda _, rows: digits(rows["add"]["median_us"]),
    "bandwidth": lambda _, rows: f"{rows['addnorm']['share_of_add_bandwidth']:.0%}",
}


def _times(cases: Mapping[Case, Mapping[str, Row]]) -> Table:
    variants = {variant for rows in cases.values() for variant in rows}
    names = [name for name in COLUMNS if PEER.get(name, "eager") in variants]
    columns = [
        Column(name, "left" if name == "dtype" else "right", style="strong" if name == "x eager" else "")
        for name in names
    ]
    return Table(columns, [[COLUMNS[name](case, rows) for name in names] for case, rows in cases.items()])


MARKS: dict[bool | None, Span] = {True: ("yes", "good"), False: ("no", "bad"), None: ("-", "dim")}


def _targets(rows: Sequence[Row]) -> Table:
    """Return the rows of a summary, or the facts, as a table."""
    extra = {
        name: heading for name, heading in (("versus", ""), ("torch", "PyTorch")) if any(name in row for row in rows)
    }
    columns = [
        Column(heading, "right" if heading else "left") for heading in ("addnorm", *extra.values(), "target", "met")
    ]
    lines: list[list[Span]] = []
    for row in rows:
        value = "-" if row["value"] is None else digits(row["value"])
        more = [digits(row[name]) if name == "torch" else row.get(name, "") for name in extra]
        target = "-" if row["target"] is None else f"{row['compare']} {digits(row['target'], trim=True)}"
        what = row["name"] + (", 1 thread" if row.get("threads") == 1 else "")  # why it has no target
        norm = NORMS[row["norm"]] if row["norm"] else ""
        lines.append([value, *more, target, MARKS[row["met"]], norm, what])
    return Table([*columns, "norm", "what"], lines)


def _accuracy(rows: Sequence[Row]) -> Table:
    # Long names in two lines: the table is as wide as a page.
    columns: list[Column | str] = ["norm", "dtype", *(Column(name.replace("_", "_\n"), "right") for name in ERRORS)]
    lines = []
    for row in rows:
        ours = row["variant"] == "addnorm"
        head = [NORMS[row["norm"]], row["dtype"]] if ours else ["", "PyTorch"]
        lines.append(TableRow([*head, *(format_number(row.get(name), 2) for name in ERRORS)], "" if ours else "dim"))
    return Table(columns, lines)


@contextmanager
def printed_progress(screen: Console | None) -> Iterator[Progress]:
    """Yield a function that shows how far a run is: in place on a terminal, a line each elsewhere, nothing without a console."""
    if screen is None:
        yield lambda text: None
    elif screen.is_terminal:
        with screen.status("") as status:
            yield status.update
    else:

        def line(text: str) -> None:
            screen.print(text, soft_wrap=True)

        yield line
