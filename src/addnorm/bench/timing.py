"""The stopwatch of the CPU benchmarks: how long a call takes, measured in turns with the other variants.

benchmarks/README.md has the reasons for this protocol:

- All variants of a case run in one process, interleaved, in an order that rotates each round. A row has the median and the
  quartiles.
- Before each timed loop the variant is called once untimed. The garbage collector is off, and runs by hand between the variants.
- The allocator is in one of two states, the same for all variants (`settle_allocator`); a row has the page faults of a call.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from addnorm._util.timing import interleave, quartiles
from addnorm.bench.harness import Row

__all__ = ["ROUNDS", "State", "interleaved", "protocol", "settle_allocator", "spread"]

State = Literal["kept", "fresh", "default"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of glibc's malloc.h

ROUNDS = 21
FEWEST_ROUNDS = 5  # at least, also where a round takes long
CELL_SECONDS = 4.0  # the rounds fit into this time, if there are at least FEWEST_ROUNDS
SEGMENT_MS = 5.0  # duration of a timed loop, so that the clock and the loop do not count


def settle_allocator(state: State = "kept") -> bool:
    """Bring glibc's malloc into a state that does not depend on what was allocated before.

    By default malloc maps large blocks anew, and the kernel clears their pages at each call; but blocks that fit into free memory
    at the end of the heap are reused. So the same call took 5.6 and 23.9 ms in two cases, by their history.

    Args:
        state: "kept": freed blocks are reused, calls cause no page faults. "fresh": large blocks are mapped anew at each call.
            "default": what glibc's thresholds become in a process that runs for a while.

    Returns:
        Whether the allocator has the state; False where it is not glibc's.
    """
    settings = {
        "kept": {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1},
        "fresh": {M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 128 * 1024, M_TRIM_THRESHOLD: 128 * 1024},
        "default": {M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 32 * 1024**2, M_TRIM_THRESHOLD: 64 * 1024**2},
    }[state]
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    results = [libc.mallopt(option, value) for option, value in settings.items()]
    if state == "fresh" and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return all(results)


def _page_faults() -> int:
    """Return the pages that the kernel has given to this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def interleaved(
    calls: Mapping[str, Callable[..., Any]],
    args: Sequence[Any] = (),
    rounds: int = ROUNDS,
    *,
    seconds: float | None = None,
    may_fail: Iterable[str] = (),
    errors: dict[str, Exception] | None = None,
    peer: str | None = None,
) -> dict[str, Row]:
    """Return for each variant the median time of a call and its quartiles in microseconds, `rounds`, and `repeats` in a loop.

    With a `peer` also `paired_ratio`, the median over the rounds of the peer's time divided by the variant's, and its 95 %
    interval from `paired_low` to `paired_high`.

    Args:
        calls: functions of `args`, by variant.
        args: arguments of every call.
        rounds: number of timed loops at most.
        seconds: duration of all rounds; None is CELL_SECONDS.
        may_fail: variants whose first call may raise; the error goes into `errors`, and the variant is left out.
        errors: filled with the errors, by variant.
        peer: variant that the others are compared with, round by round.
    """
    repeats: dict[str, int] = {}
    round_seconds = 0.0
    for name, call in calls.items():
        try:
            repeats[name], turn = _calibrate(call, args)
        except Exception as error:
            if errors is None or name not in may_fail:
                raise
            errors[name] = error
        else:
            round_seconds += turn
    if not repeats:
        return {}

    def sampler(name: str) -> Callable[[], tuple[float, float]]:
        def sample() -> tuple[float, float]:
            gc.collect()
            calls[name](*args)
            before = _page_faults()
            microseconds = _loop(calls[name], args, repeats[name]) / repeats[name] * 1e6
            return microseconds, (_page_faults() - before) / repeats[name]

        return sample

    fit = int((CELL_SECONDS if seconds is None else seconds) / round_seconds)
    samples = interleave({name: sampler(name) for name in repeats}, min(rounds, max(FEWEST_ROUNDS, fit)))
    rows = {}
    for name, pairs in samples.items():
        times, faults = zip(*pairs, strict=True)
        rows[name] = {**spread(times), "faults": statistics.median(faults), "repeats": repeats[name]}
        if peer is not None:
            pairs_of_times = zip(samples[peer], pairs, strict=True)
            rows[name] |= paired_interval([theirs / ours for (theirs, _), (ours, _) in pairs_of_times])
    return rows


def paired_interval(ratios: Sequence[float]) -> Row:
    """Return the median of ratios and its 95 % interval, from their order alone: no distribution is assumed.

    Example:
        >>> from addnorm.bench.timing import paired_interval
        >>> paired_interval([1.0, 1.3, 1.1, 1.2, 0.9, 1.5, 1.4, 1.6, 1.7])
        {'paired_ratio': 1.3, 'paired_low': 1.0, 'paired_high': 1.6}
    """
    ordered, n = sorted(ratios), len(ratios)
    place = max(int((n - 1.96 * n**0.5) / 2), 0)  # of the binomial distribution
    return {
        "paired_ratio": statistics.median(ordered),
        "paired_low": ordered[place],
        "paired_high": ordered[n - 1 - place],
    }


def spread(times: Sequence[float]) -> Row:
    """Return the median of times in microseconds, their quartiles and their number, as columns of a row."""
    q1, median, q3 = quartiles(times)
    return {"median_us": median, "q1_us": q1, "q3_us": q3, "rounds": len(times)}


def protocol(rounds: int, **more: Any) -> Row:
    """Return how a document was measured."""
    return {"rounds": rounds, "fewest_rounds": FEWEST_ROUNDS, "cell_seconds": CELL_SECONDS, **more}


def _calibrate(call: Callable[..., Any], args: Sequence[Any]) -> tuple[int, float]:
    """Return how often a call is repeated in a timed loop, and the seconds that one round takes."""
    call(*args)  # compiles, if it is compiled; starts the threads
    once = _loop(call, args, 1)
    if once < SEGMENT_MS / 1e3:  # the first ones may be slow
        once = min(_loop(call, args, 1) for _ in range(5))
    repeats = max(1, min(10_000, round(SEGMENT_MS / 1e3 / once)))
    return repeats, (1 + repeats) * once


def _loop(call: Callable[..., Any], args: Sequence[Any], repeats: int) -> float:
    """Return the seconds of `repeats` calls."""
    start = time.perf_counter_ns()
    for _ in itertools.repeat(None, repeats):
        call(*args)
    return (time.perf_counter_ns() - start) / 1e9
