"""Tests of the package addnorm_cli: help, version, completion, and standard streams that fail."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

import addnorm
from addnorm._util.arguments import FLOAT_DTYPES
from addnorm._util.norms import KINDS
from addnorm.cli._output import ProofError, working
from addnorm.trace import PRESETS
from addnorm_cli import parameters
from addnorm_cli.group import COMPLETE
from addnorm_cli.group import addnorm as group
from addnorm_cli.interrupts import INTERRUPTED, TERMINATED
from addnorm_cli.output_guard import PIPE_CLOSED
from addnorm_cli.parameters import ParameterError
from support.commands import assert_words, each_end, run, succeed, without_announcements
from support.loading import ROOT

FULL = Path("/dev/full")


def start(*arguments, code=None, variables=(), **options):
    """Start a process of the command line, or of Python code, which Ctrl-C interrupts."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    program = ["-m", "addnorm_cli"] if code is None else ["-c", code]
    return subprocess.Popen(
        [sys.executable, *program, *arguments], text=True, env=os.environ | dict(variables), **(pipes | options),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 (no threads)
    )  # fmt: skip


def finish(process):
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, without_announcements(stderr)


# Help and version.


@pytest.mark.parametrize("name", group.commands)
def test_help_fits_80_columns_and_shows_examples(name):
    result = succeed(name, "--help", COLUMNS="80")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\\b" not in result.stdout
    assert result.stdout.startswith(f"Usage: addnorm {name} ")


def test_help_lists_commands_with_their_first_sentence():
    text = run("--help", COLUMNS="80").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert_words(text, *(f"{name} {command.help.split(chr(10))[0]}" for name, command in group.commands.items()))
    assert text.count("...") == 1  # of ARGS


# Completion.


def test_names_to_complete_are_those_of_the_library():
    assert sorted(wiring.name for wiring in addnorm.wirings.list_all()) == parameters.WIRING.names()
    assert sorted(PRESETS) == parameters.PRESET.names()


def test_completed_model_types_are_those_of_transformers():
    from addnorm.stream.models.load import model_types

    completed = {*parameters.MODEL.names()}
    missing = {*model_types()} - completed
    assert len(missing) < 0.02 * len(completed)
    assert {"bert", "gpt2", "llama", "t5", "xlm-roberta"} <= completed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("in",), ["inspect"]),
        (("compare", "pre_ln", "deep"), ["deepnorm"]),
        (("wirings", "layer"), ["layer_scale", "layernorm_scaling"]),
        (("trace", "--preset", "lesson"), ["lesson-000", "lesson-001"]),
        (("inspect", "gpt2", "--dtype", "b"), ["bfloat16"]),
        (("fuse", "minil"), ["minilm"]),
        (("record", "gpt2", "--mem"), ["--memory-map"]),
    ],
    ids=" ".join,
)
def test_completion_offers(words, expected):
    items = ShellComplete(group, {}, "addnorm", COMPLETE).get_completions([*words[:-1]], words[-1])
    assert [item.value for item in items if item.type == "plain"] == expected


@pytest.mark.parametrize(
    ("command", "option", "expected"),
    [("compare", "norm", KINDS), ("inspect", "dtype", [str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES])],
)
def test_choices_are_those_of_the_library(command, option, expected):
    """The command line has them a second time, since it is parsed without importing torch."""
    (kind,) = {param.type for param in group.get_command(None, command).params if param.name == option}
    assert {*kind.names()} == {*expected}


def test_completion_in_bash_offers_directories_too():
    variables = {"COMP_WORDS": "addnorm inspect gpt2", "COMP_CWORD": "2", COMPLETE: "bash_complete"}
    code, stdout, _ = finish(start(variables=variables))
    assert code == 0
    assert stdout.splitlines()[:2] == ["dir,gpt2", "plain,gpt2"]


# Standard streams that fail.


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("inspect", "--help")], ids=" ".join)
def test_full_stdout_is_one_sentence(arguments):
    with FULL.open("w") as full:
        code, _, stderr = finish(start(*arguments, stdout=full))
    sentence = "Error: stdout cannot be written (No space left on device): choose another file or device.\n"
    assert (code, stderr) == (1, sentence)


WORK = """
from addnorm_cli import main, command; from click import echo
class Module: run = staticmethod(lambda **_: [echo('a' * 9000), echo('b')])
command.importlib.import_module = lambda name: Module
main(['demo'])
"""


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_full_stdout_keeps_the_output_of_work(tmp_path):
    with FULL.open("w") as full:
        code, _, stderr = finish(start(code=WORK, stdout=full, variables={"TMPDIR": str(tmp_path)}))
    sentence = r"Error: stdout cannot be written \(No space left on device\): the output is in (.+)\.\n"
    assert code == 1
    assert Path(re.fullmatch(sentence, stderr)[1]).read_text() == "a" * 9000 + "\nb\n"


