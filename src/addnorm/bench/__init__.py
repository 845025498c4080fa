"""The operation against its peers, on this machine: what `addnorm bench` and benchmarks/ run.

`run` gives one JSON document: the machine, the protocol, a row a variant and cell, the summary computed from the rows
(each number next to its target), what is so on every machine. `write` puts it in a file whole or not at all, `show`
prints it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from addnorm.bench import accuracy, facts, machine, onnx_peer
from addnorm.bench.jobs import DTYPES, JOBS, NORMS, PLAIN, SHAPES, Cell, matrix, whole
from addnorm.bench.summary import claim, summarize
from addnorm.bench.tables import console, show, title, warn_if_busy
from addnorm.bench.timing import (
    CELL_SECONDS,
    FEWEST_ROUNDS,
    ROUNDS,
    SEGMENT_MS,
    Row,
    measure,
    settle_allocator,
)

if TYPE_CHECKING:  # rich is imported where something is drawn: bench_gpu.py runs where there is torch and nothing else
    from rich.console import Console

__all__ = [
    "DTYPES", "JOBS", "NORMS", "PLAIN", "QUICK_ROUNDS", "QUICK_SHAPES", "ROUNDS", "SHAPES", "Cell", "Document",
    "console", "dumps", "failed_proofs", "matrix", "measure", "read", "run", "settle_allocator", "show", "warn_if_busy",
    "whole", "write",
]  # fmt: skip

SCHEMA = 2
Document = dict[str, Any]

# `addnorm bench --quick`: does it work, and roughly how fast?
QUICK_SHAPES = ((1, 768), (128, 768), (512, 768))
QUICK_ROUNDS = 5


def run(
    cells: Sequence[Cell] | None = None,
    *,
    rounds: int = ROUNDS,
    compiled: bool = True,
    proofs: bool = True,
    progress: Console | None = None,
) -> Document:
    """Measures the cells (None: `whole`) and returns the document.

    An interrupt ends it early: the document then has the cells that were finished, and `complete` is False.

    Args:
        cells: from `matrix`.
        rounds: how often each variant of a cell is timed, at most: less often where a call takes long.
        compiled: also time torch.compile of the eager expression, with as many threads as the cells have at most.
        proofs: also measure `facts.facts`, `accuracy.table` and the time of the import.
        progress: where to show how far it is; None is nowhere.
    """
    cells = whole() if cells is None else list(cells)
    before = torch.get_num_threads()
    threads = max((cell.threads for cell in cells), default=before)
    rows: list[Row] = []
    failures: list[Row] = []
    found: dict[str, list[Row]] = {"facts": [], "accuracy": [], "import": []}
    complete, load = False, machine.load()
    settle_allocator()
    torch.set_num_threads(threads)
    try:
        if proofs:
            with progress.status("Errors, memory, import") if progress else nullcontext():
                found = _proofs(cells)
        with _progress(cells, rounds, compiled, progress) as advance:
            for cell in cells:
                advance(cell)
                torch.set_num_threads(cell.threads)
                measured, failed = measure(cell, rounds=rounds, compiled=compiled and cell.threads == threads)
                rows += measured
                failures += failed
        complete = True
    except KeyboardInterrupt:
        pass
    finally:
        torch.set_num_threads(before)
    where = machine.environment()
    protocol = {
        "rounds": rounds, "fewest_rounds": FEWEST_ROUNDS, "cell_seconds": CELL_SECONDS, "segment_ms": SEGMENT_MS,
        "compiled": compiled, "cells": len(cells),
    }  # fmt: skip
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "complete": complete,
        **where,
        "peers": {"onnxruntime": onnx_peer.status()},
        "threads": threads,
        "load": load,
        "protocol": protocol,
        "summary": summarize(rows, machine.last_level_cache(where["machine"]["caches"])) + found["import"],
        "facts": found["facts"],
        "accuracy": found["accuracy"],
        "failures": failures,
        "rows": rows,
    }


def _proofs(cells: Sequence[Cell]) -> dict[str, list[Row]]:
    """What is measured besides the cells, for the norms and dtypes that they have."""
    norms = tuple(norm for norm in NORMS if any(cell.norm == norm for cell in cells))
    dtypes = tuple(dtype for dtype in DTYPES if any(cell.dtype == dtype for cell in cells))
    errors = accuracy.table(norms, tuple(accuracy.DTYPES) if dtypes == tuple(DTYPES) else dtypes)
    return {
        "facts": facts.facts(norms, dtypes) + facts.of_accuracy(errors),
        "accuracy": errors,
        "import": [claim("import addnorm after torch: milliseconds", None, facts.import_ms(), "<", 60)],
    }


def failed_proofs(document: Document) -> list[Row]:
    """The facts that are not as they must be. Times are no proof: they depend on the machine."""
    return [fact for fact in document["facts"] if not fact["met"]]


def dumps(document: Document) -> str:
    """The document as JSON: one line a row of times, so that two documents can be compared line by line."""
    rows = ",\n".join(json.dumps(row) for row in document["rows"])
    head = json.dumps({**document, "rows": []}, indent=1)
    return head.removesuffix("[]\n}") + f"[\n{rows}\n]}}\n"


def write(document: Document, path: Path) -> Path:
    """Writes the document whole, or nothing, and returns where: what was cut short never replaces what was complete."""
    if not document["complete"]:
        path = path.with_suffix(f".partial{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(dumps(document), encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read(path: Path) -> Document:
    """A document that was written. Schema 1 had one number of threads, and no accuracy."""
    document: Document = json.loads(path.read_text(encoding="utf-8"))
    if document["schema"] == 1:
        threads = {"threads": document["threads"]}
        document |= {name: [{**threads, **one} for one in document[name]] for name in ("summary", "failures", "rows")}
        document |= {"accuracy": [], "peers": {}}
    return document


def _cost(cell: Cell, rounds: int, compiled: bool) -> float:
    """Seconds a cell will take, roughly: only so that the time left is told better than by counting cells."""
    job = JOBS[cell.job]
    drops = cell.rows * cell.d * 30e-9 if cell.job in ("dropout", "everything") else 0.0  # eager's random numbers
    once = 2 * (3 + compiled) * max(SEGMENT_MS / 1e3, job.tensors * cell.output_bytes / 4e9) + 2 * drops
    return (4.0 if compiled and job.compiled else 0.2) + min(rounds * once, max(CELL_SECONDS, FEWEST_ROUNDS * once))


@contextmanager
def _progress(
    cells: Sequence[Cell], rounds: int, compiled: bool, console: Console | None
) -> Iterator[Callable[[Cell], None]]:
    """A function to call before each cell: a bar on a terminal, a line a cell elsewhere."""
    if console is None:
        yield lambda cell: None
        return
    costs = {cell: _cost(cell, rounds, compiled) for cell in cells}
    names = {cell: f"{title(cell)}, {cell.rows} x {cell.d} {cell.dtype}" for cell in cells}
    if not console.is_terminal:
        total, done, start = len(cells), 0, time.monotonic()

        def line(cell: Cell) -> None:
            nonlocal done
            done += 1
            console.print(f"{done:3}/{total}  {time.monotonic() - start:5.0f} s  {names[cell]}", soft_wrap=True)

        yield line
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    count, name = TextColumn("{task.fields[count]}"), TextColumn("{task.description}")
    with Progress(count, BarColumn(20), TimeRemainingColumn(), name, console=console, transient=True) as bar:
        task, spent, begun = bar.add_task("", total=sum(costs.values()), count=""), 0.0, 0

        def advance(cell: Cell) -> None:
            nonlocal spent, begun
            begun += 1
            bar.update(task, completed=spent, description=names[cell], count=f"{begun}/{len(cells)}")
            spent += costs[cell]

        yield advance
