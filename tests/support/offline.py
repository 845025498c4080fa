"""Triton's compiler without a GPU: kernels are compiled for sm_90 (H100 and H200), but neither loaded nor launched.

The machine code shows the resources of a kernel: registers, spills, shared memory, and the width of its accesses.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Utils:
    """The functions of a driver that a compiled kernel calls."""

    def load_binary(self, name, kernel, shared, device):
        """Return module, function, registers, spills and the maximal number of threads."""
        return 1, 1, 0, 0, 1024

    def unload_module(self, module):
        """Do nothing: no kernel is loaded."""

    def get_device_properties(self, device):
        """Return the properties of an H200."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class Device:
    """Driver of a GPU that does not exist."""

    def __init__(self, capability=90):
        self.target = GPUTarget("cuda", capability, 32)
        self.launcher_cls = lambda source, metadata: lambda *arguments: None  # a launch does nothing
        self.utils = Utils()

    def get_current_device(self):
        """Return the index of the only device."""
        return 0

    def get_current_stream(self, device):
        """Return the default stream."""
        return 0

    def get_current_target(self):
        """Return the compilation target."""
        return self.target


class Usage(NamedTuple):
    """Resources of one kernel: registers per thread, spilled bytes per thread, bytes of shared memory per program."""

    registers: int
    stack: int
    shared: int


def usage(cubin):
    """Return the resources that the machine code uses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        said = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = {name: int(re.search(rf"\b{name}:(\d+)", said)[1]) for name in ("REG", "STACK", "SHARED", "LOCAL")}
    return Usage(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], numbers["SHARED"])
