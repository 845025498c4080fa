"""Test that the kernels access no byte outside their tensors, with masked loads and stores too (support/run_guarded.py)."""

import os
import signal
import subprocess
import sys

import pytest

from addnorm.ops import cpu
from support import SUPPORT

pytestmark = pytest.mark.skipif(cpu.ISA is None, reason=f"the C++ kernels: {cpu.DETAIL}")


def run(capability, *arguments):
    command = [sys.executable, "-W", "error", str(SUPPORT / "run_guarded.py"), *arguments]
    variables = os.environ | {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_nothing_before_or_behind_a_tensor_is_touched(capability):
    done = run(capability)
    assert done.returncode == 0, done.stdout + done.stderr[-300:]  # the last line names the call that crashed


def test_a_byte_beyond_the_end_would_end_the_process():
    assert run("default", "beyond").returncode == -signal.SIGSEGV
