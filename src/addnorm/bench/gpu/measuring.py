"""One cell: each variant is made, checked, warmed, and then timed in turn with the others.

What goes wrong with a variant is told, and the others are measured.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch._functorch.config

from addnorm.bench.gpu import calls, check, clock, variants
from addnorm.bench.gpu.cells import JOBS, Cell
from addnorm.bench.gpu.clock import Clock, Timer
from addnorm.bench.gpu.device import describe
from addnorm.bench.gpu.variants import COPY
from addnorm.bench.timing import Row

PARTS = ("errors", "failures", "rows")

Found = dict[str, list[Row]]


class DeviceLost(RuntimeError):
    """The device answers no more: after an illegal access every later call of the process fails."""

    def __init__(self, message: str, found: Found) -> None:
        super().__init__(message)
        self.found = found


class OutOfTime(RuntimeError):
    """The deadline was over before every variant of the cell was ready."""


def measure(
    cell: Cell, device: torch.device, timekeeper: Clock, *,
    rounds: int = clock.ROUNDS, asked: Sequence[str] | None = None, without: Sequence[str] = (), cache: int | None = None,
    deadline: float | None = None,
) -> Found:  # fmt: skip
    """One cell: a row a variant that is right, the errors of all, and the failures.

    Args:
        cell: what is timed.
        device: where.
        timekeeper: of the device.
        rounds: how often each variant is timed.
        asked: the variants (None: those of the plan).
        without: variants to leave out.
        cache: bytes of the device's last cache; None asks the device.
        deadline: of `time.monotonic`, after which no variant is begun, since each may compile for long; None is none.

    Raises:
        DeviceLost: it has the failure that took the device along.
        OutOfTime: the deadline is over.
    """
    cache = describe(device)["l2_bytes"] if cache is None else cache
    sets = calls.how_many(cell, cache)
    given = calls.inputs(cell, device, sets)
    found: Found = {part: [] for part in PARTS}
    timers: dict[str, Timer] = {}
    repeats: dict[str, int] = {}
    ready: dict[str, float] = {}

    def begin(name: str) -> str | None:
        """Makes its timer, or says what is wrong with it."""
        if name == COPY:
            call = calls.copier(cell, device, sets)
        else:
            forward = variants.VARIANTS[name].make(cell)
            off, problem = check.errors(cell, forward, given[0])
            told = {key: value if math.isfinite(value) else None for key, value in off.items()}  # JSON has no NaN
            found["errors"].append({**cell._asdict(), "variant": name, "limits": check.limits(cell), **told})
            if problem is not None:
                return f"wrong: {problem}"
            call = calls.timed(cell, forward, given)
        clock.warm(call, sets, timekeeper)
        timer = timekeeper.timer(call, sets)
        repeats[name] = clock.repeats_for(timer)
        timers[name] = timer
        return None

    def failed(name: str, error: Exception | str) -> None:
        said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        found["failures"].append({**cell._asdict(), "variant": name, "error": said[:300]})
        if not isinstance(error, str):
            alive(timekeeper, found)

    names = [name for name in (*variants.chosen(cell, device.type, asked), COPY) if name not in without]
    with _graphs_are_kept(cell):
        if any(name != COPY and variants.VARIANTS[name].compiles for name in names):
            torch.compiler.reset()  # this cell's graphs alone, without the guards of those before it
        for name in names:
            begun = time.monotonic()
            if deadline is not None and begun > deadline:
                raise OutOfTime
            try:
                problem = begin(name)
                if problem is not None:
                    failed(name, problem)
            except Exception as error:  # whatever a peer raises is told, and the others are measured
                failed(name, error)
            ready[name] = time.monotonic() - begun
            if name not in timers:
                free(device)
        samples = clock.interleaved(timers, repeats, rounds, failed)
    cold = calls.is_cold(cell, cache, sets)
    for name, taken in samples.items():
        more = {"repeats": repeats[name], "sets": sets, "cold": cold, "bytes": cell.bytes, "ready_s": ready[name]}
        found["rows"].append({**cell._asdict(), "variant": name, **clock.times(taken), **more})
    return found


def alive(timekeeper: Clock, found: Found) -> None:
    """Raises DeviceLost where the device can no longer be waited for."""
    try:
        timekeeper.wait()
    except Exception as error:
        raise DeviceLost(f"{type(error).__name__}: {error}"[:300], found) from error


def free(device: torch.device) -> None:
    """Gives back what a failure has left: tensors in cycles, and the allocator's blocks, which may be of no use to others."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _graphs_are_kept(cell: Cell) -> Iterator[None]:
    """Where a graph is run backward again and again, Inductor may not reuse the memory of what was saved; else it may.

    This holds in this thread alone, and a GPU's backward runs in another, which looks again. That the first backward keeps its
    graph too (`calls.gradients`) answers there; this keeps such graphs apart from the others in the compiler's cache.
    """
    again = JOBS[cell.job].backward and not JOBS[cell.job].forward
    with torch._functorch.config.patch(donated_buffer=not again):
        yield
