"""Output and errors of all commands: consoles, JSON, notes, progress, exceptions with their exit codes."""

import re
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from addnorm._util import jsonio
from addnorm._util.blocks import Paragraph
from addnorm._util.files import UnwritableError, check_writable
from addnorm._util.render import WIDTH, Rendered, make_console, print_blocks

LONG = r"'[^']{200,}'"  # a value that is shortened in an error
PATIENCE, NEXT_LINE = 2.0, 10.0  # seconds until a step without output is announced, and between two lines about it


class ArgumentError(click.ClickException):
    """Error for a wrong argument, reported in one sentence without the usage text. Exit code 2."""

    exit_code = 2

    def __init__(self, message: object) -> None:
        text = re.sub(LONG, lambda quoted: f"{quoted[0][:100]}…'", str(message))
        super().__init__(f"{text.rstrip('.')}.")


class ProofError(click.ClickException):
    """Error for a proof that failed, or for a model in which there is nothing to prove. Exit code 3."""

    exit_code = 3


@contextmanager
def argument_errors(flags: Mapping[str, str] | None = None, words: Mapping[str, str] | None = None) -> Iterator[None]:
    """Report errors of the library about its arguments as an `ArgumentError`.

    Args:
        flags: {the library's argument: the command line's option}, replaced at the beginning of a message.
        words: {the library's word: the command line's word}, replaced anywhere.
    """
    try:
        yield
    except (ValueError, OverflowError, ImportError, UnwritableError) as error:
        sentence = name_flag(error, flags or {})
        for code, typed in (words or {}).items():
            sentence = sentence.replace(code, typed)
        raise ArgumentError(sentence) from None


def name_flag(error: object, flags: Mapping[str, str]) -> str:
    """Return an error's text. If it begins with an argument in `flags`, the argument is replaced by the option."""
    return re.sub(r"^\w+", lambda word: flags.get(word[0], word[0]), str(error))


def option_names() -> dict[str, str]:
    """Return the options of the running command by the names of the parameters of its `run`."""
    params = click.get_current_context().command.params
    return {f"{param.name}": param.opts[-1] for param in params if isinstance(param, click.Option)}


def stdout() -> Console:
    """Return the console for results. It is 100 columns wide where the width is not known, in a pipe for instance."""
    return make_console(width=WIDTH)


def stderr_if_terminal() -> Console | Literal[False]:
    """Return a console for progress on stderr, or False where stderr is not a terminal."""
    console = Console(stderr=True)
    return console if console.is_terminal else False


def print_json(document: Any) -> None:
    """Print a document on stdout as JSON."""
    click.echo(jsonio.dumps(document), nl=False)


def print_result(as_json: bool, document: Any, result: Rendered, *notes: str) -> None:
    """Print a result with notes below it, or its document as JSON."""
    if as_json:
        print_json(document)
        return
    console = stdout()
    console.print(result)
    print_notes(console, *notes)


def print_notes(console: Console, *sentences: str) -> None:
    """Print sentences below a table."""
    print_blocks(
        console, *(Paragraph(text, style="dim", space=not k) for k, text in enumerate(filter(None, sentences)))
    )


def print_unwrapped(console: Console, text: Text) -> None:
    """Print lines that must not be wrapped."""
    console.print(text, no_wrap=True, overflow="ignore", crop=False)


def print_message(sentence: str) -> None:
    """Print a sentence on stderr in one line."""
    make_console(stderr=True).print(Text(sentence), soft_wrap=True)


@contextmanager
def working(title: str, total: int | None = None, has_bar: bool = False) -> Iterator[Callable[[], None]]:
    """Show that a step is running: on a terminal at once, elsewhere in lines if it takes long.

    What a model prints goes to stderr, so that stdout has the result alone.

    Args:
        title: what runs.
        total: number of rounds to show. Each call of the yielded function counts one round.
        has_bar: the step shows a progress bar of its own on a terminal.
    """
    console, done, ended, start = make_console(stderr=True), 0, threading.Event(), time.monotonic()
    sentence = f"{title[:1].upper()}{title[1:]} ..."
    columns = [SpinnerColumn(), TextColumn("{task.description}")]
    columns += [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()] if total else []
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal or has_bar)
    task = bar.add_task(title if len(title) < 60 else f"{title[:58]}…", total=total)

    def announce() -> None:
        if not ended.wait(PATIENCE):
            print_message(sentence)
        while not ended.wait(NEXT_LINE):
            progress = f"{done} of {total} steps" if total else f"{time.monotonic() - start:.0f} s"
            print_message(f"{sentence} {progress}")

    def advance() -> None:
        nonlocal done
        done += 1
        bar.advance(task)

    if not console.is_terminal:
        threading.Thread(target=announce, daemon=True).start()
    try:
        with redirect_stdout(sys.stderr), bar:
            yield advance
    finally:
        ended.set()


def check_folder(path: Path, option: str) -> None:
    """Check that files can be written to the folder of an option, and make it.

    Raises:
        ArgumentError: no files can be written there.
    """
    try:
        check_writable(path / "file")
    except UnwritableError as error:
        if path.exists() and not path.is_dir():
            raise ArgumentError(f"{option} is '{path}', a file, expected a folder: choose another path") from None
        reason = re.search(r"\((.*)\)", str(error))
        raise ArgumentError(
            f"{option} is '{path}', where no files can be written ({reason[1] if reason else error}): choose another path"
        ) from None


def save_result(path: Path, write: Callable[[Path], object], option: str) -> None:
    """Write a result to the path of an option, or to a temporary folder where that fails, and say where it is.

    Args:
        path: the path.
        write: function that writes to a path and returns the written file, or None if it wrote several.
        option: the option.

    Raises:
        click.ClickException: the path cannot be written. The result is in the temporary folder, if that can be written.
    """
    try:
        file = write(path)
    except OSError as error:
        sentence = f"{option}: {error}"
        if isinstance(error, UnwritableError):
            sentence = name_flag(error, {"path": option}).rpartition(": ")[0]
        other = Path(tempfile.mkdtemp(prefix="addnorm-")) / path.name
        try:
            write(other)
        except OSError:
            raise click.ClickException(f"{sentence}, nor can '{other}': make room, and repeat the command.") from None
        raise click.ClickException(f"{sentence}: the result is in '{other}'.") from None
    if file is not None:
        print_message(f"Written: {file}")


def command_line() -> str:
    """Return the command that writes the same report again: its arguments, and the options that were set."""
    context = click.get_current_context()
    words = ["addnorm", str(context.info_name)]
    for param in sorted(context.command.params, key=lambda param: isinstance(param, click.Option)):
        value = context.params[f"{param.name}"]
        if context.get_parameter_source(f"{param.name}") is not ParameterSource.COMMANDLINE:
            continue
        texts = [*map(str, value)] if isinstance(value, tuple) else [str(value)]
        if isinstance(param, click.Option):
            texts = [param.opts[-1]] + [",".join(texts)] * (value is not True)
        words += texts
    return shlex.join(words)
