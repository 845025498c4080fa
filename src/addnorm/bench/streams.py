"""What it costs to look: inspect, record and decompose MiniLM, a real model of six post-LN layers, on real text.

Recording is timed against the same forward and backward of the same model without a recorder, each with weights of its own,
round by round. Inspecting and decomposing are whole calls, in seconds, with how well they close.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from addnorm import decompose, inspect, record
from addnorm.bench import minilm
from addnorm.bench.frame import Document, Progress, document
from addnorm.bench.summary import claim
from addnorm.bench.timing import ROUNDS, Row, interleaved, spread

__all__ = ["Cell", "cells", "measure", "run", "summarize"]

SCHEMA = 1
SIZES = ((1, 32), (8, 32), (1, 128), (8, 128))  # batch, tokens
VARIANTS = ("plain", "recorded", "without gradients")
MOST_TIMES, MOST_SECONDS, CLOSURE = 1.9, 3.0, 1e-5
CALLS = 5  # of inspect and decompose


class Cell(NamedTuple):
    """A batch of real text."""

    batch: int
    tokens: int
    threads: int


def cells(*, threads: int | None = None) -> list[Cell]:
    """The matrix; threads None is what torch has."""
    return [Cell(batch, tokens, threads or torch.get_num_threads()) for batch, tokens in SIZES]


def variants(cell: Cell) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """A model for each, with weights of its own; and what it is called with."""
    loaded = minilm.loaded(cell)
    return {name: copy.deepcopy(loaded.model) for name in VARIANTS}, dict(loaded.kwargs)


def measure(cell: Cell, *, rounds: int = ROUNDS) -> list[Row]:
    """A row for each variant: one forward and backward."""
    models, kwargs = variants(cell)
    with ExitStack() as stack:
        stack.enter_context(record(models["recorded"]))
        stack.enter_context(record(models["without gradients"], grads=False))
        times = interleaved({name: minilm.step(model, kwargs) for name, model in models.items()}, [], rounds)
    return [
        {**cell._asdict(), "variant": name, **spread(samples), "repeats": repeats}
        for name, (samples, repeats) in times.items()
    ]


def calls(cell: Cell) -> list[Row]:
    """Seconds of whole calls, and the closures they report."""
    loaded = minilm.loaded(cell)
    rows = []
    for name, call in (("inspect", inspect), ("decompose", decompose)):
        seconds, found = [], None
        for _ in range(CALLS):
            start = time.perf_counter()
            found = call(loaded.model, *loaded.args, **loaded.kwargs)
            seconds.append(time.perf_counter() - start)
        assert found is not None
        rows.append({"call": name, "batch": cell.batch, "tokens": cell.tokens, "median_s": statistics.median(seconds),
                     "most_s": max(seconds), "closure": found.closure})  # fmt: skip
    return rows


def ratio(rows: Sequence[Row], cell: Cell, variant: str) -> float:
    """The time of a variant over that of the plain step."""
    found = {
        row["variant"]: row["median_us"] for row in rows if (row["batch"], row["tokens"]) == (cell.batch, cell.tokens)
    }
    return float(found[variant] / found["plain"])


def summarize(rows: Sequence[Row], called: Sequence[Row]) -> list[Row]:
    """Each next to its target."""
    measured = [
        Cell(batch, tokens, 0) for batch, tokens in dict.fromkeys((row["batch"], row["tokens"]) for row in rows)
    ]
    summary = [
        claim(
            f"recording, {c.batch} x {c.tokens} tokens: times the plain step",
            None, ratio(rows, c, "recorded"), "<=", MOST_TIMES,
        )
        for c in measured
    ]  # fmt: skip
    for row in called:
        size = f"{row['batch']} x {row['tokens']} tokens"
        target = MOST_SECONDS if row["call"] == "inspect" else None
        summary.append(
            claim(f"{row['call']}, {size}: seconds, the slowest of {CALLS}", None, row["most_s"], "<=", target)
        )
        summary.append(claim(f"{row['call']}, {size}: closure", None, row["closure"], "<=", CLOSURE))
    return summary


def run(chosen: Sequence[Cell] | None = None, *, rounds: int = ROUNDS, progress: Progress | None = None) -> Document:
    """Measures the cells (None: all) and returns the document; an interrupt ends it early, `complete` is then False."""
    return document(
        cells() if chosen is None else chosen,
        lambda cell: {"rows": measure(cell, rounds=rounds), "calls": calls(cell)},
        lambda found: summarize(found["rows"], found["calls"]),
        parts=("calls", "rows"),
        protocol={
            "rounds": rounds, "model": minilm.MODEL, "calls": CALLS, "text": minilm.TEXT, "dtype": "float32",
            "mode": "evaluation",
        },
        schema=SCHEMA,
        title=lambda cell: f"{cell.batch} x {cell.tokens} tokens",
        progress=progress,
    )  # fmt: skip
