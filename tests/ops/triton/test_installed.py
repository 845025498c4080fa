"""Tests with Triton available, too old, broken, disabled or missing: the chosen backend, and its description."""

import os
import subprocess
import sys

import pytest
import torch

from addnorm.ops import eager, triton
from addnorm.ops.schema import SCHEMAS

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def forgetful():
    """Clear the caches before and after each test."""
    for cached in (triton.unavailable_reason, triton.implementation):
        cached.cache_clear()
    yield
    for cached in (triton.unavailable_reason, triton.implementation):
        cached.cache_clear()


def raising(error):
    """Return the `version` of a broken Triton, which raises an error."""

    def version():
        raise error

    return version


WRONG = {
    "Triton 3.5.1 is too old, expected 3.6 or newer": lambda: "3.5.1",
    "Triton cannot be used (ImportError: libtriton.so: undefined symbol)": raising(
        ImportError("libtriton.so: undefined symbol")
    ),
    "Triton cannot be used (AttributeError: no __version__)": raising(
        AttributeError("no __version__")
    ),  # an empty folder
    "Triton cannot be used (OSError: no space left)": raising(OSError("no space left")),
}


@pytest.mark.parametrize("reason", WRONG)
def test_unusable_triton_warns_once_and_uses_the_reference(monkeypatch, reason):
    monkeypatch.setattr(triton, "_version", WRONG[reason])
    with pytest.warns(RuntimeWarning) as warned:
        assert triton.implementation() is eager
    assert [str(one.message) for one in warned] == [
        f"addnorm runs without its Triton kernels: {reason}. Install another one with pip install 'addnorm[gpu]'."
    ]
    assert triton.implementation() is eager  # a second warning would be an error


@pytest.mark.parametrize("reason", WRONG)
def test_backends_says_it_too_and_does_not_warn(monkeypatch, reason):
    monkeypatch.setattr(triton, "_version", WRONG[reason])
    monkeypatch.setattr(triton, "REGISTERED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert triton.status() == (False, f"{reason}: pip install 'addnorm[gpu]'")


@pytest.mark.parametrize("version", ["3.6.0", "3.10.1+git1a2b3c", "4.0"])
def test_newer_ones_will_do(monkeypatch, version):
    monkeypatch.setattr(triton, "_version", lambda: version)
    assert triton.implementation().__name__ == "addnorm.ops.triton.operators"


@pytest.mark.parametrize(
    ("before", "environment", "detail"),
    [
        ("", {"ADDNORM_TRITON": "0"}, "switched off by ADDNORM_TRITON=0 in the environment"),
        ("sys.modules['triton'] = None", {}, "Triton is not installed: pip install 'addnorm[gpu]'"),
        (
            "sys.modules['triton'] = types.ModuleType('triton')",
            {},
            "Triton is not installed: pip install 'addnorm[gpu]'",
        ),
    ],
)
def test_a_process_without_triton_says_so(before, environment, detail):
    code = f"import sys, types\n{before}\nimport addnorm\nprint(addnorm.backends()[2].detail)"
    assert printed(code, environment) == detail


def test_every_operator_has_a_kernel_for_cuda():
    for name in SCHEMAS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"addnorm::{name}", "CUDA")


def test_cpu_calls_import_no_triton_and_use_no_cuda():
    code = """
import sys, torch
def asked(*arguments): raise AssertionError("a call to CUDA")
torch._C._cuda_init = torch.cuda.is_available = torch.cuda.device_count = asked
import addnorm
x = torch.randn(3, 4, requires_grad=True)
addnorm.add_layer_norm(x, x).sum().backward()
print("triton" in sys.modules, torch.cuda.is_initialized())
"""
    assert printed(code, {}) == "False False"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_backends_says_so():
    assert triton.status() == (False, f"Triton is installed, but torch {torch.__version__} sees no CUDA device")


def printed(code, environment):
    """Return the output of a subprocess in which warnings are errors."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()
