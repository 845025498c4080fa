"""Results as text: tables, ratios, targets, and the headline with the environment of a document.

A line of a table is a dict of texts by column. `table` makes a `Table` of a list of lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from addnorm._util.blocks import Column, Span, Style, Table, split_span
from addnorm._util.numbers import format_number, format_percent
from addnorm._util.render import to_markdown
from addnorm.bench.case import Case, Document, Row, Rows
from addnorm.bench.environment import MAX_OTHERS
from addnorm.bench.jobs import NORMS

Line = Mapping[str, Span]
MARKS: dict[bool | None, tuple[str, Style]] = {True: ("yes", "good"), False: ("no", "bad"), None: ("-", "dim")}
NUMBER = re.compile(r"[*<>=~]*\s?[-+−±]?\d")


def table(lines: Iterable[Line]) -> Table:
    """Return lines as a table with a column for each key that has a text, in the order of their first use.

    Numbers are aligned on the right.
    """
    lines = [*lines]
    keys = dict.fromkeys(name for line in lines for name in line)
    columns = []
    for name in (name for name in keys if any(line.get(name) for line in lines)):
        texts = [text for line in lines if (text := split_span(line.get(name, ""))[0]) not in ("", "-")]
        is_numeric = 2 * len([*filter(NUMBER.match, texts)]) > len(texts)
        columns.append(Column(name, "right" if is_numeric else "left", fold=not is_numeric))
    return Table(columns, [[line.get(column.header, "") for column in columns] for line in lines])


def markdown(lines: Iterable[Line]) -> str:
    """Return lines as a Markdown table, or an empty text without lines.

    Example:
        >>> from addnorm.bench.pages import markdown
        >>> print(markdown([{"norm": "layer", "µs": "1.5"}, {"norm": "rms", "µs": "0.5"}]))
        | norm | µs |
        | :-- | --: |
        | layer | 1.5 |
        | rms | 0.5 |
    """
    lines = [*lines]
    return to_markdown(table(lines)) if lines else ""


def merge(parts: Iterable[tuple[Line, Line]]) -> list[Line]:
    """Return table lines from pairs of a line's head and some of its cells. Pairs with equal heads share a line."""
    lines: dict[tuple[Span, ...], dict[str, Span]] = {}
    for head, cells in parts:
        if cells:
            lines.setdefault((*head.values(),), {**head}).update(cells)
    return [*lines.values()]


def size_columns(case: Case) -> Line:
    """Return the columns of a case's size and dtype."""
    return {"rows x d": f"{case.rows} x {case.d}", "dtype": case.dtype}


# -------------------------------------------------------------------------------------------------------------- numbers


def digits(value: float | None, *, trim: bool = False) -> str:
    """Return a number with three significant digits and thousands separators."""
    return format_number(value, 3, trim=trim, grouped=True)


def quotient(rows: Rows, above: str, below: str = "addnorm", *, times: bool = False) -> str:
    """Return the time of variant `above` divided by that of `below` as text, with half the distance between its quartiles.

    Args:
        rows: result rows by variant. If one of the two variants is missing, the text is empty.
        above: variant in the numerator.
        below: variant in the denominator.
        times: add both medians, that of `below` first.
    """
    if not {above, below} <= {*rows}:
        return ""
    over, under = rows[above], rows[below]
    ratio = over["median_us"] / under["median_us"]
    spread = (over["q3_us"] / under["q1_us"] - over["q1_us"] / under["q3_us"]) / 2
    text = f"**{ratio:.2f}** ±{format_percent(spread / ratio, 1)}"
    return f"{text} ({digits(under['median_us'])} / {digits(over['median_us'])})" if times else text


def interval(row: Row, *, inverse: bool = False) -> str:
    """Return `paired_ratio` of a result row, or its inverse, and its 95% interval as text (see `timing.measure`)."""
    ratio, low, high = row["paired_ratio"], row["paired_low"], row["paired_high"]
    if inverse:
        ratio, low, high = 1 / ratio, 1 / high, 1 / low
    return f"**{format_number(ratio, 3)}** ({format_number(low, 3)} to {format_number(high, 3)})"


# -------------------------------------------------------------------------------------------------------------- targets


def bound(row: Row) -> str:
    """Return the target in a summary row as text, as in ">= 0.95"."""
    return "" if row["target"] is None else f"{row['compare']} {digits(row['target'], trim=True)}"


def target_lines(rows: Iterable[Row]) -> Iterator[Line]:
    """Yield a line for each number of a summary, or for each fact: beside PyTorch's number, its target, and whether it is met.

    If a target is missed, the line also has the number of cases that meet it: "no, 2 of 3".
    """
    for row in rows:
        met, style = MARKS[row["met"]]
        counts = f", {row['cells_met']} of {row['cells']}" if met == "no" and "cells_met" in row else ""
        yield {
            "measured": row["name"] + (", 1 thread" if row.get("threads") == 1 else ""),  # why it has no target
            "norm": NORMS[row["norm"]] if row.get("norm") else "", "": row.get("versus", ""),
            "value": digits(row["value"]) or "not measured", "PyTorch": digits(row.get("torch")),
            "target": bound(row) or "-", "met": (met + counts, style),
        }  # fmt: skip


def targets_section(document: Document) -> str:
    """Return the summary's numbers as a Markdown table, including those without a target, followed by the headline."""
    return f"{markdown(target_lines(document['summary']))}\n\n{headline(document)}."


# ------------------------------------------------------------------------------------------------------------- documents


def headline(document: Document) -> str:
    """Return a text with the CPU, the versions, the commit, the date and the load of a document."""
    versions, commit = document["versions"], document["commit"]
    kernels, n = document["isa"] or "no C++ kernels", document.get("threads")
    threads = f", {n} thread{'s'[: n > 1]}" if n else ""
    source = f", commit {commit[:10]}{' with changes' * bool(document['dirty'])}" if commit else ""
    uncertain = ": the machine was busy, so the times are uncertain" if busy(document) else ""
    after, others = document.get("load_after"), document.get("load_of_others")
    load = f"load {document['load']:.1f} before it began" + (f", {after:.1f} after" if after is not None else "")
    load += f", {others:.1f} of it by others" if others is not None else ""
    return (
        f"{document['machine']['cpu']}, {kernels}{threads}; torch {versions['torch']}, Python {versions['python']}, "
        f"addnorm {versions['addnorm']}{source}; {document['date'][:10]}; {load}{uncertain}"
    )


def busy(document: Document) -> str:
    """Return a warning if the machine was busy, else an empty text. Threads on one core wait for whole time slices."""
    reason = find_load(document, document["machine"]["cores"] / 2)
    return f"The machine was busy: {reason}. Do not trust the times." if reason else ""


def find_load(document: Document, most: float) -> str | None:
    """Return why the machine was busy, or None: a load above `most` before the run, or cores used by others."""
    others = document.get("load_of_others")
    if document["load"] > most:
        return f"the load was {document['load']:.1f} before the run, expected at most {most:g}"
    if others is not None and others > MAX_OTHERS:
        return f"other processes used {others:.1f} cores during the run, expected at most {MAX_OTHERS}"
    return None


def unfinished(document: Document) -> str:
    """Return how many cases were measured, or empty text if all were."""
    if not document.get("left"):
        return ""
    done = len(document["cells"])
    ended = "the time budget was used up" if document["ended"] == "budget" else document["ended"]
    return f"{done} of {done + len(document['left'])} cases were measured ({ended})."
