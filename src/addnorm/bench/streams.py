"""What it costs to look: inspect, record and decompose MiniLM, a real model of six post-LN layers, on real text.

Recording is timed against the same forward and backward of the same model without a recorder, each with weights of its own,
round by round. Inspecting and decomposing are whole calls, in seconds, with how well they close.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from addnorm import decompose, inspect, record
from addnorm.bench import machine
from addnorm.bench.summary import claim
from addnorm.bench.timing import CELL_SECONDS, FEWEST_ROUNDS, ROUNDS, Row, interleaved, settle_allocator, spread
from addnorm.stream.models.load import load

__all__ = ["Cell", "cells", "measure", "run", "summarize"]

SCHEMA = 1
MODEL = "minilm"
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


def passages(cell: Cell) -> list[str]:
    """Of Python's own documentation, each long enough to fill its tokens."""
    words = " ".join(topics.values()).split()
    length = 2 * cell.tokens
    return [" ".join(words[k * length : (k + 1) * length]) for k in range(cell.batch)]


def variants(cell: Cell) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """A model for each, with weights of its own; and what it is called with."""
    loaded = load(MODEL, texts=passages(cell), tokens=cell.tokens)
    shape = tuple(loaded.kwargs["input_ids"].shape)
    if shape != (cell.batch, cell.tokens):
        raise ValueError(f"the text gave {shape}, expected {(cell.batch, cell.tokens)}: longer passages.")
    return {name: copy.deepcopy(loaded.model) for name in VARIANTS}, dict(loaded.kwargs)


def measure(cell: Cell, *, rounds: int = ROUNDS) -> list[Row]:
    """A row for each variant: one forward and backward."""
    models, kwargs = variants(cell)
    probe = torch.randn(next(models["plain"].parameters()).shape[-1], generator=torch.Generator().manual_seed(0))

    def step(model: nn.Module) -> Callable[[], Tensor]:
        def run() -> Tensor:
            model.zero_grad(set_to_none=True)
            loss: Tensor = (model(**kwargs).last_hidden_state @ probe).square().mean()
            loss.backward()
            return loss

        return run

    with ExitStack() as stack:
        stack.enter_context(record(models["recorded"]))
        stack.enter_context(record(models["without gradients"], grads=False))
        times = interleaved({name: step(model) for name, model in models.items()}, [], rounds)
    return [
        {**cell._asdict(), "variant": name, **spread(samples), "repeats": repeats}
        for name, (samples, repeats) in times.items()
    ]


def calls(cell: Cell) -> list[Row]:
    """Seconds of whole calls, and the closures they report."""
    loaded = load(MODEL, texts=passages(cell), tokens=cell.tokens)
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


def run(
    chosen: Sequence[Cell] | None = None, *, rounds: int = ROUNDS, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Measures the cells (None: all) and returns the document; an interrupt ends it early, `complete` is then False."""
    chosen = cells() if chosen is None else list(chosen)
    before, rows, called, complete, start = torch.get_num_threads(), [], [], False, time.monotonic()
    load_before = machine.load()
    settle_allocator()
    try:
        for i, cell in enumerate(chosen, 1):
            if progress is not None:
                progress(f"{i:3}/{len(chosen)}  {time.monotonic() - start:5.0f} s  {cell.batch} x {cell.tokens} tokens")
            torch.set_num_threads(cell.threads)
            rows += measure(cell, rounds=rounds)
            called += calls(cell)
        complete = True
    except KeyboardInterrupt:
        pass
    finally:
        torch.set_num_threads(before)
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "complete": complete,
        **machine.environment(),
        "threads": max((cell.threads for cell in chosen), default=before),
        "load": load_before,
        "protocol": {
            "rounds": rounds, "fewest_rounds": FEWEST_ROUNDS, "cell_seconds": CELL_SECONDS, "model": MODEL, "calls": CALLS,
            "text": "pydoc_data.topics", "dtype": "float32", "mode": "evaluation",
        },
        "summary": summarize(rows, called),
        "calls": called,
        "rows": rows,  # last: `bench.dumps` gives each a line
    }  # fmt: skip
