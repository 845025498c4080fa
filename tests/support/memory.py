"""The memory that is available: what tests of large tensors need."""

import gc
from pathlib import Path

import pytest
import torch

GB = 10**9


def lines(path):
    """Return the fields of a file in /proc, in bytes."""
    fields = (line.split() for line in Path(path).read_text().splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(value) * 1024 for name, value, _ in fields}


def need(memory):
    """Skip a test unless so many bytes are available."""
    gc.collect()
    available = lines("/proc/meminfo")["MemAvailable"]
    if available < memory + GB:
        pytest.skip(f"{available / GB:.0f} GB of memory are available, {memory / GB:.0f} are wanted")


def record_saved(function):
    """Return the results of a function, and the tensors that it saves for backward."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        return function(), saved
