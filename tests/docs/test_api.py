"""Tests of docs/api.md, which names what Sphinx reads from the docstrings, and of how the site shows a docstring."""

import importlib
import inspect
import re
from types import ModuleType

import addnorm
from support.loading import ROOT

PUBLIC = (
    "addnorm", "addnorm.distributed", "addnorm.lab", "addnorm.nn", "addnorm.onnx", "addnorm.report", "addnorm.stream", "addnorm.trace",
)  # fmt: skip
DIRECTIVE = re.compile(r"^\.\. (currentmodule|auto\w+):: ([\w.]+)$", re.M)


def entries():
    """Return the directive and the path of each entry of the page."""
    found, room = [], ""
    for directive, name in DIRECTIVE.findall((ROOT / "docs/api.md").read_text()):
        if directive == "currentmodule":
            room = name
        else:
            found.append((directive, name if "." in name else f"{room}.{name}"))
    return found


def value_of(path):
    room, _, name = path.rpartition(".")
    return getattr(importlib.import_module(room), name)


def test_every_public_name_has_one_entry():
    paths = [path for _, path in entries()]
    assert len(paths) == len({*paths})
    shown = [value_of(path) for path in paths]
    for room in PUBLIC:
        for name in importlib.import_module(room).__all__:
            value = value_of(f"{room}.{name}")
            assert f"{room}.{name}" in paths or any(value is one for one in shown), f"{room}.{name} has no entry"
    for path in paths:
        room, _, name = path.rpartition(".")
        assert room in PUBLIC
        assert name in importlib.import_module(room).__all__


def test_directive_fits_the_kind_of_each_name():
    for directive, path in entries():
        value = value_of(path)
        if isinstance(value, type):
            kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        else:
            kind = "automodule" if isinstance(value, ModuleType) else "autofunction" if callable(value) else "autodata"
        assert (directive, path) == (kind, path)
        assert kind == "autodata" or inspect.getdoc(value)


def test_public_modules_are_imported_at_first_use(monkeypatch):
    for room in {*PUBLIC[1:]} - {"addnorm.nn"}:
        name = room.partition(".")[2]
        monkeypatch.delattr(addnorm, name, raising=False)  # as in a fresh process
        assert getattr(addnorm, name).__name__ == room


def test_formula_of_a_docstring_is_a_literal_block():
    settings = {}
    exec((ROOT / "docs/_site/conf.py").read_text(), settings)
    lines = """First.

    y = x * w
    z = x

Text.

Args:
    x: a tensor

        of rows""".splitlines()
    settings["write_docstring"](None, "function", "f", None, None, lines)
    assert lines == ["First.", "", "::", "", "    y = x * w", "    z = x", "", "Text.", *lines[-5:]]
    assert lines[-5:] == ["", "Args:", "    x: a tensor", "", "        of rows"]
    lines = ["The norms |x| of `Row`s, as in f(**options).", "", "Example:", "    >>> abs(-2) | 1", "    3"]
    settings["write_docstring"](None, "function", "f", None, None, lines)
    assert lines[0] == r"The norms \|x\| of `Row`\ s, as in f(\*\*options)."
    assert lines[3] == "    >>> abs(-2) | 1"
