"""Calls of a command's code, which is imported when the command runs."""

from __future__ import annotations

import importlib
import threading
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
    if keep:
        keep_output()
    try:
        with _announced("Importing torch ..."), exit_at_signals():
            module = importlib.import_module(f"addnorm.cli.{name}")
    except ImportError as error:
        raise click.ClickException(f"addnorm cannot be imported ({error}): install it again with pip.") from error
    module.run(**options)


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
