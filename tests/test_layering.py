"""Imports go one way, and importing addnorm imports torch and nothing else heavy."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import addnorm

SOURCE = Path(addnorm.__file__).parent

# What each room may import of ours, besides itself. `addnorm` is the public names, for those at the top.
BELOW = {
    "reference": set(),
    "ops": {"reference"},
    "functional": {"reference", "ops"},
    "inplace": {"reference", "ops", "functional"},
    "nn": {"reference", "ops", "functional"},
    "stream": {"reference", "ops", "functional", "nn"},
    "convert": {"reference", "ops", "functional", "nn", "stream"},
    "lab": {"reference", "ops", "functional", "nn", "stream"},
    "report": {"reference", "ops", "functional", "nn", "stream", "convert", "lab", "trace"},
    "trace": set(),
    "bench": {"reference", "ops", "functional", "nn", "stream", "convert", "lab", "addnorm"},
    "demo": {"reference", "ops", "functional", "nn", "trace", "bench", "addnorm", "stream", "convert", "lab", "report"},
}
BELOW["demo_stream"] = {"stream", "addnorm"}
BELOW["demo"] |= {"demo_stream"}
BELOW["demo_fuse"] = {"stream", "convert", "demo_stream", "addnorm"}
BELOW["demo"] |= {"demo_fuse"}
BELOW["cli_trace"] = {"trace"}
BELOW["cli_wirings"] = {"nn"}
BELOW["cli_stream"] = {"stream", "addnorm"}
BELOW["cli_record"] = {"stream", "cli_stream", "addnorm"}
BELOW["cli_report"] = {"stream", "report", "cli_stream", "cli_record", "addnorm"}
BELOW["cli_screen"] = set()
BELOW["cli_compare"] = {"nn", "lab", "report", "stream", "cli_wirings", "cli_screen", "addnorm"}
BELOW["demo_compare"] = {"lab", "report", "demo_stream", "stream", "addnorm"}
BELOW["demo"] |= {"demo_compare"}
BELOW["cli_fuse"] = {"stream", "convert", "cli_stream", "addnorm"}
BELOW["explorer"] = BELOW["report"] | {"report", "addnorm"}
BELOW["cli_explore"] = {"explorer", "stream"}
BELOW["cli"] = set(BELOW) | {"addnorm"}
FILES = sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    """The rooms of ours that a file imports, anywhere in it; a public name taken from `addnorm` is `addnorm`."""
    rooms = set()
    package = ("addnorm", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "addnorm":
                is_room = rest and ((SOURCE / rest[0]).is_dir() or (SOURCE / f"{rest[0]}.py").exists())
                rooms.add(rest[0] if is_room else "addnorm")
    return rooms - {room(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    if path.name == "__init__.py" and path.parent == SOURCE:
        assert imports(path) <= {"ops", "functional", "inplace", "nn", "stream", "convert"}
    else:
        assert room(path) in BELOW, f"{path.name} is a new room: say in BELOW what it stands on"
        assert imports(path) <= BELOW[room(path)]


def test_the_test_sees_an_import_that_goes_the_other_way(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    for name in ("reference.py", "functional.py", "ops/eager.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    wrong = tmp_path / "reference.py"
    for line in ("import addnorm.functional", "from addnorm import functional", "from .functional import layer_norm",
                 "from addnorm.functional import layer_norm", "def f():\n    from . import functional"):  # fmt: skip
        wrong.write_text(line)
        assert imports(wrong) == {"functional"}, line
    (tmp_path / "ops" / "eager.py").write_text("from ..functional import layer_norm\nfrom . import cpu\nimport addnorm")
    assert imports(tmp_path / "ops" / "eager.py") == {"functional", "addnorm"}


def test_no_file_is_longer_than_about_400_lines():
    assert {path.name: n for path in FILES if (n := len(path.read_text().splitlines())) > 420} == {}


def test_importing_addnorm_imports_torch_and_nothing_else_that_is_heavy():
    code = (
        "import json, sys; import torch; before = set(sys.modules); import addnorm;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    new = json.loads(done.stdout)
    ours = [name for name in new if name.split(".")[0] == "addnorm"]
    assert {name.split(".")[0] for name in new} - sys.stdlib_module_names <= {"addnorm", "torch"}
    rooms = {name.split(".")[1] for name in ours if "." in name}
    assert not rooms & {"cli", "bench", "demo", "report", "explorer", "lab"}
    # Nothing of torch that torch itself puts off for its weight.
    assert not [name for name in new if name.startswith(("torch._dynamo", "torch._inductor", "torch.onnx"))]
