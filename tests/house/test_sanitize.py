"""Tests that `make sanitize` detects faults: it runs a faulty library that is built and loaded in the same way."""

import shutil

import pytest

from support import SUPPORT, sanitize
from support.processes import run_python

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("sanitize") / "_C.so"
    sanitize.build([SUPPORT / "planted.cpp"], path)
    return path


@pytest.mark.parametrize(
    ("fault", "report"),
    [
        (1, "AddressSanitizer: heap-buffer-overflow"),
        (2, "AddressSanitizer: heap-buffer-overflow"),
        (3, "signed integer overflow"),
        (4, "outside the range of representable values"),
    ],
)
def test_fault_ends_the_process_with_a_report(fault, report, library):
    process = call(library, fault)
    assert process.returncode < 0, process.stderr
    assert report in process.stderr
    assert "planted.cpp" in process.stderr  # by file and line


def test_correct_library_reports_nothing(library):
    process = call(library, 0)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "C++ kernels for faults\n"
    assert process.stderr == ""


def test_run_fails_with_a_wrong_or_missing_library(library, monkeypatch, capfd):
    assert sanitize.run(library, ["--cases", "1"]) == 1  # y of this library is residual
    output = capfd.readouterr().out
    assert "== faults, AddressSanitizer and UBSan: run_kernels.py operation" in output
    assert output.endswith("== failed with 1\n")
    monkeypatch.setenv("ADDNORM_CPP", "0")
    assert sanitize.run(library, ["--cases", "1"]) == 1
    assert "was not loaded" in capfd.readouterr().out


def call(library, eps):
    code = f"import torch, addnorm; print(addnorm.backends()[1].detail); addnorm.layer_norm(torch.ones(5), eps={eps})"
    variables = sanitize.environment(library, "default")
    return run_python("-c", code, env=variables, check=False)
