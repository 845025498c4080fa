"""Description of a device, and the bandwidth of a copy on it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from addnorm.bench import environment
from addnorm.bench.gpu.cases import TimedCall
from addnorm.bench.gpu.clock import FEWEST, Clock

DRIVER = Path("/proc/driver/nvidia/version")
COPY_BYTES = {"cuda": 2**30, "cpu": 2**22}  # size of the copied tensor
COPY_ROUNDS = 5
ASSUMED_L2 = 64 * 2**20  # bytes, for a device that does not report its cache


def describe(device: torch.device) -> dict[str, Any]:
    """Return name, multiprocessors, caches, memory and driver; of a CPU the name and its last cache."""
    if device.type != "cuda":
        cache = environment.last_level_cache(environment.caches())
        return {"type": device.type, "name": environment.cpu_model(), "l2_bytes": cache}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda", "name": properties.name, "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count, "l2_bytes": getattr(properties, "L2_cache_size", 0) or ASSUMED_L2,
        "memory_bytes": properties.total_memory, "driver": driver(), "cuda": torch.version.cuda,
    }  # fmt: skip


def driver() -> str | None:
    """Return the version of the kernel driver, or None."""
    text = DRIVER.read_text(errors="replace") if DRIVER.exists() else ""
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", text)
    return match[1] if match else None


def triton_version() -> str | None:
    """Return the version of triton, under either of its package names, or None."""
    for name in ("triton", "pytorch-triton"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


Method = Callable[[Tensor, Tensor], object]
# Methods of copying: the driver, and a kernel. On an H200 the driver's copy reached two thirds of the bandwidth
# (https://github.com/NVIDIA/cccl/issues/1672), so shares of that would be too high.
COPIES: dict[str, Method] = {
    "memcpy": lambda source, target: target.copy_(source),
    "kernel": lambda source, target: torch.bitwise_not(source, out=target),
}


class Copies:
    """Bandwidth of a large copy within the device, bytes read and written, measured repeatedly; the faster method counts."""

    def __init__(self, device: torch.device, clock: Clock, results: list[float] | None = None) -> None:
        self.bytes = COPY_BYTES[device.type]
        self.results = list(results or [])  # bytes a second, one for each measurement
        self.methods: dict[str, float] = {}  # of the last measurement
        source = torch.randint(-(2**31), 2**31, (self.bytes // 4,), dtype=torch.int32, device=device)
        target = torch.empty_like(source)
        self._timers = {name: clock.timer(_copying(method, source, target), 1) for name, method in COPIES.items()}
        for timer in self._timers.values():
            timer.sample(FEWEST)  # untimed

    def measure(self) -> None:
        """Measure once more: the median of a few rounds for each method."""
        for name, timer in self._timers.items():
            seconds = statistics.median(timer.sample(FEWEST).device for _ in range(COPY_ROUNDS))
            self.methods[name] = 2 * self.bytes / seconds
        self.results.append(max(self.methods.values()))

    def document(self) -> dict[str, Any]:
        """Return the entry of the document. Shares of bandwidth are relative to the median."""
        return {
            "bytes": self.bytes, "median": statistics.median(self.results), "bytes_per_second": self.results,
            "last": dict(self.methods),
        }  # fmt: skip


def _copying(method: Method, source: Tensor, target: Tensor) -> TimedCall:
    return lambda i: method(source, target)
