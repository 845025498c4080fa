"""What the benchmarks of whole models share: a cell after the other, and the document around what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from addnorm.bench import machine
from addnorm.bench.timing import CELL_SECONDS, FEWEST_ROUNDS, Row, settle_allocator

__all__ = ["Document", "Found", "Progress", "by_cell", "document"]

Document = dict[str, Any]
Found = dict[str, list[Row]]
Progress = Callable[[str], None]


class Cell(Protocol):
    """One line of a matrix: a NamedTuple of what is measured."""

    @property
    def threads(self) -> int:
        """Of torch."""


C = TypeVar("C", bound=Cell)
T = TypeVar("T", bound=NamedTuple)


def document(
    chosen: Sequence[C], measure: Callable[[C], Found], summarize: Callable[[Found], list[Row]], *,
    parts: Sequence[str], protocol: Row, schema: int, title: Callable[[C], str], progress: Progress | None,
) -> Document:  # fmt: skip
    """Measures the cells and returns the document; an interrupt ends it early, `complete` is then False.

    Args:
        chosen: the cells.
        measure: the lists of one cell, a part each.
        summarize: what follows from those of all cells.
        parts: their names, "rows" the last: `bench.dumps` gives each row a line.
        protocol: how it was measured, besides what is so for all; "rounds" is needed.
        schema: of the document.
        title: of a cell, for the progress.
        progress: is told each cell before it is measured.
    """
    before, complete, start = torch.get_num_threads(), False, time.monotonic()
    found: Found = {part: [] for part in parts}
    load = machine.load()
    settle_allocator()
    try:
        for i, cell in enumerate(chosen, 1):
            if progress is not None:
                progress(f"{i:3}/{len(chosen)}  {time.monotonic() - start:5.0f} s  {title(cell)}")
            torch.set_num_threads(cell.threads)
            for part, rows in measure(cell).items():
                found[part] += rows
        complete = True
    except KeyboardInterrupt:
        pass
    finally:
        torch.set_num_threads(before)
    return {
        "schema": schema,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "complete": complete,
        **machine.environment(),
        "threads": max((cell.threads for cell in chosen), default=before),
        "load": load,
        "protocol": {
            "rounds": protocol["rounds"], "fewest_rounds": FEWEST_ROUNDS, "cell_seconds": CELL_SECONDS, **protocol,
        },
        "summary": summarize(found),
        **found,
    }  # fmt: skip


def by_cell(rows: Iterable[Row], kind: type[T]) -> dict[T, dict[str, Row]]:
    """The rows of a document: cell -> variant -> row."""
    found: dict[T, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(kind._make(row[name] for name in kind._fields), {})[row["variant"]] = row
    return found
