"""Tests that the C++ library uses only libtorch's stable C interface, so that one build runs with every supported torch."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

import addnorm
from addnorm.ops import cpu
from support import ROOT

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
def test_library_exports_only_what_the_package_calls():
    exported = [line.split()[-1] for line in output("nm", "-D", "--defined-only", str(cpu.LIBRARY)).splitlines()]
    ours = [name for name in exported if "addnorm" in name]
    assert sorted(ours) == [
        f"addnorm_{name}" for name in ("allow_reference", "backward", "forward", "forward_out", "isa")
    ]


def test_abi_target_equals_required_torch():
    target = re.search(r"kTorchVersion = 0x([0-9a-f]{16});", (ROOT / "csrc" / "libtorch.h").read_text())
    major, minor, patch = bytes.fromhex(target[1])[:3]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    torch_floors = [floor for floor in project["project"]["dependencies"] if floor.startswith("torch")]
    assert (torch_floors, patch) == ([f"torch>={major}.{minor}"], 0)
    assert project["build-system"]["requires"] == ["setuptools>=77"], "an isolated build downloads no torch"


@needs_library
def test_declarations_equal_those_of_torch(tmp_path):
    """A function that is declared twice with C linkage and other arguments or another result does not compile."""
    include = Path(torch.__file__).parent / "include"
    if not include.is_dir() or shutil.which("g++") is None:
        pytest.skip("needs torch's headers and g++")
    declarations = (ROOT / "csrc" / "libtorch.h").read_text()

    def compile_beside_torch(text):
        (tmp_path / "libtorch.h").write_text(text)
        (tmp_path / "both.cpp").write_text('#include <torch/csrc/stable/c/shim.h>\n#include "libtorch.h"\n')
        command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{include}", str(tmp_path / "both.cpp")]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert compile_beside_torch(declarations).stderr == ""
    assert (
        "conflicting declaration"
        in compile_beside_torch(declarations.replace("int64_t grain_size", "int32_t grain_size")).stderr
    )
    headers = "".join(
        (include / "torch/csrc" / name).read_text() for name in ("stable/c/shim.h", "inductor/aoti_torch/c/shim.h")
    )
    used = set(re.findall(r"\b(?:aoti_)?torch_\w+", output("nm", "-Du", str(cpu.LIBRARY))))
    assert len(used) > 20
    assert [name for name in used if f"{name}(" not in headers] == [], "the comparison sees all"


def test_version_equals_the_package():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == addnorm.__version__
