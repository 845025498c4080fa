"""Tests of bad inputs: each gives its exit code and one sentence, no traceback, and does no harm (bad_inputs.txt)."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from addnorm._util.optional import install_command
from addnorm_cli.group import addnorm as main
from support.hostile_files import make_hostile_files

FILE = Path(__file__).with_name("bad_inputs.txt")
LONG = "a" * 5000


# Each line with its exit code and its lines on stderr.
INPUTS = re.findall(r"^(\S.*)\n    (\d+)  (.*)$", re.sub("^#.*$", "", FILE.read_text(), flags=re.M), re.M)
# Packages that may be missing, each with a command that needs it. The model prints a line when it is made.
MISSING = {
    **dict.fromkeys(("transformers", "safetensors"), "inspect gpt2"), **dict.fromkeys(("starlette", "uvicorn"), "explore --port 0"),
    "jinja2": "inspect hostile:prints --report a.html", "matplotlib": "record hostile:prints --plots p",
    "pyarrow": "record hostile:prints --out run.parquet",
}  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    make_hostile_files(folder)
    return folder


@pytest.fixture
def folder(hostile, monkeypatch, one_thread):
    """Run in the folder of hostile files, on one thread and without a server."""
    monkeypatch.chdir(hostile)
    monkeypatch.syspath_prepend(str(hostile))
    monkeypatch.setattr("addnorm.explorer.server.serve", lambda *_: pytest.fail("it served"))
    return hostile


def tree_of(folder):
    """Return every path in a folder with its kind and its size."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, 0 if path.is_dir() else path.lstat().st_size)
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def run(line):
    """Return the exit code, the lines of stderr without the usage, and the result."""
    arguments = [word.replace("{long}", LONG) for word in shlex.split(line)]
    result = CliRunner().invoke(main, arguments, env={"COLUMNS": "100"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    lines = [text for text in result.stderr.splitlines() if text and not text.startswith(("Usage: ", "Try "))]
    return result.exit_code, " / ".join(lines), result


@pytest.mark.parametrize(("line", "expected_code", "expected"), INPUTS, ids=[line[:60] for line, *_ in INPUTS])
def test_bad_input_gives_one_sentence(line, expected_code, expected, folder):
    assert_refused(line, int(expected_code), expected, folder)


@pytest.mark.parametrize("package", MISSING)
def test_missing_package_is_named_before_the_work(package, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    sentence = f"Error: <*>{package}<*> is not installed<*>: {install_command(package)}."
    assert_refused(MISSING[package], 2, sentence, folder)


def assert_refused(line, expected_code, expected, folder):
    before = tree_of(folder)
    code, errors, result = run(line)
    pattern = ".*".join(map(re.escape, expected.split("<*>")))
    assert re.fullmatch(pattern, errors), errors
    assert code == expected_code
    assert code == 3 or result.stdout == ""
    changed = {path for path, _ in tree_of(folder).items() ^ before.items() if Path(path).name not in ("lock", "open")}
    assert not changed, "it changed files"
    assert Path("/dev/full").is_char_device()
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("command", ["inspect", "record", "decompose", "ablate"])
def test_prints_of_a_model_go_to_stderr(command, folder):
    _, errors, result = run(f"{command} hostile:prints --json")
    assert {*errors.split(" / ")} == {"hello from the model", "and from its forward"}
    assert result.stdout.startswith("{")


def test_all_inputs_are_read_and_each_is_listed_once():
    lines = [line for line in FILE.read_text().splitlines() if line and not line.startswith(("#", " "))]
    assert lines == [line for line, *_ in INPUTS]
    assert len({*lines}) == len(lines) > 200
    assert {shlex.split(line)[0] for line in lines} >= {*main.commands}
