"""Code that the parts of the demonstration share: headings, tables, the folder, the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from addnorm._util.blocks import Column, Span, Table, TableRow
from addnorm.cli._output import print_blocks
from addnorm.stream.models.hf import ModelLoadError
from addnorm.stream.models.load import LoadedModel, load

__all__ = [
    "FOLDER",
    "MODEL",
    "RECORDING",
    "load_minilm",
    "mark",
    "print_heading",
    "print_table",
    "print_warning",
    "print_written",
]

MODEL = "minilm"
FOLDER = Path("addnorm-demo")
RECORDING = FOLDER / "minilm.json"


def print_heading(console: Console, title: str, sentence: str) -> None:
    """Print a part's title, and what to look at."""
    console.print(f"\n[bold]{title}[/]")
    console.print(sentence)


def print_table(console: Console, columns: Iterable[str], rows: Iterable[TableRow | Sequence[Span]]) -> None:
    """Print a table. A column whose heading begins with ">" is aligned right."""
    described = [
        Column(heading.removeprefix(">"), "right" if heading.startswith(">") else "left") for heading in columns
    ]
    print_blocks(console, [Table(described, rows)])


def mark(text: str, holds: bool) -> Span:
    """Return a cell that is marked where its proof failed."""
    return text if holds else (f"{text} !!", "bad")


def print_written(console: Console, path: Path) -> None:
    """Print where a file is."""
    console.print(Text(f"Written: {path.resolve()}"), soft_wrap=True)


def print_warning(console: Console, error: object) -> None:
    """Print why a part is left out."""
    console.print(Text(f"{str(error).rstrip('.')}.", "yellow"))


def load_minilm(console: Console, texts: int | None = None) -> LoadedModel | None:
    """Return MiniLM with its texts, or the first of them; where it is not installed, print why and return None."""
    try:
        return load(MODEL, batch=texts)
    except ModelLoadError as error:
        print_warning(console, error)
        return None
