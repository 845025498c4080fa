"""Memory of this machine that is free, to refuse work that cannot fit before it begins."""

import re
from contextlib import suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
LIMIT, USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")  # a container's limit and usage


def free_memory() -> float:
    """Return the number of bytes that can be allocated now, or infinity if the system does not report it.

    Example:
        >>> from addnorm._util.memory import free_memory
        >>> free_memory() > 1e6
        True
    """
    free = float("inf")
    with suppress(OSError):
        match = re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text())
        if match is not None:
            free = 1024.0 * int(match[1])
    with suppress(OSError, ValueError):  # ValueError: "max", no limit
        free = min(free, float(int(LIMIT.read_text()) - int(USED.read_text())))
    return free
