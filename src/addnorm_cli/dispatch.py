"""Calls of a command's code, which is imported when the command runs."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from addnorm_cli.interrupts import exit_at_signals
from addnorm_cli.screen import keep_output

__all__ = ["run_command"]

PATIENCE = 2.0  # seconds after which a step without output is announced


def run_command(name: str, options: Mapping[str, Any], *, keep: bool = True) -> None:
    """Import the code of a command and call it.

    Args:
        name: of the command.
        options: its options.
        keep: the output is the result of work: if stdout cannot be written, it is saved in a file.
    """
    try:
        os.getcwd()  # noqa: PTH109  # where it was deleted, oneMKL ends the process while torch is imported
    except OSError as error:
        raise click.ClickException(f"the working directory cannot be used ({error.strerror}): cd to another.") from None
    if keep:
        keep_output()
    with _warnings_in_a_line():
        _import_code(name).run(**options)


def _import_code(name: str) -> Any:
    """Import the module of a command."""
    try:
        with _announced("Importing torch ..."), exit_at_signals():
            return importlib.import_module(f"addnorm.cli.{name}")
    except ImportError as error:
        raise click.ClickException(f"addnorm cannot be imported ({error}): install it again with pip.") from error


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Print warnings as a line without the place in the code."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextmanager
def _announced(sentence: str) -> Iterator[None]:
    """Print a sentence on stderr if the block takes long."""
    timer = threading.Timer(PATIENCE, click.echo, (sentence,), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
