"""Cost of inspecting, recording and decomposing a real model (MiniLM). Writes results/stream.json.

Recording is timed against the same forward and backward of the same model without a recorder; each variant has its own weights.
`inspect` and `decompose` are whole calls, in seconds, with their closures. An mHC encoder of MiniLM's size has four streams: its
recorded step is timed against `inspect` too, since it is inspected anew. README.md in this folder has the protocol.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import models
import torch
from torch import nn

from addnorm import decompose, inspect, record
from addnorm._util.numbers import format_number
from addnorm.bench import timing
from addnorm.bench.case import Case, Document, Results, Rows, Target, grid, ratio, value
from addnorm.bench.harness import Benchmark, main
from addnorm.bench.pages import headline, markdown, missed, quotient
from addnorm.nn import Encoder

RECORDED = ("recorded", "without gradients")
WHOLE = {"inspect": inspect, "decompose": decompose}
MOST_TIMES, MOST_SECONDS, CLOSURE = 1.9, 3.0, 1e-5
INSPECTED, MOST_INSPECTED = "four streams, inspect", 1.5
STREAMS = ("four streams", "four streams, recorded", "four streams, without gradients")
CALLS = 5  # of inspect and of decompose


def measure(case: Case, *, rounds: int) -> Results:
    """Return the times of a forward and backward, plain and recorded, and those of the whole calls."""
    loaded = models.load_minilm(case)
    with ExitStack() as stack:
        copies = record_copies(loaded.model, ("plain", *RECORDED), stack)
        steps = {name: models.training_step(model, loaded.kwargs) for name, model in copies.items()}
        rows = timing.measure(case, steps, rounds)
    for name, call in WHOLE.items():
        seconds, closure = [], 0.0
        for _ in range(CALLS):
            start = time.perf_counter()
            closure = call(loaded.model, *loaded.args, **loaded.kwargs).closure  # type: ignore[operator]  # both have one
            seconds.append(time.perf_counter() - start)
        rows.append(case.row(
            variant=name, median_us=1e6 * statistics.median(seconds), most_s=max(seconds), closure=closure
        ))  # fmt: skip
    with ExitStack() as stack:
        rows += timing.measure(case, build_stream_calls(case, stack), rounds)
    return {"rows": rows}


def build_stream_calls(case: Case, stack: ExitStack) -> dict[str, Callable[[], object]]:
    """Return the steps of an encoder with four streams, plain and recorded until `stack` closes, and its `inspect`."""
    torch.manual_seed(0)
    encoder = Encoder(6, 384, nhead=12, wiring="mhc")
    x, probe = torch.randn(2, case.batch, case.tokens, 384)
    copies = record_copies(encoder, STREAMS, stack)

    def step(model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        (model(x) * probe).sum().backward()

    return {**{name: partial(step, model) for name, model in copies.items()}, INSPECTED: lambda: inspect(encoder, x)}


def record_copies(model: nn.Module, names: Sequence[str], stack: ExitStack) -> dict[str, nn.Module]:
    """Return copies of a model by name: plain, and recorded until `stack` closes, with and without gradients."""
    plain, recorded, forward_only = (copy.deepcopy(model) for _ in names)
    stack.enter_context(record(recorded))
    stack.enter_context(record(forward_only, grads=False))
    return dict(zip(names, (plain, recorded, forward_only), strict=True))


TARGETS = [
    Target(
        "recording, {}: times the plain step",
        "<=",
        MOST_TIMES,
        ratio("plain", "recorded"),
        None,
        why="the statistics read the stream, each write and each gradient once more",
    ),
    Target(
        "recording four streams, {}: times inspect of the same model",
        "<=",
        MOST_INSPECTED,
        ratio(INSPECTED, STREAMS[1]),
        None,
        why="the matrices are those of this step: it is captured and measured as by inspect, then runs with two backwards",
    ),
    Target(
        f"inspect, {{}}: seconds, the slowest of {CALLS}",
        "<=",
        MOST_SECONDS,
        value("inspect", "most_s"),
        None,
        why="a person waits for it",
    ),
    *(
        Target(
            f"{call}, {{}}: closure",
            "<=",
            CLOSURE,
            value(call, "closure"),
            None,
            why="float32's roundings over the depth of the model",
        )
        for call in WHOLE
    ),
]


def section(document: Document) -> str:
    """Return the table of costs: a line a size."""

    def line(case: Case, rows: Rows) -> dict[str, str]:
        return {
            "batch x tokens": f"{case.batch} x {case.tokens}", "plain step, ms": f"{rows['plain']['median_us'] / 1000:.0f}",
            **{name: quotient(rows, name, "plain") for name in RECORDED},
            **{f"{name}, s": f"{rows[name]['median_us'] / 1e6:.2f}" for name in WHOLE},
            "closures": ", ".join(format_number(rows[name]['closure'], 1) for name in WHOLE),
            **({name: quotient(rows, name, STREAMS[0]) for name in STREAMS[1:]} if STREAMS[0] in rows else {}),
        }  # fmt: skip

    limits = "recording at most 1.9 times the plain step, inspect under 3 s, closures under 1e-5"
    table = markdown(line(*item) for item in BENCHMARK.by_case(document).items())
    return (
        "MiniLM on Python's own documentation; a step is a forward and a backward:\n\n"
        f"{table}\n\n{missed(document, 'Every target is met')} ({limits}). {headline(document)}."
    )


BENCHMARK = Benchmark(
    "stream", grid(tokens=(32, 128), batch=(1, 8)), measure,
    lambda case: f"{case.batch} x {case.tokens} tokens", TARGETS,
    protocol={"model": models.MINILM, "calls": CALLS, "text": models.TEXT, "dtype": "float32", "mode": "evaluation"},
    sections={"docs/streams.md#streams": section},
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
