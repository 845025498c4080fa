"""Tests with Triton available, too old, broken, disabled or missing: the chosen backend, and its description."""

import json

import pytest
import torch

from addnorm.ops import eager, triton
from addnorm.ops.schema import SCHEMAS
from addnorm.ops.streams import eager as streams
from addnorm.ops.streams.schema import SCHEMAS as STREAMS
from support.processes import run_python

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def cleared_caches():
    """Clear the caches before and after each test."""
    for cached in (triton.unavailable_reason, triton.kernels):
        cached.cache_clear()
    yield
    for cached in (triton.unavailable_reason, triton.kernels):
        cached.cache_clear()


def find_no_space():
    raise OSError("no space left")


WRONG = {
    "Triton 3.5.1 is too old, expected 3.6 or newer": lambda: "3.5.1",
    "Triton cannot be used (OSError: no space left)": find_no_space,  # any exception
}


@pytest.mark.parametrize("reason", WRONG)
def test_unusable_triton_warns_once_and_uses_the_reference(monkeypatch, reason):
    """The status gives the reason without a warning."""
    monkeypatch.setattr(triton, "_version", WRONG[reason])
    monkeypatch.setattr(triton, "REGISTERED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert triton.status() == (False, f"{reason}: pip install 'addnorm[gpu]'")
    with pytest.warns(RuntimeWarning) as warned:
        assert triton.kernels()["add_norm_forward"] is eager.add_norm_forward
    assert [str(warning.message) for warning in warned] == [
        f"addnorm runs without its Triton kernels: {reason}. Install another one with pip install 'addnorm[gpu]'."
    ]
    assert triton.kernels()["add_norm_streams"] is streams.add_norm_streams  # a second warning would be an error


@pytest.mark.parametrize("version", ["3.6.0", "3.10.1+git1a2b3c", "4.0"])
def test_newer_triton_is_used(monkeypatch, version):
    monkeypatch.setattr(triton, "_version", lambda: version)
    assert {kernel.__module__ for kernel in triton.kernels().values()} == {
        "addnorm.ops.triton.operators", "addnorm.ops.triton.gradients", "addnorm.ops.triton.streams.operators"
    }  # fmt: skip


MISSING = "Triton is not installed: pip install 'addnorm[gpu]'"
# Each case runs in a fork of one process that has imported torch: statements, and what they print.
PROCESSES = {
    "disabled": (
        "os.environ['ADDNORM_TRITON'] = '0'\nimport addnorm\nprint(addnorm.backends()[2].detail)",
        "switched off by ADDNORM_TRITON=0 in the environment",
    ),
    "missing": ("sys.modules['triton'] = None\nimport addnorm\nprint(addnorm.backends()[2].detail)", MISSING),
    "another module": (
        "sys.modules['triton'] = types.ModuleType('triton')\nimport addnorm\nprint(addnorm.backends()[2].detail)", MISSING
    ),
    "CPU calls import no Triton and use no CUDA": (
        """
def raise_error(*arguments): raise AssertionError("a call to CUDA")
torch._C._cuda_init = torch.cuda.is_available = torch.cuda.device_count = raise_error
import addnorm
x = torch.randn(3, 4, requires_grad=True)
addnorm.add_layer_norm(x, x).sum().backward()
print("triton" in sys.modules, torch.cuda.is_initialized())
""",
        "False False",
    ),
}  # fmt: skip
RUN = """
import json, os, sys, torch, types
for code in json.load(sys.stdin):
    if os.fork() == 0:
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1]:
        sys.exit(1)
"""


def test_processes_without_triton_give_the_reason():
    """Warnings are errors in these processes, except Python's about forks."""
    flags = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")
    codes = json.dumps([code for code, _ in PROCESSES.values()])
    process = run_python(*flags, "-c", RUN, input=codes)
    assert dict(zip(PROCESSES, process.stdout.splitlines(), strict=True)) == {
        name: output for name, (_, output) in PROCESSES.items()
    }


def test_every_operator_has_a_kernel_for_cuda():
    for name in (*SCHEMAS, *STREAMS):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"addnorm::{name}", "CUDA")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_status_without_a_device():
    assert triton.status() == (False, f"Triton is installed, but torch {torch.__version__} sees no CUDA device")
