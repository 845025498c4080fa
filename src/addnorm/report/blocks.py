"""What a page is made of, as data: sections of blocks. It says nothing of how it looks, which is page.html and style.css.

Every text is plain text, and is escaped when the page is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from addnorm._util.numbers import format_column

__all__ = ["Block", "Cell", "Facts", "Figure", "Finding", "Findings", "Formula", "Page", "Section", "Shown", "Table"]

LONG = 36  # characters
Cell = str | float | None


@dataclass(frozen=True)
class Shown:
    """A cell as it is written."""

    text: str
    value: str = ""  # of a float every digit, for programs
    number: bool = False

    @property
    def long(self) -> bool:
        """Whether it may be broken into lines."""
        return len(self.text) > LONG


@dataclass(frozen=True)
class Table:
    """Rows of cells; the first cell of a row names it. A column that has numbers stands to the right.

    Args:
        head: the name of each column.
        rows: a cell for each column; None is an empty one.
        caption: what it shows.
        folded: whether only the caption is seen until somebody opens it.
        marked: numbers of rows that are wrong: they stand out.
    """

    kind: ClassVar[str] = "table"

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    folded: bool = False
    marked: Sequence[int] = ()

    def __post_init__(self) -> None:
        for place, row in enumerate(self.rows):
            if len(row) != len(self.head):
                raise ValueError(f"row {place} has {len(row)} cells, expected {len(self.head)}: one for each column.")

    @property
    def numeric(self) -> list[bool]:
        """Of each column whether it has numbers, and no text."""
        columns = [[row[k] for row in self.rows if row[k] is not None] for k in range(len(self.head))]
        return [bool(cells) and not any(isinstance(cell, str) for cell in cells) for cells in columns]

    @property
    def shown(self) -> list[list[Shown]]:
        """The rows, written."""
        numeric = self.numeric
        columns = [self._column([row[k] for row in self.rows], numeric[k]) for k in range(len(self.head))]
        return [list(row) for row in zip(*columns, strict=True)] if self.rows else []

    def _column(self, cells: list[Cell], numeric: bool) -> list[Shown]:
        if not numeric:
            return [Shown(cell if isinstance(cell, str) else format_column([cell])[0]) for cell in cells]
        texts = format_column([cell for cell in cells if not isinstance(cell, str)])
        values = [repr(cell) if isinstance(cell, float) else "" for cell in cells]
        return [Shown(text, value, True) for text, value in zip(texts, values, strict=True)]


@dataclass(frozen=True)
class Figure:
    """A drawing with the numbers behind it; `addnorm.report.figure.drawn` makes it.

    Args:
        title: what it shows.
        caption: how to read it, and what is seen, in a sentence or two.
        svg: the drawing, for a wide page.
        table: its numbers.
        narrow: the drawing for a narrow page; the same one if it is empty.
    """

    kind: ClassVar[str] = "figure"

    title: str
    caption: str
    svg: str
    table: Table
    narrow: str = ""


State = Literal["proved", "refuted", "noted"]


@dataclass(frozen=True)
class Finding:
    """A sentence, and whether it tells of a proof that holds, of one that does not, or of neither."""

    text: str
    state: State = "noted"


@dataclass(frozen=True)
class Findings:
    """Sentences below one another."""

    kind: ClassVar[str] = "findings"

    items: Sequence[Finding]


@dataclass(frozen=True)
class Formula:
    """Equations, a line each, and a text about them."""

    kind: ClassVar[str] = "formula"

    lines: Sequence[str]
    text: str = ""


@dataclass(frozen=True)
class Facts:
    """Names and what they are: settings, versions, seeds, the command."""

    kind: ClassVar[str] = "facts"

    items: Mapping[str, str]


Block = Table | Figure | Findings | Formula | Facts


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Args:
        title: also its line in the table of contents.
        lead: what the part is about; a paragraph, or nothing.
        blocks: in order.
    """

    title: str
    lead: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A report.

    Args:
        title: of what.
        subtitle: one sentence.
        verdict: what is to be known first.
        sections: in order.
        tiles: a few names and values that are shown large.
        foot: versions, date, command: the last lines.
    """

    title: str
    subtitle: str
    verdict: Sequence[Finding]
    sections: Sequence[Section]
    tiles: Mapping[str, str] = field(default_factory=dict)
    foot: Sequence[str] = ()
