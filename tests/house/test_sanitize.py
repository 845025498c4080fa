"""Tests that `make sanitize` detects faults: it runs a faulty library that is built and loaded in the same way."""

import shutil
import subprocess
import sys

import pytest

from support import SUPPORT, sanitize

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
def test_a_fault_ends_the_process_with_a_report(fault, report, library):
    done = call(library, fault)
    assert done.returncode < 0, done.stderr
    assert report in done.stderr
    assert "planted.cpp" in done.stderr  # by file and line


def test_without_a_fault_nothing_is_reported(library):
    done = call(library, 0)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "C++ kernels for faults\n"
    assert done.stderr == ""


def test_the_run_fails_when_the_table_does_and_when_the_library_is_not_what_runs(library, monkeypatch, capfd):
    assert sanitize.run(library, ["--cases", "1"]) == 1  # y of this library is residual
    output = capfd.readouterr().out
    assert "== faults, AddressSanitizer and UBSan: run_table.py" in output
    assert output.endswith("== failed with 1\n")
    monkeypatch.setenv("ADDNORM_CPP", "0")
    assert sanitize.run(library, ["--cases", "1"]) == 1
    assert "was not loaded" in capfd.readouterr().out


def call(library, eps):
    code = f"import torch, addnorm; print(addnorm.backends()[1].detail); addnorm.layer_norm(torch.ones(5), eps={eps})"
    variables = sanitize.environment(library, "default")
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
