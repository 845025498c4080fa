"""Test that the kernels access no byte outside their tensors, with masked loads and stores too (support/run_guarded.py)."""

import itertools
import os
import signal
import subprocess
import sys

import pytest

from addnorm.ops import cpu
from support import SUPPORT
from support.capabilities import CAPABILITIES
from support.pairwise import mark_slow

pytestmark = pytest.mark.skipif(cpu.ISA is None, reason=f"the C++ kernels: {cpu.DETAIL}")


def run(capability, *arguments):
    command = [sys.executable, "-W", "error", str(SUPPORT / "run_guarded.py"), *arguments]
    variables = os.environ | {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("capability", "extent"),
    mark_slow(
        itertools.product(CAPABILITIES, ["cover", "full"]),
        [(name, "cover") for name in CAPABILITIES if name != "default"],
    ),
)
def test_kernels_access_no_byte_outside_a_tensor(capability, extent):
    """The kernels without vectors (`default`) have ordinary accesses, which AddressSanitizer detects: `make sanitize`."""
    done = run(capability, extent)
    assert done.returncode == 0, done.stdout + done.stderr[-300:]  # the last line names the call that crashed


def test_access_beyond_the_end_kills_the_process():
    assert run("default", "beyond").returncode == -signal.SIGSEGV
