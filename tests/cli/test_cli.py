"""Tests of `addnorm trace`: its output, options and errors."""

import os
import warnings
from types import SimpleNamespace

import pytest

from addnorm.trace import PRESETS, trace
from support.commands import assert_one_sentence, document, run
from support.processes import run_python


@pytest.mark.parametrize("words", [("1,2,3", "0.5,-1,1.5"), ("--list",), ("1,x", "1,2")], ids=str)
def test_trace_works_without_torch(words):
    code = f"import sys; sys.modules['torch'] = None; from addnorm_cli import main; main(['trace', *{words!r}])"
    process = run_python("-c", code, env=os.environ | {"COLUMNS": "80"}, check=False)
    expected = run("trace", *words, COLUMNS="80")
    assert process.returncode == expected.exit_code
    assert (process.stdout, process.stderr) == (expected.stdout, expected.stderr)


def test_package_without_its_init_is_gone_afterwards():
    code = (
        "import sys; from addnorm_cli.command import _package_alone\n"
        "with _package_alone(): import addnorm.trace\n"
        "assert 'torch' not in sys.modules and not any(name.startswith('addnorm.') for name in sys.modules)\n"
        "import addnorm; before = dict(sys.modules)\n"
        "with _package_alone(): assert addnorm.add_layer_norm\n"
        "assert sys.modules == before"
    )
    run_python("-c", code)


def test_trace_prints_str_of_trace():
    assert run("trace", "--preset", "lesson-001", COLUMNS="80").stdout == f"{PRESETS['lesson-001'].trace()}\n"


@pytest.mark.parametrize(
    ("x", "sublayer"),
    [
        ("1.8 -0.3 0.8", "-1.36 0.91 1.07"),
        ("[1.8, -0.3, 0.8]", "[-1.36, 0.91, 1.07]"),
        (" 1.8 , -3e-1,.8 ", "-1.36,\t.91, 1.07"),
        ("1.8,\N{MINUS SIGN}0.3,0.8", "\N{MINUS SIGN}1.36,0.91,1.07"),
    ],
)
def test_trace_parses_vectors(x, sublayer):
    assert document("trace", x, sublayer)["output"] == list(trace([1.8, -0.3, 0.8], [-1.36, 0.91, 1.07]).output)


def test_trace_passes_every_option():
    options = "--placement pre --norm layer --gamma -1,2,3 --beta -.5 --eps 1e-3 --grad -1,0,1 --read-grad -2,0,0"
    more = "--variance unbiased --eps-place outside --digits 8"
    expected = trace(
        [-1, 2, 3], [-0.5, -1, 1.5], placement="pre", weight=[-1, 2, 3], bias=-0.5, eps=1e-3, grad=[-1, 0, 1],
        read_grad=[-2, 0, 0], variance="unbiased", eps_place="outside", digits=8,
    )  # fmt: skip
    assert document("trace", "-1,2,3", "-.5,-1,1.5", *options.split(), *more.split()) == expected.to_dict()
    changed = PRESETS["lesson-000"].trace(placement="pre", norm="rms")
    assert document("trace", "--preset", "lesson-000", "--placement", "Pre-LN", "--norm", "rms") == changed.to_dict()


def test_trace_list_names_presets():
    lines = run("trace", "--list", COLUMNS="80").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert max(map(len, lines)) <= 80
    assert [preset["name"] for preset in document("trace", "--list")] == list(PRESETS)


def test_deleted_working_directory_is_one_sentence(monkeypatch):
    def fail():
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("os.getcwd", fail)
    reason = "the working directory cannot be used (No such file or directory): cd to another."
    assert_one_sentence(run("trace", "--list"), 1, reason)


def test_warning_is_one_line(monkeypatch):
    def print_warning(**_):
        print(warnings.formatwarning(RuntimeWarning("no kernels."), RuntimeWarning, "cpu.py", 68), end="")

    monkeypatch.setattr("importlib.import_module", lambda _: SimpleNamespace(run=print_warning))
    assert run("trace", "--list").stdout == "Warning: no kernels.\n"
