"""The stopwatch of the CPU benchmarks: how long a call takes, measured in turns with the other variants.

benchmarks/README.md has the reasons for this protocol:

- All variants of a case run in one process, interleaved, in an order that changes each round. A row has the median and the
  quartiles. (`torch.utils.benchmark.Timer` times one statement after the other: a drift of the machine looks like a difference.)
- Before each timed loop the variant is called once untimed. The garbage collector is off, and runs by hand between the variants.
- A variant that cannot be made or called is reported, and the others are measured (`attempt`).
- The allocator is in one of two states, the same for all variants (`settle_allocator`); a row has the page faults of a call.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from timeit import timeit
from typing import Any, Literal

import torch
from torch import Tensor

from addnorm._util.timing import interleave, median_interval, quartiles, synchronize
from addnorm.bench.case import Call, Case, Makers, Results, Row

State = Literal["kept", "fresh", "default"]

ROUNDS = 21
FEWEST_ROUNDS = 12  # with 5 rounds even the range of all times contains the median with a probability of 94% only
CELL_SECONDS = 4.0  # the rounds fit into this time, if there are at least FEWEST_ROUNDS
SEGMENT_MS = 5.0  # duration of a timed loop: the overhead of the clock and of the loop is negligible

# Options of glibc's malloc (M_TRIM_THRESHOLD -1, M_MMAP_THRESHOLD -3, M_MMAP_MAX -4) in each state.
MALLOC = {
    "kept": {-4: 0, -1: -1},
    "fresh": {-4: 65536, -3: 128 * 1024, -1: 128 * 1024},
    "default": {-4: 65536, -3: 32 * 1024**2, -1: 64 * 1024**2},
}


def settle_allocator(state: State = "kept") -> bool:
    """Bring glibc's malloc into a state that does not depend on earlier allocations.

    By default malloc maps large blocks anew, and the kernel clears their pages at each call. But malloc reuses blocks that fit
    into free memory at the end of the heap. So the same call took 5.6 or 23.9 ms, depending on earlier allocations.

    Args:
        state: "kept": freed blocks are reused, calls cause no page faults. "fresh": large blocks are mapped anew at each call.
            "default": the thresholds that glibc itself reaches in a process that runs for a while.

    Returns:
        Whether the allocator has the state; False for another allocator than glibc's.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    results = [libc.mallopt(option, value) for option, value in MALLOC[state].items()]
    if state == "fresh":
        libc.malloc_trim(0)
    return all(results)


def failure(case: Case, variant: str, error: Exception) -> Row:
    """Return a row of `failures`: the case, the variant and the text of the error."""
    return case.row(variant=variant, error=f"{type(error).__name__}: {error}"[:300])


def attempt(case: Case, makers: Makers, may_fail: Container[str]) -> tuple[dict[str, Call], list[Row]]:
    """Make every variant and call it once. Return the calls, and the failures.

    Args:
        case: the case.
        makers: functions that make the variants.
        may_fail: variants that may raise. The variant is then left out, its memory is freed, and its error is a failure.
    """
    calls: dict[str, Call] = {}
    failures = []
    for name, make in makers.items():
        try:
            calls[name] = make()
            calls[name]()  # compiles, if it is compiled; starts the threads
            synchronize()
        except Exception as error:
            calls.pop(name, None)
            if name not in may_fail:
                raise
            failures.append(failure(case, name, error))
        if name not in calls:
            free()  # here the error no longer keeps its tensors alive
    return calls, failures


def compare(case: Case, makers: Makers, rounds: int, may_fail: Container[str] = (), **options: Any) -> Results:
    """Make every variant, measure all in turns, and return the `rows` and the `failures` of variants that may fail.

    Args:
        case: the case.
        makers: functions that make the variants.
        rounds: number of timed loops at most.
        may_fail: variants that are left out if they raise.
        options: those of `measure`.
    """
    calls, failures = attempt(case, makers, may_fail)
    return {"failures": failures, "rows": measure(case, calls, rounds, **options)}


def step(module: Call, inputs: Sequence[Tensor], cotangents: Any, wanted: Iterable[Tensor] = ()) -> Call:
    """Return a function that computes the gradients of the `wanted` tensors, or the outputs if `wanted` is empty."""
    leaves = [*wanted]
    if leaves:
        return lambda: torch.autograd.grad(module(*inputs), leaves, cotangents)
    return torch.no_grad()(partial(module, *inputs))


def free() -> None:
    """Free the memory that a failure left: tensors in reference cycles, and the allocator's cached blocks."""
    gc.collect()
    torch.cuda.empty_cache()


def measure(
    case: Case, calls: Mapping[str, Call], rounds: int, *, seconds: float = CELL_SECONDS, peer: str | None = None
) -> list[Row]:
    """Return a result row for each variant of a case, measured in turns.

    A row has the median time of a call and its quartiles in microseconds, the number of `rounds`, the page `faults` of a call,
    and `repeats`, the number of calls in a loop. With a `peer` it also has `paired_ratio`, the median over the rounds of the
    peer's time divided by the variant's, and its 95% interval from `paired_low` to `paired_high` (`median_interval`).

    Args:
        case: the case.
        calls: the variants.
        rounds: number of timed loops at most.
        seconds: duration of all rounds.
        peer: variant that the others are compared with, round by round.
    """
    turns = {name: _calibrate(call) for name, call in calls.items()}
    fit = int(seconds / sum(turn for _, turn in turns.values())) if turns else 0
    samplers = {name: partial(_sample, calls[name], repeats) for name, (repeats, _) in turns.items()}
    samples = interleave(samplers, range(min(rounds, max(FEWEST_ROUNDS, fit))))
    rows = []
    for name, pairs in samples.items():
        times, faults = zip(*pairs, strict=True)
        row = case.row(variant=name, **spread(times), faults=statistics.median(faults), repeats=turns[name][0])
        if peer is not None:
            ratios = [theirs / ours for (theirs, _), ours in zip(samples[peer], times, strict=True)]
            low, high = median_interval(ratios)
            row |= {"paired_ratio": statistics.median(ratios), "paired_low": low, "paired_high": high}
        rows.append(row)
    return rows


def spread(times: Sequence[float]) -> Row:
    """Return the median of `times` in microseconds, the quartiles and the number of times, as values of a result row."""
    q1, median, q3 = quartiles(times)
    return {"median_us": median, "q1_us": q1, "q3_us": q3, "rounds": len(times)}


def protocol(rounds: int) -> Row:
    """Return the settings of the stopwatch, for a document."""
    return {"rounds": rounds, "fewest_rounds": FEWEST_ROUNDS, "cell_seconds": CELL_SECONDS, "segment_ms": SEGMENT_MS}


def _sample(call: Call, repeats: int) -> tuple[float, float]:
    """Return the microseconds and the page faults of a call, averaged over `repeats` calls."""
    gc.collect()
    call()
    before = _page_faults()
    microseconds = timeit(call, number=repeats) / repeats * 1e6
    return microseconds, (_page_faults() - before) / repeats


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _calibrate(call: Call) -> tuple[int, float]:
    """Return the number of calls in a timed loop, and the seconds that one round takes."""
    call()
    once = timeit(call, number=1)
    if once < SEGMENT_MS / 1e3:  # the first ones may be slow
        once = min(timeit(call, number=1) for _ in range(5))
    repeats = max(1, min(10_000, round(SEGMENT_MS / 1e3 / once)))
    return repeats, (1 + repeats) * once
