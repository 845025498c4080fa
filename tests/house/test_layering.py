"""Tests of imports: they go one way between folders and files, and importing addnorm imports torch and nothing else heavy."""

import ast
import json
import sys
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import addnorm
from support.processes import run_python

SOURCE = Path(addnorm.__file__).parent

# The layers, lowest first; a file may import from its own layer entry and from those on the lines above it.
LAYERS = (
    ("_util",),
    ("reference",),
    ("ops",),
    ("functional", "inplace", "boundary"),
    ("wirings",),
    ("nn",),
    ("stream",),
    ("fusion", "lab", "distributed"),
    ("onnx",),
    ("addnorm",),  # the public names, `from addnorm import record`
    ("report", "bench"),
    ("explorer",),
    ("cli",),
    ("__main__",),  # `python -m addnorm`
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
WITHIN = {("inplace", "functional")}  # neighbours of one layer that may import each other, in this direction
ALONE = {"trace"}  # folders that import nothing of addnorm, and that every other folder may import
FILES = sorted(SOURCE.rglob("*.py"))
GRAMMAR = SOURCE.parent / "addnorm_cli"  # beside the package, since help must not import torch


def module_of(path):
    """Return the dotted name of the module in a file."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path, modules):
    """Return addnorm's modules that a file imports anywhere: at the top, in a function, under TYPE_CHECKING."""
    package, names = ".".join(path.relative_to(SOURCE.parent).parent.parts), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return {name if name in modules else name.rpartition(".")[0] for name in names} & modules - {module_of(path)}


def folder_of(module):
    return module.split(".")[1] if "." in module else "addnorm"


def wrong_imports(importer, imported):
    """Return the imports of a module that go against the layers."""
    own = folder_of(importer)

    def is_allowed(folder):
        is_below = own not in ALONE and folder not in ALONE and LEVEL[folder] < LEVEL[own]
        return folder == own or folder in ALONE or is_below or (own, folder) in WITHIN

    return [module for module in sorted(imported) if not is_allowed(folder_of(module))]


def cycle_in(graph):
    """Return the modules of one import cycle, an empty list if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def folder_graph(graph):
    """Return the imports between the folders, and the files beside them, of each package inside the library."""
    folders = {}
    for importer, imported in graph.items():
        for module in imported:
            own, other = importer.split("."), module.split(".")
            shared = next((k for k, names in enumerate(zip(own, other, strict=False)) if names[0] != names[1]), 0)
            if shared > 1:  # the folders of the library itself have layers
                folders.setdefault(".".join(own[: shared + 1]), set()).add(".".join(other[: shared + 1]))
    return folders


@pytest.fixture(scope="module")
def graph():
    """Return each module's imports; a package's `__init__`, which only re-exports, counts as the names it gives."""
    modules = {module_of(path) for path in FILES}
    return {module_of(path): imported_modules(path, modules) for path in FILES}


def test_imports_go_one_way(graph):
    below = {name for layer in LAYERS[: LEVEL["addnorm"]] for name in layer}
    assert {folder_of(name) for name in graph["addnorm"]} <= below
    wrong = {name: wrong_imports(name, imported) for name, imported in graph.items() if name != "addnorm"}
    assert len(wrong) > 100
    assert {name: modules for name, modules in wrong.items() if modules} == {}


def test_no_import_cycle_between_files(graph):
    # The layer of the package itself is tested above; here, the files below it import its submodules.
    assert cycle_in(graph | {"addnorm": set()}) == []


def test_no_import_cycle_between_folders_in_packages(graph):
    folders = folder_graph(graph)
    assert folders["addnorm.stream.find"] == {"addnorm.stream.dataflow", "addnorm.stream.layout"}
    folders["addnorm.stream.record"] -= {
        "addnorm.stream.decompose",
        "addnorm.stream.ablate",
    }  # issue 38 moves the shares
    assert cycle_in(folders) == []


def test_no_file_is_longer_than_about_400_lines():
    assert {path.name: n for path in FILES if (n := len(path.read_text().splitlines())) > 420} == {}


def test_only_main_imports_the_grammar():
    importers = {path.name for path in FILES if "addnorm_cli" in path.read_text()}
    assert importers == {"__main__.py", "__init__.py"}  # the latter is the docstring of addnorm/cli


def test_grammar_imports_only_click():
    code = "import json, sys; import addnorm_cli.group; print(json.dumps(sorted(set(sys.modules))))"
    modules = {name.split(".")[0] for name in json.loads(run_python("-W", "error", "-c", code).stdout)}
    assert {"addnorm_cli", "click"} <= modules
    assert not {"addnorm", "numpy", "rich", "torch", "transformers"} & modules
    assert {path.stem for path in GRAMMAR.glob("*.py")} >= {"group", "command", "commands"}


def test_importing_addnorm_imports_only_torch():
    code = (
        "import json, sys; import torch; before = set(sys.modules); import addnorm;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    new = json.loads(run_python("-W", "error", "-c", code).stdout)
    ours = [name for name in new if name.split(".")[0] == "addnorm"]
    assert {name.split(".")[0] for name in new} - sys.stdlib_module_names <= {"addnorm", "torch"}
    assert not {folder_of(name) for name in ours} & {"cli", "bench", "report", "explorer", "lab"}
    # Modules of torch that torch itself imports late, because they are slow.
    assert not [name for name in new if name.startswith(("torch._dynamo", "torch._inductor", "torch.onnx"))]
