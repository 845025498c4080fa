"""Tests of the trace as a table, as data and as an object; it needs the standard library only."""

import json
import re
from pathlib import Path

import pytest

import addnorm
from addnorm.trace import PRESETS, trace
from support.processes import run_python
from support.trace_variants import SUBLAYER, X


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_table_fits_80_columns(preset):
    followed = preset.trace()
    lines = str(followed).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if re.match(r"[a-z_]+  ", line)] == [step.name for step in followed]


def test_show_shortens_long_vectors():
    followed = trace(range(1000), [1.0] * 1000, placement="pre")
    assert max(map(len, str(followed).splitlines())) <= 80
    assert len(followed.to_dict()["output"]) == 1000
    assert "(1000 numbers)" in str(followed)


def test_to_dict_is_json_with_version():
    followed = PRESETS["lesson-001"].trace()
    data = json.loads(json.dumps(followed.to_dict(), allow_nan=False))
    assert (data["schema"], data["schema_version"]) == ("addnorm.trace", 1)
    assert data["output"] == list(followed.output)
    assert {step["name"]: step["value"] for step in data["steps"]} == {
        step.name: list(step.value) if isinstance(step.value, tuple) else step.value for step in followed
    }


def test_trace_is_indexed_by_name():
    followed = trace(X, SUBLAYER)
    assert "mean" in followed
    assert "mode" not in followed
    with pytest.raises(KeyError, match="'mode' is no step of this trace, expected one of: x, sublayer, z, mean"):
        followed["mode"]


def test_trace_imports_only_the_standard_library():
    folder = Path(addnorm.__file__).parent / "trace"
    code = """
import importlib.util, pathlib, sys
folder = pathlib.Path(sys.argv[1])
places = {"submodule_search_locations": [str(folder)]}
spec = importlib.util.spec_from_file_location("alone", folder / "__init__.py", **places)
alone = sys.modules["alone"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(alone)
print(alone.PRESETS["lesson-000"].trace()["z"].value)
"""
    # -S: no installed packages at all
    assert run_python("-I", "-S", "-c", code, folder).stdout == "(1.5, 1.0, 4.5)\n"