@pytest.mark.parametrize(
    ("closed", "code", "stdout", "stderr"),
    [
        (">&-", 1, "", "Error: stdout is closed, expected a terminal, a file or a pipe: redirect it with > FILE.\n"),
        ("<&- 2>&-", 0, f"addnorm, version {addnorm.__version__}\n", ""),
    ],
)
def test_closed_streams(closed, code, stdout, stderr):
    command = f"exec {sys.executable} -m addnorm_cli --version {closed}"
    process = subprocess.run(["/bin/sh", "-c", command], check=False, capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout, process.stderr) == (code, stdout, stderr)


# Interrupts.


@pytest.fixture
def modules(tmp_path):
    """Return a function that writes modules by their names, and returns the variables of a process that imports them."""

    def write(**sources):
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        return {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    return write


SLOW = "print('importing', flush=True)\nimport time\ntime.sleep({})"
KILL = "exec('import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)')"


@each_end
def test_interrupt_while_torch_is_imported(number, code, modules):
    process = start("inspect", "gpt2", variables=modules(torch=SLOW.format(60)))
    assert process.stdout.readline() == "importing\n"
    time.sleep(0.05)
    process.send_signal(number)
    assert finish(process) == (code, "", "Interrupted.\n")


def test_sigterm_in_code_from_a_string_has_its_code(modules):
    """CPython would end by SIGINT, as a shell shows by 130: libraries make classes from strings while they are imported."""
    assert finish(start("inspect", "gpt2", variables=modules(torch=KILL))) == (143, "", "Interrupted.\n")


def test_missing_torch_is_one_sentence(modules):
    variables = modules(torch="raise ImportError('libtorch.so is gone')")
    sentence = "Error: addnorm cannot be imported (libtorch.so is gone): install it again with pip.\n"
    assert finish(start("inspect", "gpt2", variables=variables)) == (1, "", sentence)


IMPORTING = """
import click
from addnorm_cli.group import addnorm
@click.command()
def work():
    import swallows
    import time
    time.sleep(60)
addnorm.add_command(work)
addnorm.main(['work'])
"""


@pytest.mark.parametrize(("presses", "seconds"), [(1, 0.5), (2, 60)])
def test_interrupt_waits_for_an_import(presses, seconds, modules):
    """torch and numpy swallow the exception in an import, and fail later for another reason: a second signal ends the process."""
    swallows = "try:\n    import slow\nexcept BaseException:\n    pass\n"
    process = start(code=IMPORTING, variables=modules(swallows=swallows, slow=SLOW.format(seconds)))
    assert process.stdout.readline() == "importing\n"
    for _ in range(presses):
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "", "Interrupted.\n")


LOST = """
import os, signal, sys, time
import click
from addnorm_cli.group import addnorm
class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
@click.command()
@click.argument("kind")
def work(kind):
    if kind == "del":
        Dropped()
        time.sleep(60)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        raise ValueError("the file is corrupt") from None
addnorm.add_command(work)
addnorm.main(["work", *sys.argv[1:]])
"""


@pytest.mark.parametrize("kind", ["del", "error"])
def test_interrupt_that_a_library_loses_ends_the_command(kind):
    """In `__del__` Python drops it, and safetensors makes another error of it, which says that the file is corrupt."""
    assert finish(start(kind, code=LOST)) == (130, "", "Interrupted.\n")


def test_interrupt_carries_what_is_kept():
    @click.command()
    def work():
        raise KeyboardInterrupt("Half of it is in x.")

    group.add_command(work, "work")
    try:
        result = run("work")
    finally:
        del group.commands["work"]
    assert (result.exit_code, result.stderr) == (130, "Interrupted. Half of it is in x.\n")


@pytest.mark.parametrize("arguments", [("--help",), ("wirings",), ("trace", "1,2", "2,3")], ids=" ".join)
def test_reader_that_goes_ends_the_command(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    process = start(*arguments, stdout=writing)
    os.close(writing)
    assert finish(process) == (PIPE_CLOSED, None, "")


# The page of the command line.


def test_page_has_the_exit_codes_and_the_lines_for_shells():
    page = (ROOT / "docs/command_line.md").read_text()
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    named = (0, 1, ParameterError.exit_code, ProofError.exit_code, INTERRUPTED, PIPE_CLOSED, TERMINATED)
    assert codes == [*named]
    for shell in ("bash", "zsh", "fish"):
        assert f"{COMPLETE}={shell}_source addnorm" in page
        code, stdout, _ = finish(start(variables={COMPLETE: f"{shell}_source"}))
        assert code == 0
        assert COMPLETE in stdout


def test_long_step_says_how_long_it_has_run(monkeypatch, capsys):
    monkeypatch.setattr("addnorm.cli._output.PATIENCE", 0.01)
    monkeypatch.setattr("addnorm.cli._output.NEXT_LINE", 0.05)
    with working("fuse a model"):
        time.sleep(0.4)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Fuse a model ..."
    assert len(lines) > 2
    assert all(re.fullmatch(r"Fuse a model \.\.\. \d+ s", line) for line in lines[1:])
