"""The clocks of the GPU benchmark: device time, host time and call time of a variant, separately.

On CUDA the device first sleeps, while the host enqueues all the calls of a segment between two events. So the device's work
lies between the events without a gap, and the host's time is that of enqueuing alone. If the sleep ends before the host
does, it is made longer and the segment is repeated. A call that synchronizes with the device can never be ahead of it:
`queued` is False, and its device time includes the host's.

Call time is the wall clock of as many calls, with one synchronization at the end.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import torch

from addnorm._util.timing import quartiles
from addnorm.bench.gpu.cases import TimedCall
from addnorm.bench.harness import Row

ROUNDS = 11
SEGMENT_SECONDS = 2e-3  # approximate duration of the calls of one segment
FEWEST, MOST = 4, 40  # calls in it: a device's queue has about a thousand places, and a call may need a dozen
TRIES = 5  # attempts to enqueue ahead of the device
FIRST_SLEEP, LONGEST_SLEEP = 2e-3, 0.2
CALIBRATION_CYCLES, CALIBRATIONS = 20_000_000, 5


class Sample(NamedTuple):
    """Seconds a call in one segment, and whether all calls were enqueued ahead of the device."""

    device: float
    host: float
    call: float
    queued: bool


class Timer(Protocol):
    """Timer of one variant."""

    def sample(self, repeats: int) -> Sample:
        """Time `repeats` calls, each on the next set."""


class Clock(Protocol):
    """Source of the times."""

    name: str

    def timer(self, call: TimedCall, sets: int) -> Timer:
        """Return a timer for a variant, whose call takes the index of a set."""

    def wait(self) -> None:
        """Wait for the device, and raise its errors."""


class _Order:
    """Order of the sets: each segment continues where the previous one ended."""

    def __init__(self, sets: int) -> None:
        self.sets, self.at = sets, 0

    def next(self, repeats: int) -> list[int]:
        order = [(self.at + i) % self.sets for i in range(repeats)]
        self.at = (self.at + repeats) % self.sets
        return order


class HostClock:
    """Clock of a CPU, which computes while the call runs: all three times are that of the call."""

    name = "host clock"

    def timer(self, call: TimedCall, sets: int) -> Timer:
        """Return a timer of the call."""
        return _HostTimer(call, sets)

    def wait(self) -> None:
        """Return at once: a CPU has no queue."""


class _HostTimer:
    def __init__(self, call: TimedCall, sets: int) -> None:
        self.call, self.order = call, _Order(sets)

    def sample(self, repeats: int) -> Sample:
        seconds = _loop(self.call, self.order.next(repeats)) / repeats
        return Sample(seconds, seconds, seconds, True)


class CudaClock:
    """Events around calls that are enqueued while the device sleeps."""

    name = "CUDA events"

    def __init__(self) -> None:
        # The last one counts: an idle device runs slower.
        self.hertz = [self._calibrated() for _ in range(CALIBRATIONS)][-1]

    @staticmethod
    def _calibrated() -> float:
        """Return the number of sleep cycles per second."""
        start, end = _event(), _event()
        start.record()
        torch.cuda._sleep(CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
        return float(CALIBRATION_CYCLES / (start.elapsed_time(end) / 1e3))

    def timer(self, call: TimedCall, sets: int) -> Timer:
        """Return a timer of the call."""
        return _CudaTimer(self, call, sets)

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def sleep(self, seconds: float) -> None:
        """Keep the device busy for `seconds`."""
        torch.cuda._sleep(int(seconds * self.hertz))


class _CudaTimer:
    def __init__(self, clock: CudaClock, call: TimedCall, sets: int) -> None:
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
        wall = time.perf_counter() - start
        return Sample(device / repeats, host / repeats, wall / repeats, queued)

    def _segment(self, repeats: int) -> tuple[float, float, bool]:
        """Return the seconds of the device and of the host, and whether the host was done before the device began."""
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


def _loop(call: TimedCall, order: list[int]) -> float:
    start = time.perf_counter()
    for i in order:
        call(i)
    return time.perf_counter() - start


def clock_of(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


def warm(call: TimedCall, sets: int, clock: Clock) -> None:
    """Call each set once, untimed: kernels are loaded, and the allocator has memory for all."""
    for i in range(sets):
        call(i)
    clock.wait()


def repeats_for(timer: Timer) -> int:
    """Return how many calls a segment has."""
    once = timer.sample(FEWEST)
    return max(FEWEST, min(MOST, round(SEGMENT_SECONDS / max(once.device, once.call, 1e-9))))


def times(samples: list[Sample]) -> Row:
    """Return medians and quartiles in microseconds, and whether every segment was enqueued ahead of the device."""
    row: Row = {}
    for part in ("device", "host", "call"):
        values = [getattr(sample, part) * 1e6 for sample in samples]
        q1, median, q3 = quartiles(values)
        row |= {f"{part}_us": median, f"{part}_q1_us": q1, f"{part}_q3_us": q3}
    return row | {"rounds": len(samples), "queued": all(sample.queued for sample in samples)}
