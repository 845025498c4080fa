"""The clocks of the GPU benchmark: device time, host time and call time of a variant, separately; the bandwidth of a copy.

On CUDA the device first sleeps, while the host enqueues all the calls of a segment between two events. So the device's work
lies between the events without a gap, and the host's time is that of enqueuing alone. If the sleep ends before the host
does, it is made longer and the segment is repeated. A call that synchronizes with the device can never be ahead of it:
`queued` is False, and its device time includes the host's. (`triton.testing.do_bench` has one call between two events: its times
include the launch where the host is slower than the device, and it has no host time.)

Call time is the wall clock of as many calls, with one synchronization at the end.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from addnorm._util.timing import quartiles
from addnorm.bench.case import Row

ROUNDS = 11
SEGMENT_SECONDS = 2e-3  # approximate duration of the calls of one segment
FEWEST, MOST = 4, 40  # calls in a segment: a device's queue has about a thousand places, and a call may need a dozen
TRIES = 5  # attempts to enqueue ahead of the device
FIRST_SLEEP, LONGEST_SLEEP = 2e-3, 0.2
CALIBRATION_CYCLES, CALIBRATIONS = 20_000_000, 5
COPY_BYTES = {"cuda": 2**30, "cpu": 2**22}  # size of the copied tensor
COPY_ROUNDS = 5

TimedCall = Callable[[int], object]  # of the index of a set


class Sample(NamedTuple):
    """Seconds a call in one segment, and whether all calls were enqueued ahead of the device."""

    device: float
    host: float
    call: float
    queued: bool


class Timer:
    """Timer of one variant, after one untimed call of each set: kernels are loaded, the allocator has memory for all.

    The calls use the input sets in turn. Each segment continues with the set after the last segment's. A CPU computes while the
    call runs, so on a CPU all three times are the time of the call.
    """

    def __init__(self, device: str, call: TimedCall, sets: int) -> None:
        self.device, self.call, self.order, self.sleep = device, call, itertools.cycle(range(sets)), FIRST_SLEEP
        for i in range(sets):
            call(i)
        wait(device)

    def loop(self, repeats: int) -> float:
        """Make `repeats` calls, and return the host's seconds."""
        order = [*itertools.islice(self.order, repeats)]
        start = time.perf_counter()
        for i in order:
            self.call(i)
        return time.perf_counter() - start

    def sample(self, repeats: int) -> Sample:
        """Time `repeats` calls. On CUDA, time them between two events, then time as many again with a wait at the end."""
        if self.device != "cuda":
            seconds = self.loop(repeats) / repeats
            return Sample(seconds, seconds, seconds, True)
        for _ in range(TRIES):
            device, host, queued = self._segment(repeats)
            if queued or self.sleep >= LONGEST_SLEEP:
                break
            self.sleep = min(LONGEST_SLEEP, max(2 * self.sleep, 2 * host))
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.loop(repeats)
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
        return Sample(device / repeats, host / repeats, wall / repeats, queued)

    def repeats(self) -> int:
        """Return the number of calls in a segment."""
        once = self.sample(FEWEST)
        return max(FEWEST, min(MOST, round(SEGMENT_SECONDS / max(once.device, once.call, 1e-9))))

    def _segment(self, repeats: int) -> tuple[float, float, bool]:
        """Return the seconds of the device and of the host, and whether the host enqueued all calls before the device began."""
        start, end = _event(), _event()
        torch.cuda.synchronize()
        torch.cuda._sleep(int(self.sleep * _cycles_per_second()))
        start.record()
        host = self.loop(repeats)
        end.record()
        queued = not start.query()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, host, queued


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


@cache
def _cycles_per_second() -> float:
    """Return the cycles per second of a sleep: the last of `CALIBRATIONS` measurements, since an idle device runs slower."""
    for _ in range(CALIBRATIONS):
        start, end = _event(), _event()
        start.record()
        torch.cuda._sleep(CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
    return float(CALIBRATION_CYCLES / (start.elapsed_time(end) / 1e3))


def wait(device: str) -> None:
    """Wait for the device, and raise its errors."""
    if device == "cuda":
        torch.cuda.synchronize()


def times(samples: list[Sample]) -> Row:
    """Return medians and quartiles in microseconds, and whether every segment was enqueued ahead of the device."""
    row: Row = {}
    for part in ("device", "host", "call"):
        q1, median, q3 = quartiles([getattr(sample, part) * 1e6 for sample in samples])
        row |= {f"{part}_us": median, f"{part}_q1_us": q1, f"{part}_q3_us": q3}
    return row | {"rounds": len(samples), "queued": all(sample.queued for sample in samples)}


@cache
def _copies(device: str) -> dict[str, Timer]:
    """Return timers of a large copy within the device: by the driver, and by a kernel.

    On an H200 the driver's copy reached two thirds of the bandwidth (https://github.com/NVIDIA/cccl/issues/1672), so a share of
    the driver's bandwidth would be too high.
    """
    source = torch.randint(-(2**31), 2**31, (COPY_BYTES[device] // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return {
        "memcpy": Timer(device, lambda i: target.copy_(source), FEWEST),
        "kernel": Timer(device, lambda i: torch.bitwise_not(source, out=target), FEWEST),
    }


def copy_rates(device: str) -> Row:
    """Return the bytes a second that a large copy reads and writes, by method: the median of a few rounds."""
    seconds = {
        name: statistics.median(each.sample(FEWEST).device for _ in range(COPY_ROUNDS))
        for name, each in _copies(device).items()
    }
    return {name: 2 * COPY_BYTES[device] / each for name, each in seconds.items()}
