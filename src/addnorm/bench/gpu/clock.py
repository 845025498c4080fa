"""The clock: device time, host time and call time of a variant, apart.

On CUDA the device first sleeps, while the host enqueues all the calls of a segment between two events. So what lies between
the events is the device's work without a gap, and the host's time is that of enqueuing alone. If the sleep was over before
the host was done, it is made longer and the segment is repeated. A call that waits for the device can never be ahead of it:
it is `queued` False, and its device time has the host's in it.

Call time is the wall clock of as many calls, with one wait at the end.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from addnorm.bench.gpu.calls import Timed
from addnorm.bench.timing import Row

ROUNDS = 11
SEGMENT_SECONDS = 2e-3  # what the calls of one segment take, roughly
FEWEST, MOST = 4, 40  # calls in it: the queue of a device has about a thousand places, and a call may take a dozen
TRIES = 5  # to be ahead of the device
FIRST_SLEEP, LONGEST_SLEEP = 2e-3, 0.2
CALIBRATION_CYCLES, CALIBRATIONS = 20_000_000, 5


class Sample(NamedTuple):
    """Seconds a call, of one segment."""

    device: float
    host: float
    call: float
    queued: bool


class Timer(Protocol):
    """Times one variant."""

    def sample(self, repeats: int) -> Sample:
        """Of so many calls, each of the next set."""


class Clock(Protocol):
    """Where the times are from."""

    name: str

    def timer(self, call: Timed, sets: int) -> Timer:
        """One for a variant, whose call takes the number of a set."""

    def wait(self) -> None:
        """Until the device has done what it was given; raises what went wrong there."""


class _Order:
    """Which sets come next: each segment goes on where the one before it ended."""

    def __init__(self, sets: int) -> None:
        self.sets, self.at = sets, 0

    def next(self, repeats: int) -> list[int]:
        found = [(self.at + i) % self.sets for i in range(repeats)]
        self.at = (self.at + repeats) % self.sets
        return found


class HostClock:
    """For a device that works while the call runs, a CPU: all three times are that of the call."""

    name = "host clock"

    def timer(self, call: Timed, sets: int) -> Timer:
        """A timer of the call."""
        return _HostTimer(call, sets)

    def wait(self) -> None:
        """Nothing is ever left to be done."""


class _HostTimer:
    def __init__(self, call: Timed, sets: int) -> None:
        self.call, self.order = call, _Order(sets)

    def sample(self, repeats: int) -> Sample:
        seconds = _loop(self.call, self.order.next(repeats)) / repeats
        return Sample(seconds, seconds, seconds, True)


class CudaClock:
    """Events around calls that are enqueued while the device sleeps."""

    name = "CUDA events"

    def __init__(self) -> None:
        # The last counts: a device that has nothing to do runs slower.
        self.hertz = [self._calibrated() for _ in range(CALIBRATIONS)][-1]

    @staticmethod
    def _calibrated() -> float:
        """Cycles of the sleep in a second."""
        start, end = _event(), _event()
        start.record()
        torch.cuda._sleep(CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
        return float(CALIBRATION_CYCLES / (start.elapsed_time(end) / 1e3))

    def timer(self, call: Timed, sets: int) -> Timer:
        """A timer of the call."""
        return _CudaTimer(self, call, sets)

    def wait(self) -> None:
        """torch.cuda.synchronize."""
        torch.cuda.synchronize()

    def sleep(self, seconds: float) -> None:
        """Keeps the device busy, and nothing else."""
        torch.cuda._sleep(int(seconds * self.hertz))


class _CudaTimer:
    def __init__(self, clock: CudaClock, call: Timed, sets: int) -> None:
        self.clock, self.call, self.order = clock, call, _Order(sets)
        self.sleep = FIRST_SLEEP

    def sample(self, repeats: int) -> Sample:
        for _ in range(TRIES):
            device, host, queued = self._segment(repeats)
            if queued or self.sleep >= LONGEST_SLEEP:
                break
            self.sleep = min(LONGEST_SLEEP, max(2 * self.sleep, 2 * host))
        torch.cuda.synchronize()
        start = time.perf_counter()
        _loop(self.call, self.order.next(repeats))
        torch.cuda.synchronize()
        whole = time.perf_counter() - start
        return Sample(device / repeats, host / repeats, whole / repeats, queued)

    def _segment(self, repeats: int) -> tuple[float, float, bool]:
        """Seconds of the device and of the host, and whether the host was done before the device began."""
        order, start, end = self.order.next(repeats), _event(), _event()
        torch.cuda.synchronize()
        self.clock.sleep(self.sleep)
        start.record()
        host = _loop(self.call, order)
        end.record()
        queued = not start.query()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, host, queued


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _loop(call: Timed, order: list[int]) -> float:
    start = time.perf_counter()
    for i in order:
        call(i)
    return time.perf_counter() - start


def clock_of(device: torch.device) -> Clock:
    """The clock for a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


def warm(call: Timed, sets: int, clock: Clock) -> None:
    """Each set once, untimed: kernels are loaded, and the allocator has memory for all."""
    for i in range(sets):
        call(i)
    clock.wait()


def repeats_for(timer: Timer) -> int:
    """How many calls a segment has."""
    once = timer.sample(FEWEST)
    return max(FEWEST, min(MOST, round(SEGMENT_SECONDS / max(once.device, once.call, 1e-9))))


def interleaved(
    timers: Mapping[str, Timer], repeats: Mapping[str, int], rounds: int, failed: Callable[[str, Exception], None]
) -> dict[str, list[Sample]]:
    """Every timer once a round, the order rotated from round to round; one that raises is told to `failed` and left out."""
    found: dict[str, list[Sample]] = {name: [] for name in timers}
    with _uncollected():
        for turn in range(rounds):
            names = list(found)
            first = turn % len(names) if names else 0
            for name in names[first:] + names[:first]:
                try:
                    found[name].append(timers[name].sample(repeats[name]))
                except Exception as error:  # for memory, say: the others are still measured
                    del found[name]
                    failed(name, error)
    return found


@contextmanager
def _uncollected() -> Iterator[None]:
    """Python's collector is off."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def times(samples: list[Sample]) -> Row:
    """Medians and quartiles in microseconds, and whether every segment was enqueued ahead of the device."""
    found: Row = {}
    for part in ("device", "host", "call"):
        values = [getattr(sample, part) * 1e6 for sample in samples]
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        found |= {f"{part}_us": median, f"{part}_q1_us": q1, f"{part}_q3_us": q3}
    return found | {"rounds": len(samples), "queued": all(sample.queued for sample in samples)}
