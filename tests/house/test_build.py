"""Tests of the build: without the C++ library on request, and never silently without it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def source(tmp_path):
    """Return a copy of the files that the build reads, so that nothing is built into the checkout."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    return tmp_path


def wheel(source, **environment):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "-w",
        "out",
        ".",
    ]
    done = subprocess.run(
        command, cwd=source, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    return done, sorted((source / "out").glob("*.whl"))


def test_without_the_library_the_wheel_is_pure_python(source):
    done, wheels = wheel(source, ADDNORM_CPP="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert wheels[0].name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheels[0]).namelist()
    assert "addnorm/py.typed" in names
    assert "addnorm/ops/cpu.py" in names
    assert not [name for name in names if name.endswith((".so", ".cpp", ".h"))]


def test_a_compiler_that_fails_fails_the_build_and_says_what_to_do(source):
    done, wheels = wheel(source, CC="false", CXX="false", ADDNORM_CPP="1")
    assert done.returncode != 0
    assert not wheels
    assert "set ADDNORM_CPP=0 to do without them" in done.stdout + done.stderr
