"""The clocks of the GPU benchmark: the device time and the call time of a variant, and the bandwidth of a copy.

Device time is that of `triton.testing.do_bench`: each call lies between two events, after a write that clears the cache. The
device needs longer for that write than the host for most launches, so the host enqueues the call meanwhile. Call time is the
wall clock of many calls with one synchronization at the end, by `torch.utils.benchmark.Timer`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

from addnorm.bench.case import Row
from addnorm.bench.timing import spread

ROUNDS = 11
REPEATS = 20  # calls in one sample of the call time
WARM_UP_MS, SAMPLE_MS = 1, 10  # of one sample of the device time
COPY_BYTES = {"cuda": 2**30, "cpu": 2**22}  # size of the copied tensor
COPY_ROUNDS = 5

TimedCall = Callable[[], object]


class Sample(NamedTuple):
    """Seconds of a call: on the device, and by the wall clock."""

    device: float
    call: float


def sample(device: str, call: TimedCall) -> Sample:
    """Time a call. A CPU computes while the call runs, so on a CPU both times are the wall clock's."""
    threads = torch.get_num_threads()
    wall = float(Timer("call()", globals={"call": call}, num_threads=threads).timeit(REPEATS).mean)
    if device != "cuda":
        return Sample(wall, wall)
    from triton.testing import do_bench

    return Sample(do_bench(call, WARM_UP_MS, SAMPLE_MS, return_mode="median") / 1e3, wall)


def times(samples: list[Sample]) -> Row:
    """Return the median and the quartiles of the device time, and the median of the call time, in microseconds."""
    device, call = ([1e6 * seconds for seconds in part] for part in zip(*samples, strict=True))
    return {**spread(device), "call_us": statistics.median(call)}


@cache
def _copies(device: str) -> dict[str, TimedCall]:
    """Return a large copy within the device: by the driver, and by a kernel.

    On an H200 the driver's copy reached two thirds of the bandwidth (https://github.com/NVIDIA/cccl/issues/1672), so a share of
    the driver's bandwidth would be too high.
    """
    source = torch.randint(-(2**31), 2**31, (COPY_BYTES[device] // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return {"memcpy": lambda: target.copy_(source), "kernel": lambda: torch.bitwise_not(source, out=target)}


def copy_rates(device: str) -> Row:
    """Return the bytes a second that a large copy reads and writes, by method: the median of a few rounds."""
    seconds = {
        name: statistics.median(sample(device, call).device for _ in range(COPY_ROUNDS))
        for name, call in _copies(device).items()
    }
    return {name: 2 * COPY_BYTES[device] / each for name, each in seconds.items()}
