"""The document of the operation's benchmark in a terminal: the ratio first, then the times. Fits 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from addnorm._util.blocks import Block, Paragraph, Span
from addnorm._util.numbers import format_count, format_number
from addnorm._util.render import WIDTH, make_console, print_blocks, to_text
from addnorm.bench.case import Case, Document, Progress, Row, Rows, by_case
from addnorm.bench.exactness import COLUMNS as ERRORS
from addnorm.bench.jobs import FIELDS, JOBS, NORMS
from addnorm.bench.pages import Line, bound, busy, digits, headline, table, unfinished

if TYPE_CHECKING:
    from rich.console import Console


PEERS = {"x eager": "eager", "x compile": "compile", "x onnx": "onnxruntime"}
MARKS: dict[bool | None, Span] = {True: ("yes", "good"), False: ("no", "bad"), None: ("-", "dim")}


def console(*, stderr: bool = False) -> Console:
    """Return a console that is 100 columns wide where the output is not a terminal."""
    return make_console(stderr=stderr, width=WIDTH)


def show(document: Document, screen: Console) -> None:
    """Print a document."""
    print_blocks(screen, *blocks(document))


def text(document: Document) -> str:
    """Return a document as plain text."""
    return to_text(blocks(document))


def warn_if_busy(document: Document, screen: Console) -> None:
    """Print a warning if other processes used the cores."""
    print_blocks(screen, *_warning(document))


def _warning(document: Document) -> Iterator[Paragraph]:
    if warning := busy(document):
        words = "The machine was busy"
        yield Paragraph((words, "warning"), warning.removeprefix(words))


def blocks(document: Document) -> Iterator[Block]:
    """Yield the tables of every norm and job, the summary, the facts, the errors and the failures."""
    yield Paragraph(headline(document))
    rounds = format_count(document["protocol"]["rounds"], "interleaved round")
    yield Paragraph(
        f"Medians of up to {rounds}, in microseconds; spread: from quartile to "
        "quartile. Bandwidth: of the bytes that must move, as a share of what torch.add(out=) of that size reaches. "
        "Error: relative L2, against float64 over the same z."
    )
    yield from _warning(document)
    tables: dict[str, list[Line]] = {}
    for case, rows in by_case(document["rows"], FIELDS).items():
        threads = format_count(case.threads, "thread")
        name = f"{NORMS[case.norm]}: {JOBS[case.job].title}, {threads}"
        tables.setdefault(name, []).append(_times(case, rows))
    tables["Targets of the times"] = [*_targets(document["summary"])]
    tables["Facts on every machine"] = [*_targets(document["facts"])]
    tables["All options: relative error against float64"] = [*_errors(document["accuracy"])]
    for name, lines in tables.items():
        if lines:
            yield Paragraph((name, "strong"), space=True)
            yield table(lines)
    for failure in document["failures"]:
        size = f"{failure['rows']} x {failure['d']} {failure['dtype']}, {failure['job']}"
        yield Paragraph((failure["variant"], "warning"), f" failed at {size}: {failure['error']}")
    if not document["complete"]:
        yield Paragraph(("Interrupted:", "warning"), f" {unfinished(document)}")


def _times(case: Case, rows: Rows) -> Line:
    ours = rows["addnorm"]
    ratios = {name: rows[peer]["median_us"] / ours["median_us"] for name, peer in PEERS.items() if peer in rows}
    width = f"{(ours['q3_us'] - ours['q1_us']) / ours['median_us']:.0%}" if ours["rounds"] > 1 else "-"
    return {
        **{name: (f"{value:.2f}", "strong" if name == "x eager" else "") for name, value in ratios.items()},
        "rows x d": f"{case.rows} x {case.d}", "dtype": case.dtype, "addnorm": digits(ours["median_us"]), "spread": width,
        "eager": digits(rows["eager"]["median_us"]), "add(out=)": digits(rows["add"]["median_us"]),
        "bandwidth": f"{ours['share_of_add_bandwidth']:.0%}",
    }  # fmt: skip


def _targets(rows: Iterable[Row]) -> Iterator[Line]:
    """Yield a line for each number of a summary, or for each fact."""
    for row in rows:
        yield {
            "addnorm": "-" if row["value"] is None else digits(row["value"]), **({"": row["versus"]} if "versus" in row else {}),
            **({"PyTorch": digits(row["torch"])} if "torch" in row else {}), "target": bound(row) or "-",
            "met": MARKS[row["met"]], "norm": NORMS[row["norm"]] if row["norm"] else "",
            "what": row["name"] + (", 1 thread" if row.get("threads") == 1 else ""),  # why it has no target
        }  # fmt: skip


def _errors(rows: Iterable[Row]) -> Iterator[Line]:
    for row in rows:
        ours = row["variant"] == "addnorm"
        head = {"norm": NORMS[row["norm"]], "dtype": row["dtype"]} if ours else {"norm": "", "dtype": "PyTorch"}
        numbers = {name.replace("_", "_\n"): format_number(row.get(name), 2) for name in ERRORS}
        yield {name: cell if ours else (cell, "dim") for name, cell in (head | numbers).items()}


@contextmanager
def printed_progress(screen: Console | None) -> Iterator[Progress]:
    """Yield a function that shows a line of progress: in place on a terminal, else one below the other; None shows nothing."""
    if screen is None:
        yield lambda line: None
    elif screen.is_terminal:
        with screen.status("") as status:
            yield status.update
    else:
        yield lambda line: screen.print(line, soft_wrap=True)
