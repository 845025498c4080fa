"""Tests of the kernels of n streams: every instruction set is accurate and accesses no byte outside a tensor."""

import os
import subprocess
import sys

import pytest

from addnorm.ops import cpu
from support import SUPPORT
from support.capabilities import CAPABILITIES

pytestmark = pytest.mark.skipif(cpu.ISA is None, reason=f"the C++ kernels: {cpu.DETAIL}")


@pytest.mark.parametrize("extent", ["cover", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_each_instruction_set_is_accurate_and_guarded(capability, extent):
    """ADDNORM_POISON fills the library's allocations with NaN, so that an element that was not written differs from float64."""
    variables = {"ATEN_CPU_CAPABILITY": capability, "ADDNORM_POISON": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(SUPPORT / "run_streams.py"), extent]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-300:]  # the last line names the call that crashed
