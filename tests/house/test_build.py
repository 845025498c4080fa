"""Tests of the build: without the C++ library on request, and never silently without it."""

import os
import shutil
import zipfile
from distutils.core import run_setup

import pytest
import setuptools  # noqa: F401  # brings the distutils that newer versions of Python lack

from support import ROOT
from support.processes import run_python


@pytest.fixture
def source(tmp_path):
    """Return a copy of the files that the build reads, so that nothing is built into the checkout."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    return tmp_path


def build_wheel(source, **environment):
    """Build a wheel as pip does, without pip; return the process and the wheels."""
    code = "from setuptools import build_meta; build_meta.build_wheel('out')"
    process = run_python("-c", code, cwd=source, env=os.environ | environment, check=False)
    return process, sorted((source / "out").glob("*.whl"))


def test_wheel_without_the_library_is_pure_python(source):
    process, wheels = build_wheel(source, ADDNORM_CPP="0")
    assert process.returncode == 0, process.stdout + process.stderr
    assert wheels[0].name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheels[0]).namelist()
    assert "addnorm/py.typed" in names
    assert "addnorm/ops/cpu.py" in names
    assert not [name for name in names if name.endswith((".so", ".cpp", ".h"))]


@pytest.mark.parametrize("node", ["0", None])
def test_wheel_leaves_out_the_node_on_request(monkeypatch, node):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("ADDNORM_CPP", raising=False)
    monkeypatch.delenv("ADDNORM_NODE", raising=False)
    if node is not None:
        monkeypatch.setenv("ADDNORM_NODE", node)
    extensions = {extension.name for extension in run_setup("setup.py", stop_after="init").ext_modules}
    assert extensions == {"addnorm._C"} | ({"addnorm._autograd"} if node is None else set())


def test_failing_compiler_fails_the_build(source):
    process, wheels = build_wheel(source, CC="false", CXX="false", ADDNORM_CPP="1")
    assert process.returncode != 0
    assert not wheels
    assert "set ADDNORM_CPP=0 to do without them" in process.stdout + process.stderr
