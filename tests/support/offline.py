"""Triton's compiler without a GPU: kernels are compiled for a real one (sm_90, H100 and H200), loaded nowhere and launched nowhere.

What a compiled kernel needs is read from its machine code: registers, what it spills, shared memory, how wide its accesses are.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Launches:
    """A launcher that launches nothing, and counts."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, int, int]] = []

    def __call__(self, source: Any, metadata: Any) -> Any:
        """What Triton makes once for each kernel."""

        def launch(x: int, y: int, z: int, *arguments: Any) -> None:
            self.grids.append((x, y, z))

        return launch


class Utils:
    """Of a driver what a compiled kernel asks for."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, threads at most."""
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        """Nothing was loaded."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Of an H200."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class Device:
    """A driver of a GPU that is not there."""

    def __init__(self, capability: int = 90) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.launches = Launches()
        self.launcher_cls = self.launches
        self.utils = Utils()

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target


class Usage(NamedTuple):
    """Of one kernel: registers a thread, bytes a thread that registers did not hold, bytes of shared memory a program."""

    registers: int
    stack: int
    shared: int


def usage(cubin: bytes) -> Usage:
    """What the machine code needs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        said = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(re.search(rf"\b{name}:(\d+)", said)[1]) for name in ("REG", "STACK", "SHARED", "LOCAL")}
    return Usage(found["REG"], found["STACK"] + found["LOCAL"], found["SHARED"])
