"""Description of a benchmark's environment: the machine, the versions, the commit."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch.utils.collect_env import get_nvidia_driver_version, run

import addnorm
from addnorm.ops import backends, cpu

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAX_OTHERS = 0.5  # cores that other processes may use during a run whose times are published
ASSUMED_CACHE = 32 * 1024**2  # bytes of the last-level cache if the system does not report it


def describe() -> dict[str, Any]:
    """Return the machine, the backends, the versions and the commit, as keys of a document."""
    chosen = re.search(r"\[(\w+)\]", _text(HUGE_PAGES))  # `madvise` of "always [madvise] never"
    return {
        "machine": {
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "caches": caches(),
            "system": f"{platform.system()} {platform.machine()}",
            "libc": " ".join(platform.libc_ver()).strip(),
            "huge_pages": chosen[1] if chosen else None,
        },
        "isa": cpu.ISA,
        "backends": [backend._asdict() for backend in backends()],
        "versions": {
            "addnorm": addnorm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "triton": version_of("triton", "pytorch-triton"),
            "cuda": torch.version.cuda,
        },
        **commit(),
    }


def device(kind: str) -> dict[str, Any]:
    """Return name, multiprocessors and driver of a GPU, or the name of a CPU."""
    if kind != "cuda":
        return {"type": kind, "name": cpu_model()}
    properties = torch.cuda.get_device_properties()
    return {
        "type": "cuda", "name": properties.name, "multiprocessors": properties.multi_processor_count,
        "driver": get_nvidia_driver_version(run), "cuda": torch.version.cuda,
    }  # fmt: skip


def load() -> float:
    """Return the load average of the last minute."""
    return os.getloadavg()[0]


def meter_load() -> Callable[[], dict[str, float | None]]:
    """Return a function that returns the load now, and the mean number of cores that other processes used meanwhile.

    It returns keys of a document: `load`, before the run; `load_after`, which includes the load by the run itself; and
    `load_of_others`, which does not.

    Example:
        >>> from addnorm.bench.environment import meter_load
        >>> [*meter_load()()]
        ['load', 'load_after', 'load_of_others']
    """
    before, start, busy, own = load(), time.monotonic(), _busy_seconds(), _own_seconds()

    def columns() -> dict[str, float | None]:
        elapsed, now = time.monotonic() - start, _busy_seconds()
        others = None
        if busy is not None and now is not None and elapsed > 0:
            others = max((now - busy - (_own_seconds() - own)) / elapsed, 0.0)
        return {"load": before, "load_after": load(), "load_of_others": others}

    return columns


def _busy_seconds() -> float | None:
    """Return the CPU seconds that all cores have worked since the machine started, or None if they are not reported."""
    times = re.match(r"cpu +(\d+) (\d+) (\d+) \d+ \d+ (\d+) (\d+)", _text(Path("/proc/stat")))
    return None if times is None else sum(map(int, times.groups())) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Return the CPU seconds that this process and its finished children have used."""
    return sum(os.times()[:4])


def version_of(*packages: str) -> str | None:
    """Return the version of the first of the packages that is installed, or None."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:  # or installed under another name, or a checkout on the path
            continue
    return None


def cpu_model() -> str:
    """Return the name of the processor."""
    named = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def caches() -> dict[str, int]:
    """Return the bytes of one cache of each level, such as `{"L1d": 32768, "L2": 1048576, "L3": 33554432}`."""
    failed, text, _ = run("lscpu --caches=NAME,ONE-SIZE --bytes --json")
    found = [] if failed or not text else json.loads(text)["caches"]
    return {cache["name"]: int(cache["one-size"]) for cache in found if cache["one-size"]}


def commit() -> dict[str, Any]:
    """Return the `commit` of this checkout, and as `dirty` whether files differ from it. Both are None without a checkout."""
    root = Path(addnorm.__file__).parents[2]
    # Files that the benchmark writes do not count: the results, and the tables in the pages.
    own = "-- . ':!benchmarks/results' ':!README.md' ':!docs'"
    failed, status, _ = run(f"git -C {quote(str(root))} --git-dir=.git status --porcelain=v2 --branch {own}")
    if failed:
        return {"commit": None, "dirty": None}
    head, *lines = status.splitlines()  # "# branch.oid COMMIT"; then the branch, and the changes
    return {"commit": head.split()[-1], "dirty": any(not line.startswith("#") for line in lines)}


def _text(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.exists() else ""
