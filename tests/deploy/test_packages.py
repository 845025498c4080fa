"""Tests that exported programs run without this library (decomposed), or with its C++ library alone."""

import json
import os

import pytest
import torch

import addnorm
from addnorm.ops import cpu
from support import SUPPORT
from support.deployed import dynamic
from support.processes import run_python
from support.stacks import encoder

pytestmark = pytest.mark.skipif(cpu.ISA is None, reason=f"the C++ kernels: {cpu.DETAIL}")
TOLERANCE = 2e-6  # of values of about 3, through two layers


def write_programs(folder, model, aoti=False):
    """Write a model's programs, and other inputs with what the model returns for them."""
    folder.mkdir()
    torch.manual_seed(0)
    width = 16
    x = torch.randn(2, 8, width)
    program = torch.export.export(model, (x,), dynamic_shapes=dynamic(1))  # in grad mode
    decomposed = program.run_decompositions(addnorm.decompositions())
    torch.export.save(program, folder / "operator.pt2")
    torch.export.save(decomposed, folder / "decomposed.pt2")
    if aoti:
        for name, one in (("operator", program), ("decomposed", decomposed)):
            with torch.no_grad():
                torch._inductor.aoti_compile_and_package(one, package_path=str(folder / f"{name}.aoti.pt2"))
    x = torch.randn(3, 5, width)
    torch.save((x, model(x).detach()), folder / "expected.pt")


def run_programs(*folders):
    """Run the programs of the folders in a process without the Python package, and return what it prints."""
    # From a folder and with a path in which the package is not found.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = (SUPPORT / "run_deployed.py", addnorm.library_path(), *folders)
    process = run_python("-I", *program, env=environment, cwd=folders[0])
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_programs_run_in_other_processes(tmp_path):
    folders = {"encoder": (encoder(), 0), "streams": (encoder(addnorm.wirings.mhc(n=2, iterations=2), 1), TOLERANCE)}
    for name, (model, _) in folders.items():
        write_programs(tmp_path / name, model)
    results = run_programs(*map(tmp_path.joinpath, folders))
    for name, (_, tolerance) in folders.items():
        assert results[f"{name}/decomposed.pt2 alone"] <= TOLERANCE
        assert isinstance(results[f"{name}/operator.pt2 alone"], str)  # torch's message: no such operator
        assert results[f"{name}/operator.pt2 with the library"] <= tolerance
    assert results["modules"] == []
    assert results["no rows"] == [0, 5, 16]
    assert "tensors (no features" in results["no features"]
    assert "import addnorm" in results["no features"]
    assert results["other shapes"].startswith("addnorm: invalid arguments")
    assert results["import afterwards"] in ("CppFunction", "AddNormFunctionBackward")
    assert "\n" not in results["no features"] + results["other shapes"]
    if torch.__version__ >= "2.12":
        assert "Tag.pt2_compliant_tag" in str(results["tags"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_programs_run_in_other_processes(tmp_path):
    write_programs(tmp_path / "encoder", encoder(), aoti=True)
    results = run_programs(tmp_path / "encoder")
    assert results["encoder/decomposed.aoti.pt2 alone"] <= TOLERANCE
    assert isinstance(results["encoder/operator.aoti.pt2 alone"], str)
    assert results["encoder/operator.aoti.pt2 with the library"] <= TOLERANCE


def test_library_loads_after_the_package(tmp_path):
    """The package was imported without it, so that it must not define the operators again."""
    code = (
        "import torch, addnorm; torch.ops.load_library(PATH); x = torch.ones(2, 4);"
        "assert addnorm.add_layer_norm(x, x).shape == x.shape"
    )
    code = code.replace("PATH", repr(str(addnorm.library_path())))
    run_python("-W", "error", "-c", code, env=os.environ | {"ADDNORM_CPP": "0"})


def test_library_path_names_the_reason(monkeypatch):
    monkeypatch.setattr(cpu, "ISA", None)
    monkeypatch.setattr(cpu, "DETAIL", "not built")
    with pytest.raises(RuntimeError, match=r"^The C\+\+ library of addnorm is not there, since it is not built\.$"):
        addnorm.library_path()


def test_library_of_another_version_is_refused(monkeypatch):
    from addnorm.ops import schema

    with pytest.raises(
        ImportError, match=r"^The C\+\+ library .* operator add_norm has other arguments: build it again"
    ):
        schema.define("add_norm(Tensor residual, Tensor other) -> Tensor")
