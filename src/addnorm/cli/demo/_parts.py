"""Code that the parts of the demonstration share: headings, tables, the folder, the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path

from rich.console import Console
from rich.text import Text

from addnorm._util.blocks import Cell, Column, Span, Table, TableRow
from addnorm._util.render import print_blocks
from addnorm.lab import RunError
from addnorm.stream.models.hf import ModelLoadError

FOLDER = Path("addnorm-demo")
RECORDING = FOLDER / "minilm.json"

Part = Callable[[Console], bool | str | None]


def part(title: str, sentence: str) -> Callable[[Part], Part]:
    """Return the decorator of a part: it prints the title and what to look at.

    A part that is left out or cut short returns why, in a sentence.
    """

    def decorate(show: Part) -> Part:
        @wraps(show)
        def run(console: Console) -> bool | str | None:
            console.print(f"\n[bold]{title}[/]\n{sentence}")
            try:
                return show(console)
            except (ModelLoadError, ImportError, OSError, RunError) as error:
                reason = f"{str(error).rstrip('.')}."
                console.print(Text(reason, "yellow"))
                return reason

        return run

    return decorate


def print_table(console: Console, columns: Iterable[str], rows: Iterable[TableRow | Sequence[Cell]]) -> None:
    """Print a table. A column whose heading begins with ">" is aligned right."""
    described = [Column(name.removeprefix(">"), "right" if name.startswith(">") else None) for name in columns]
    print_blocks(console, Table(described, rows))


def mark(text: str, holds: bool) -> Span:
    """Return the text as a cell of a table, in red and with "!!" unless its proof holds."""
    return text if holds else (f"{text} !!", "bad")


def print_written(console: Console, path: Path) -> None:
    """Print where a file is."""
    console.print(Text(f"Written: {path.resolve()}"), soft_wrap=True)
