"""Tests of optional packages: the extra that installs a missing one is named."""

import sys
import tomllib
from pathlib import Path

import pytest

from addnorm._util.optional import EXTRAS, install_command, require


@pytest.mark.parametrize("module", ["pyarrow", "pyarrow.parquet"])
def test_missing_package_of_submodule_is_named(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(ImportError, match=r"^pyarrow is not installed, and is needed to write Parquet: .*\[data\]'$"):
        require(module, "write Parquet")


def test_broken_package_gives_its_reason(tmp_path, monkeypatch):
    (tmp_path / "onnx.py").write_text("raise ImportError('libonnx.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnx", raising=False)
    with pytest.raises(
        ImportError, match=r"^onnx cannot be imported \(libonnx.so: .*\), and is needed to compare: pip"
    ):
        require("onnx", "compare")


def test_extras_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        requirement = {"dask": "dask[distributed]", "distributed": "dask[distributed]"}.get(package, package)
        assert any(
            requirement_text.startswith(requirement) for requirement_text in project["optional-dependencies"][extra]
        ), package
        assert install_command(package) == f"pip install 'addnorm[{extra}]'"
