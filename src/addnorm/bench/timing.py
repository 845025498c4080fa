"""The stopwatch: the variants of a cell, and how one is timed.

What a time from here means (benchmarks/README.md says why):

- All variants of a cell run in one process, interleaved round by round, the order rotated; medians and quartiles. But for
  onnxruntime, whose threads would disturb the others: it runs by itself, after them.
- Before a variant is timed it is called once untimed, with the garbage of the one before it gone and the collector off.
- The allocator is in the state of a process that has lived for a while, the same for all (`settle_allocator`).
- Bandwidth is that of the bytes which must move, as a share of what `torch.add(out=)` of the same size reaches.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from addnorm.bench import onnx_peer
from addnorm.bench.expressions import Call, expressions, inputs, learned
from addnorm.bench.jobs import DTYPES, JOBS, Cell

ROUNDS = 21
FEWEST_ROUNDS = 5  # where a round takes long:
CELL_SECONDS = 4.0  # rounds are as many as fit into this, between the two
SEGMENT_MS = 5.0  # what one timed loop should take, so that the clock and the loop do not count
ADD_TENSORS = 3
MAY_FAIL = ("compile", "onnxruntime")  # peers that this machine may be unable to run
# Has threads of its own, which spin for a while after each call, as torch's do: interleaved, each would slow the other down.
APART = ("onnxruntime",)
REST_SECONDS = 0.2  # until the threads of the one before sleep

Row = dict[str, Any]


def variants(cell: Cell, compiled: bool) -> tuple[dict[str, Call], list[Tensor]]:
    """Every variant as a function of the same arguments, and the arguments."""
    job = JOBS[cell.job]
    args, cotangents = inputs(cell.job, cell.rows, cell.d, DTYPES[cell.dtype], grad=job.backward)
    calls = expressions(cell.norm, cell.job, cell.d)
    if compiled and job.compiled:
        torch.compiler.reset()  # this cell's graph alone, without the guards of those before it
        calls["compile"] = torch.compile(calls["eager"], dynamic=False, fullgraph=True)
    if job.backward:
        wanted = learned(cell.norm, args)
        calls = {name: _with_gradients(call, wanted, cotangents) for name, call in calls.items()}
    if onnx_peer.applies(cell):
        calls["onnxruntime"] = _or_raises(onnx_peer.bound, cell, args)
    left, right = args[0].detach(), args[1].detach()
    out = torch.empty_like(left)
    calls["add"] = lambda *_: torch.add(left, right, out=out)
    return calls, args


def _with_gradients(call: Call, wanted: list[Tensor], cotangents: tuple[Tensor, Tensor]) -> Call:
    grad = torch.autograd.grad
    return lambda *args: grad(call(*args), wanted, cotangents)


def _or_raises(make: Call, *args: Any) -> Call:
    """What `make` returns; where it fails, a call that fails: so that it is recorded as a failure of the variant."""
    try:
        return make(*args)  # type: ignore[no-any-return]
    except Exception as error:
        failed = error

    def call(*_: Tensor) -> None:
        raise failed

    return call


def settle_allocator() -> None:
    """Bring glibc's malloc into the state of a process that has lived for a while.

    Blocks above a threshold it maps afresh, to be paged in at every call; and it raises the threshold, to 32 MiB at
    most, only when such a block is freed. Without this, what ran first would decide what the next one costs.
    """
    torch.empty(8 * 1024 * 1024 - 4096, dtype=torch.float32)  # just below 32 MiB, and freed at once


def _seconds(call: Call, args: list[Tensor], repeats: int) -> float:
    start = time.perf_counter_ns()
    for _ in itertools.repeat(None, repeats):
        call(*args)
    return (time.perf_counter_ns() - start) / 1e9


def _calibrated(call: Call, args: list[Tensor]) -> tuple[int, float]:
    """How often it is repeated in a timed loop, and the seconds that a round of it takes."""
    call(*args)  # compiles, where that is what it does; starts the threads
    once = _seconds(call, args, 1)
    if once < SEGMENT_MS / 1e3:  # the first ones may be slow
        once = min(_seconds(call, args, 1) for _ in range(5))
    repeats = max(1, min(10_000, round(SEGMENT_MS / 1e3 / once)))
    return repeats, (1 + repeats) * once


@contextmanager
def _collected_by_hand() -> Iterator[None]:
    """No collection but those asked for, and these look only at what is new: the 100,000 objects of torch stay out."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def measure(cell: Cell, *, rounds: int = ROUNDS, compiled: bool = False) -> tuple[list[Row], list[Row]]:
    """The rows of one cell, one a variant; and what this machine could not run, with the error."""
    calls, args = variants(cell, compiled)
    failures: list[Row] = []
    samples: dict[str, list[float]] = {}
    repeats: dict[str, int] = {}
    for apart in (False, True):
        group = {name: call for name, call in calls.items() if (name in APART) == apart}
        if group:
            if apart:
                time.sleep(REST_SECONDS)
            errors: dict[str, Exception] = {}
            for name, (times, count) in interleaved(group, args, rounds, errors=errors).items():
                samples[name], repeats[name] = times, count
            for name, error in errors.items():
                failures.append({**cell._asdict(), "variant": name, "error": f"{type(error).__name__}: {error}"[:300]})
            if apart:
                time.sleep(REST_SECONDS)
    return _rows(cell, samples, repeats), failures


def interleaved(
    calls: dict[str, Call],
    args: list[Tensor],
    rounds: int = ROUNDS,
    *,
    cell_seconds: float = CELL_SECONDS,
    errors: dict[str, Exception] | None = None,
) -> dict[str, tuple[list[float], int]]:
    """The times of each variant in microseconds, and how often it ran in a loop; those in MAY_FAIL may, into `errors`."""
    repeats, seconds = {}, 0.0
    for name, call in calls.items():
        try:
            repeats[name], turn_seconds = _calibrated(call, args)
            seconds += turn_seconds
        except Exception as error:
            if errors is None or name not in MAY_FAIL:
                raise
            errors[name] = error
    names = list(repeats)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with _collected_by_hand():
        for turn in range(min(rounds, max(FEWEST_ROUNDS, int(cell_seconds / seconds))) if names else 0):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                gc.collect()
                calls[name](*args)
                samples[name].append(_seconds(calls[name], args, repeats[name]) / repeats[name] * 1e6)
    return {name: (samples[name], repeats[name]) for name in names}


def spread(times: list[float]) -> Row:
    """The median of the times, their quartiles, and how many there are."""
    q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return {"median_us": median, "q1_us": q1, "q3_us": q3, "rounds": len(times)}


def _rows(cell: Cell, samples: dict[str, list[float]], repeats: dict[str, int]) -> list[Row]:
    medians = {name: statistics.median(times) for name, times in samples.items()}
    rows = []
    for name, times in samples.items():
        tensors = ADD_TENSORS if name == "add" else JOBS[cell.job].tensors
        rows.append({
            **cell._asdict(), "variant": name, **spread(times), "repeats": repeats[name],
            "ratio_to_eager": medians["eager"] / medians[name],
            "bytes": tensors * cell.output_bytes,
            "share_of_add_bandwidth": tensors / ADD_TENSORS * medians["add"] / medians[name],
        })  # fmt: skip
    return rows
