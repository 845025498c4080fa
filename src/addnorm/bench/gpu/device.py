"""The device: what it is, and how fast it copies."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from addnorm.bench import machine
from addnorm.bench.gpu.calls import Timed
from addnorm.bench.gpu.clock import FEWEST, Clock

DRIVER = Path("/proc/driver/nvidia/version")
COPY_BYTES = {"cuda": 2**30, "cpu": 2**22}  # of what is copied
COPY_ROUNDS = 5
ASSUMED_L2 = 64 * 2**20  # of a device that does not say


def describe(device: torch.device) -> dict[str, Any]:
    """Name, multiprocessors, caches, memory and driver; of a CPU the name and its last cache."""
    if device.type != "cuda":
        cache = machine.last_level_cache(machine.caches())
        return {"type": device.type, "name": machine.cpu_model(), "l2_bytes": cache}
    found = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda", "name": found.name, "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count, "l2_bytes": getattr(found, "L2_cache_size", 0) or ASSUMED_L2,
        "memory_bytes": found.total_memory, "driver": driver(), "cuda": torch.version.cuda,
    }  # fmt: skip


def driver() -> str | None:
    """The version of the kernel's driver, where the system says."""
    text = DRIVER.read_text(errors="replace") if DRIVER.exists() else ""
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", text)
    return found[1] if found else None


def triton_version() -> str | None:
    """Of triton, under whichever name it is installed."""
    for name in ("triton", "pytorch-triton"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


Way = Callable[[Tensor, Tensor], object]
# What copies: the driver, and a kernel like any other. On an H200 the driver's has reached two thirds of the bandwidth
# (https://github.com/NVIDIA/cccl/issues/1672), so that shares of it would flatter.
WAYS: dict[str, Way] = {
    "memcpy": lambda source, target: target.copy_(source),
    "kernel": lambda source, target: torch.bitwise_not(source, out=target),
}


class Copies:
    """The bandwidth of a large copy within the device, read and written bytes, measured from time to time: of the faster way."""

    def __init__(self, device: torch.device, clock: Clock, found: list[float] | None = None) -> None:
        self.bytes = COPY_BYTES[device.type]
        self.found = list(found or [])  # bytes a second, one a measurement
        self.ways: dict[str, float] = {}  # those of the last one
        source = torch.randint(-(2**31), 2**31, (self.bytes // 4,), dtype=torch.int32, device=device)
        target = torch.empty_like(source)
        self._timers = {name: clock.timer(_copying(way, source, target), 1) for name, way in WAYS.items()}
        for timer in self._timers.values():
            timer.sample(FEWEST)  # untimed

    def measure(self) -> None:
        """One more: of each way the median of a few rounds."""
        for name, timer in self._timers.items():
            seconds = statistics.median(timer.sample(FEWEST).device for _ in range(COPY_ROUNDS))
            self.ways[name] = 2 * self.bytes / seconds
        self.found.append(max(self.ways.values()))

    def document(self) -> dict[str, Any]:
        """What stands in the document: the median is what shares are of."""
        return {
            "bytes": self.bytes, "median": statistics.median(self.found), "bytes_per_second": self.found,
            "last": dict(self.ways),
        }  # fmt: skip


def _copying(way: Way, source: Tensor, target: Tensor) -> Timed:
    return lambda i: way(source, target)
