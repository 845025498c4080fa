"""Tests that the C++ library uses only libtorch's stable C interface, so that one build runs with every supported torch."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import addnorm
from addnorm.ops import cpu

ROOT = Path(__file__).resolve().parent.parent.parent

needs_library = pytest.mark.skipif(not cpu.LIBRARY.exists(), reason="the C++ library was not built (ADDNORM_CPP=0)")


def output(tool, *arguments):
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} (of binutils) is not installed")
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


@needs_library
def test_library_needs_no_unstable_torch_symbol():
    symbols = output("nm", "-DCu", str(cpu.LIBRARY))
    assert "aoti_torch_empty_strided" in symbols  # the stable interface, and a check that the list is not empty
    # Type names of torch's own namespaces (the headers of the stable one are inline).
    assert re.findall(r"\b(?:at|c10|caffe2|torch::autograd|torch::jit)::\w+", symbols) == []


@needs_library
def test_library_links_neither_openmp_nor_python():
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", str(cpu.LIBRARY)))
    assert any(name.startswith("libtorch_cpu") for name in needed)
    assert not [name for name in needed if re.match(r"lib(g|i)?omp|libiomp|libpython|libtorch_python|libc10", name)]
    assert not re.search(r"\b(omp_|GOMP_|__kmpc_|Py[A-Z_])", output("nm", "-Du", str(cpu.LIBRARY)))


@needs_library
def test_library_exports_only_what_python_calls():
    exported = [line.split()[-1] for line in output("nm", "-D", "--defined-only", str(cpu.LIBRARY)).splitlines()]
    ours = [name for name in exported if "addnorm" in name]
    assert sorted(ours) == ["addnorm_allow_reference", "addnorm_isa"]


def test_abi_target_equals_required_torch():
    target = re.search(r'^TORCH_TARGET_VERSION = "(0x[0-9a-f]{16})"$', (ROOT / "setup.py").read_text(), re.MULTILINE)
    major, minor, patch = bytes.fromhex(target[1][2:])[:3]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    floors = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    torch_floors = {requirement for requirement in floors if requirement.startswith("torch")}
    assert patch == 0
    assert torch_floors == {f"torch>={major}.{minor}"}


def test_version_equals_the_package():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == addnorm.__version__
