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
from click.testing import CliRunner

import addnorm
from addnorm.cli._output import ProofError, working
from addnorm.trace import PRESETS
from addnorm_cli import parameters
from addnorm_cli.group import COMPLETE
from addnorm_cli.group import addnorm as group
from addnorm_cli.interrupts import INTERRUPTED, TERMINATED
from addnorm_cli.output_guard import PIPE_CLOSED, keep_output
from addnorm_cli.parameters import ParameterError
from support.loading import ROOT

COMMANDS = [*group.commands]
FULL = Path("/dev/full")


def start(*arguments, **options):
    """Start a process of the command line."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "addnorm_cli", *arguments], text=True, **(pipes | options))


def finish(process):
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


# Help and version.


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_shows_examples(name):
    result = CliRunner().invoke(group, [name, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\\b" not in result.stdout
    assert result.stdout.startswith(f"Usage: addnorm {name} ")


def test_help_lists_commands_with_their_first_sentence():
    lines = CliRunner().invoke(group, ["--help"], env={"COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for name, command in group.commands.items():
        assert f"{name} {command.help.split(chr(10))[0]}" in text
    assert text.count("...") == 1  # of ARGS


def test_version_is_printed():
    code, stdout, _ = finish(start("--version"))
    assert (code, stdout) == (0, f"addnorm, version {addnorm.__version__}\n")


# Completion.


def complete(*words):
    """Return what the shell offers for the last word."""
    items = ShellComplete(group, {}, "addnorm", "_ADDNORM_COMPLETE").get_completions([*words[:-1]], words[-1])
    return [item.value for item in items if item.type == "plain"]


def test_names_to_complete_are_those_of_the_library():
    assert {wiring.name for wiring in addnorm.wirings.list_all()} == {*parameters.WIRINGS}
    assert [*PRESETS] == [*parameters.PRESETS]


def test_completed_model_types_are_those_of_transformers():
    pytest.importorskip("transformers")
    from addnorm.stream.models.load import model_types

    completed = {*parameters.list_model_types()}
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
    assert complete(*words) == expected


def test_completion_in_bash_offers_directories_too():
    environment = os.environ | {
        "COMP_WORDS": "addnorm inspect gpt2",
        "COMP_CWORD": "2",
        "_ADDNORM_COMPLETE": "bash_complete",
    }
    code, stdout, _ = finish(start(env=environment))
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


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_full_stdout_keeps_the_output_of_work(tmp_path):
    code = (
        "from addnorm_cli import main, command; from click import echo\n"
        "class Module: run = staticmethod(lambda **_: [echo('a' * 9000), echo('b')])\n"
        "command.importlib.import_module = lambda name: Module\n"
        "main(['demo'])"
    )
    with FULL.open("w") as full:
        process = subprocess.run(
            [sys.executable, "-c", code], check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )  # fmt: skip
    place = re.fullmatch(
        r"Error: stdout cannot be written \(No space left on device\): the output is in (.+)\.\n", process.stderr
    )
    assert process.returncode == 1
    assert Path(place[1]).read_text() == "a" * 9000 + "\nb\n"


def test_closed_stdout_is_one_sentence():
    process = subprocess.run(
        ["/bin/sh", "-c", f"exec {sys.executable} -m addnorm_cli --help >&-"],
        check=False,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    sentence = "Error: stdout is closed, expected a terminal, a file or a pipe: redirect it with > FILE.\n"
    assert (process.returncode, process.stderr) == (1, sentence)


def test_closed_stdin_and_stderr_do_no_harm():
    process = subprocess.run(
        ["/bin/sh", "-c", f"exec {sys.executable} -m addnorm_cli --version <&- 2>&-"], check=False, stdout=subprocess.PIPE, text=True,
        timeout=60,
    )  # fmt: skip
    assert (process.returncode, process.stdout) == (0, f"addnorm, version {addnorm.__version__}\n")


def test_pipe_that_is_not_read_ends_quietly():
    read, write = os.pipe()
    os.close(read)
    process = start("--help", stdout=write)
    os.close(write)
    assert finish(process)[::2] == (141, "")


def test_keeping_output_needs_no_guard(capsys):
    keep_output()
    print("as usual")
    assert capsys.readouterr().out == "as usual\n"


# Interrupts.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_interrupt_while_torch_is_imported(number, code, tmp_path):
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)")
    path = os.pathsep.join([str(tmp_path), str(Path(addnorm.__file__).parents[1])])
    process = start("inspect", "gpt2", env=os.environ | {"PYTHONPATH": path}, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    assert process.stdout.readline() == "importing\n"
    time.sleep(0.05)
    process.send_signal(number)
    assert finish(process) == (code, "", "Interrupted.\n")


def test_sigterm_in_code_from_a_string_has_its_code(tmp_path):
    """CPython would end by SIGINT, as a shell shows by 130: libraries make classes from strings while they are imported."""
    code = "exec('import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)')"
    (tmp_path / "torch.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), str(Path(addnorm.__file__).parents[1])])
    process = start("trace", "1,2", "3,4", env=os.environ | {"PYTHONPATH": path})
    assert finish(process) == (143, "", "Interrupted.\n")


def test_missing_torch_is_one_sentence(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is gone')")
    path = os.pathsep.join([str(tmp_path), str(Path(addnorm.__file__).parents[1])])
    code, stdout, stderr = finish(start("trace", "1,2", "3,4", env=os.environ | {"PYTHONPATH": path}))
    sentence = "Error: addnorm cannot be imported (libtorch.so is gone): install it again with pip.\n"
    assert (code, stdout, stderr) == (1, "", sentence)


@pytest.mark.parametrize("presses", [1, 2])
def test_interrupt_waits_for_an_import(presses, tmp_path):
    """torch and numpy swallow the exception in an import, and fail later for another reason: a second signal ends the process."""
    (tmp_path / "swallows.py").write_text("try:\n    import slow\nexcept BaseException:\n    pass\n")
    (tmp_path / "slow.py").write_text(
        f"print('importing', flush=True)\nimport time\ntime.sleep({[0, 0.5, 60][presses]})"
    )
    code = (
        "import click\nfrom addnorm_cli.group import addnorm\n@click.command()\ndef work():\n    import swallows\n"
        "    import time\n    time.sleep(60)\naddnorm.add_command(work)\naddnorm.main(['work'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 (no threads)
    )  # fmt: skip
    assert process.stdout.readline() == "importing\n"
    for _ in range(presses):
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "", "Interrupted.\n")


def test_interrupt_carries_what_is_kept():
    @click.command()
    def work():
        raise KeyboardInterrupt("Half of it is in x.")

    group.add_command(work, "work")
    try:
        result = CliRunner().invoke(group, ["work"])
    finally:
        del group.commands["work"]
    assert (result.exit_code, result.stderr) == (130, "Interrupted. Half of it is in x.\n")


# The page of the command line.


def test_page_has_the_exit_codes_and_the_lines_for_shells():
    page = (ROOT / "docs/command_line.md").read_text()
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    named = (0, 1, ParameterError.exit_code, ProofError.exit_code, INTERRUPTED, PIPE_CLOSED, TERMINATED)
    assert codes == [*named]
    for shell in ("bash", "zsh", "fish"):
        assert f"{COMPLETE}={shell}_source addnorm" in page
        environment = os.environ | {COMPLETE: f"{shell}_source"}
        code, stdout, _ = finish(start(env=environment))
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
