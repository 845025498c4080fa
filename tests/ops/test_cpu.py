"""Tests of the C++ kernels: every instruction set is accurate, and accesses no unwritten memory and no byte outside a tensor."""

import os
import signal

import pytest
import torch

import addnorm
from addnorm.ops import cpu
from support.capabilities import CAPABILITIES, NAMES
from support.marks import needs_kernels
from support.processes import run_python

TABLES = "operation", "streams", "reads"
# One process for all tables, since each process imports torch anew.
CHECK = """
import sys
from support import run_kernels
sys.exit(max([run_kernels.main(table, *words) for table in tables]))
"""


def run_kernels(*tables, extent, **variables):
    """Check tables of support/run_kernels.py in a process with these environment variables."""
    program = f"tables, words = {tables}, {[extent]}{CHECK}"
    return run_python("-W", "error", "-c", program, env=os.environ | {"OMP_NUM_THREADS": "1"} | variables, check=False)


EXTENTS = [pytest.param("cover"), pytest.param("full", marks=pytest.mark.slow)]


@needs_kernels
@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_instruction_set_is_accurate_and_guarded(capability, extent):
    """ADDNORM_POISON fills the library's allocations with NaN, so that an element that was not written differs from float64."""
    done = run_kernels(*TABLES, extent=extent, ATEN_CPU_CAPABILITY=capability, ADDNORM_POISON="1")
    assert done.returncode == 0, done.stdout + done.stderr[-300:]  # the last line names the call that crashed
    names = list(NAMES.values())
    ran = names.index(done.stdout.splitlines()[0].removeprefix("C++ kernels for "))
    wish = names.index(CAPABILITIES[capability])
    assert ran <= wish if "ATEN_CPU_CAPABILITY" in os.environ else ran == min(wish, names.index(cpu.ISA))


def test_access_beyond_the_end_kills_the_process():
    assert run_kernels("beyond", extent="cover").returncode == -signal.SIGSEGV


@pytest.mark.parametrize("extent", EXTENTS)
def test_operation_works_without_the_cpp_library(extent):
    done = run_kernels("operation", extent=extent, ADDNORM_CPP="0")
    assert done.returncode == 0, done.stdout + done.stderr[-300:]
    assert done.stdout.startswith("switched off by ADDNORM_CPP=0")


def test_backends_names_what_is_there():
    reference, kernels, gpu = addnorm.backends()
    assert reference == ("reference", True, "eager torch, every device, every option")
    assert (kernels.name, kernels.available) == ("cpu", cpu.ISA is not None)
    assert gpu.available <= torch.cuda.is_available()


def test_broken_library_gives_one_warning_and_a_reason(tmp_path, monkeypatch):
    broken = tmp_path / "_C.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(cpu, "LIBRARY", broken)
    monkeypatch.delenv("ADDNORM_CPP", raising=False)
    with pytest.warns(RuntimeWarning, match="runs without its CPU kernels.*reinstall"):
        isa, reason = cpu.load()
    assert isa is None
    assert "does not load with torch" in reason
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "absent.so")
    assert cpu.load() == (
        None,
        "not in this installation, which has no kernels: install from source with a C++ compiler",
    )
