"""Cost of inspecting, recording and decomposing a real model (MiniLM). Writes results/stream.json.

Recording is timed against the same forward and backward of the same model without a recorder; each variant has its own weights.
`inspect` and `decompose` are whole calls, in seconds, with their closures. README.md in this folder has the protocol.
"""

from __future__ import annotations

import copy
import statistics
import time
from contextlib import ExitStack

import harness
import minilm
from harness import Case, Document, Results, Row, by_case, headline, markdown, quotient, right

from addnorm import decompose, inspect, record
from addnorm.bench.targets import Target, ratio
from addnorm.bench.timing import interleaved

FIELDS = ("batch", "tokens", "threads")
SIZES = ((1, 32), (8, 32), (1, 128), (8, 128))  # batch, tokens
RECORDED = ("recorded", "without gradients")
MOST_TIMES, MOST_SECONDS, CLOSURE = 1.9, 3.0, 1e-5
CALLS = 5  # of inspect and of decompose


def cases(threads: int) -> list[Case]:
    """Return batches of real text."""
    return [Case(batch=batch, tokens=tokens, threads=threads) for batch, tokens in SIZES]


def measure(case: Case, *, rounds: int) -> Results:
    """Return the times of a forward and backward, plain and recorded, and those of the whole calls."""
    loaded = minilm.load_model(case)
    models = {name: copy.deepcopy(loaded.model) for name in ("plain", *RECORDED)}
    with ExitStack() as stack:
        stack.enter_context(record(models["recorded"]))
        stack.enter_context(record(models["without gradients"], grads=False))
        steps = {name: minilm.training_step(model, loaded.kwargs) for name, model in models.items()}
        times = interleaved(steps, [], rounds)
    calls = []
    for name, call in (("inspect", inspect), ("decompose", decompose)):
        seconds, closure = [], 0.0
        for _ in range(CALLS):
            start = time.perf_counter()
            closure = call(loaded.model, *loaded.args, **loaded.kwargs).closure
            seconds.append(time.perf_counter() - start)
        calls.append({"call": name, "batch": case.batch, "tokens": case.tokens, "median_s": statistics.median(seconds),
                      "most_s": max(seconds), "closure": closure})  # fmt: skip
    return {"calls": calls, "rows": [case.row(variant=name, **row) for name, row in times.items()]}


def summarize(results: Results) -> list[Row]:
    """Return each number beside its target."""
    summary = []
    for case, rows in by_case(results["rows"], FIELDS).items():
        target = Target(f"recording, {size(case)}: times the plain step", "<=", MOST_TIMES)
        summary.append(target.row(ratio("plain", "recorded")(rows)))
    for row in results["calls"]:
        what = f"{row['call']}, {size(Case(**row))}"
        seconds = Target(
            f"{what}: seconds, the slowest of {CALLS}", "<=", MOST_SECONDS if row["call"] == "inspect" else None
        )
        summary += [seconds.row(row["most_s"]), Target(f"{what}: closure", "<=", CLOSURE).row(row["closure"])]
    return summary


def size(case: Case) -> str:
    """Return the size of a batch in words."""
    return f"{case.batch} x {case.tokens} tokens"


BENCHMARK = harness.Benchmark(
    "stream", "Inspecting, recording and decomposing MiniLM", FIELDS, cases, measure, summarize, size, ("calls", "rows"),
    protocol={"model": minilm.MODEL, "calls": CALLS, "text": minilm.TEXT, "dtype": "float32", "mode": "evaluation"},
)  # fmt: skip


def section(document: Document) -> str:
    """Return the table of costs: a line a size."""
    lines = []
    for case, rows in by_case(document["rows"], FIELDS).items():
        calls = {
            row["call"]: row for row in document["calls"] if (row["batch"], row["tokens"]) == (case.batch, case.tokens)
        }
        ratios = [f"{quotient(rows, name, 'plain')}" for name in RECORDED]
        seconds = [f"{calls[name]['median_s']:.2f}" for name in ("inspect", "decompose")]
        closures = ", ".join(f"{calls[name]['closure']:.0e}" for name in ("inspect", "decompose"))
        step = f"{rows['plain']['median_us'] / 1000:.0f}"
        lines.append([f"{case.batch} x {case.tokens}", step, *ratios, *seconds, closures])
    head = right("batch x tokens", "plain step, ms", *RECORDED, "inspect, s", "decompose, s", "closures")
    limits = "recording at most 1.9 times the plain step, inspect under 3 s, closures under 1e-5"
    return (
        "MiniLM on Python's own documentation; a step is a forward and a backward:\n\n"
        f"{markdown(head, lines)}\n\n{harness.missed(document, 'Every target is met')} ({limits}). {headline(document)}."
    )


if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
