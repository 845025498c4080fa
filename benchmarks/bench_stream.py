"""Cost of inspecting, recording and decomposing a real model (MiniLM). Writes results/stream.json.

Recording is timed against the same forward and backward of the same model without a recorder; each variant has its own weights.
`inspect` and `decompose` are whole calls. README.md in this folder has the protocol.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial
from typing import Any

import models

from addnorm import decompose, inspect, record
from addnorm.bench import timing
from addnorm.bench.case import Case, Document, Results, Target, grid, ratio
from addnorm.bench.harness import Benchmark, main
from addnorm.bench.pages import headline, markdown, quotient

RECORDED: dict[str, Any] = {"recorded": {}, "without gradients": {"grads": False}}  # options of record
WHOLE: dict[str, Any] = {"inspect": inspect, "decompose": decompose}


def measure(case: Case, *, rounds: int) -> Results:
    """Return the times of a forward and backward, plain and recorded, and those of the whole calls."""
    loaded = models.load_minilm(case)
    plain, *recorded = (copy.deepcopy(loaded.model) for _ in ("plain", *RECORDED))
    calls: dict[str, Any] = {"plain": models.training_step(plain, loaded.kwargs)}
    with ExitStack() as stack:
        for (name, options), model in zip(RECORDED.items(), recorded, strict=True):
            stack.enter_context(record(model, **options))
            calls[name] = models.training_step(model, loaded.kwargs)
        for name, call in WHOLE.items():
            calls[name] = partial(call, loaded.model, *loaded.args, **loaded.kwargs)
        return {"rows": timing.measure(case, calls, rounds)}


TARGETS = [
    Target("recording, {}: times the plain step", "<=", 1.9, ratio("plain", "recorded"), None,
           why="the statistics read the stream, each write and each gradient once more"),
    Target("inspect, {}: seconds", "<=", 3.0, lambda rows: rows["inspect"]["median_us"] / 1e6, None,
           why="a person waits for it"),
]  # fmt: skip


def section(document: Document) -> str:
    """Return the table of costs: a line a size."""
    table = markdown(
        {
            "batch x tokens": f"{case.batch} x {case.tokens}", "plain step, ms": f"{rows['plain']['median_us'] / 1000:.0f}",
            **{name: quotient(rows, name, "plain") for name in RECORDED},
            **{f"{name}, s": f"{rows[name]['median_us'] / 1e6:.2f}" for name in WHOLE},
        }
        for case, rows in BENCHMARK.by_case(document)
    )  # fmt: skip
    return (
        f"MiniLM on Python's own documentation; a step is a forward and a backward:\n\n{table}\n\n{headline(document)}."
    )


BENCHMARK = Benchmark(
    "stream", grid(tokens=(32, 128), batch=(1, 8)), measure,
    lambda case: f"{case.batch} x {case.tokens} tokens", TARGETS,
    protocol={"model": models.MINILM, "text": models.TEXT, "dtype": "float32", "mode": "evaluation"},
    sections={"docs/streams.md#streams": section},
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
