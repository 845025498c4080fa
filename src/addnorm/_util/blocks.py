"""Paragraphs, tables and findings as data. `addnorm._util.render` shows them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from addnorm._util.numbers import format_column

Style = Literal["", "strong", "accent", "dim", "good", "warning", "bad"]
Span = str | tuple[str, Style]  # a text, or a text with its style
Cell = Span | float | None  # a float, also an int, is formatted with the other numbers of its column; None is empty
Align = Literal["left", "right"]

LONG = 36  # characters of a cell beyond which a page may wrap it

# The verdict of a claim that holds, of one that does not, and of one that was not judged.
VERDICTS: dict[bool | None, str] = {True: "proved", False: "refuted", None: "noted"}


@dataclass(frozen=True)
class Finding:
    """Claim about something that was measured, with its verdict.

    Attributes:
        claim: the claim, in a sentence.
        verdict: "proved", "refuted", "noted" where the sentence only states numbers, or a text if the claim has several parts.
        criterion: the rule that selected the sentence or decides the verdict.
        numbers: the measured numbers.
        topic: subject of the claim, for selection.

    Example:
        >>> from addnorm.report import Finding
        >>> Finding("The stream grows with depth.", "proved", "rms after the last layer above 2", "4.3").verdict
        'proved'
    """

    claim: str
    verdict: str = VERDICTS[None]
    criterion: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    topic: str = ""

    @property
    def sentence(self) -> str:
        """Same as `claim`."""
        return self.claim


class Paragraph:
    """Text of one or more lines.

    Args:
        spans: texts, and pairs of a text and its style.
        style: style of the whole text.
        indent: number of empty columns before every line.
        hang: number of further empty columns before every line but the first.
        space: leave an empty line above.
        width: number of columns at which the text wraps, also in a wider terminal.
    """

    def __init__(
        self, *spans: Span, style: Style = "", indent: int = 0, hang: int = 0, space: bool = False, width: int | None = None,
    ) -> None:  # fmt: skip
        self.spans = [*map(split_span, spans)]
        self.style, self.indent, self.hang, self.space, self.width = style, indent, hang, space, width

    def __str__(self) -> str:
        return "".join(text for text, _ in self.spans)


@dataclass(frozen=True)
class Column:
    """Heading and format of one column of a `Table`.

    Attributes:
        header: heading; it may have several lines.
        align: side on which the texts are aligned; None is right for a column of numbers, and left for others.
        fold: wrap long texts. Without `fold` every text stays on one line.
        drop: when the column is left out of a table that is wider than the terminal: "never", "first" (before the gaps between
            the columns become narrower) or "last" (after that). Of several such columns the rightmost is left out first.
        style: style of the column's texts.
    """

    header: str
    align: Align | None = None
    fold: bool = False
    drop: Literal["never", "first", "last"] = "never"
    style: Style = ""


@dataclass(frozen=True)
class TableRow:
    """Row of a `Table`: a cell for each column, and a style for the whole row.

    Example:
        >>> from addnorm.report import Table, TableRow
        >>> table = Table(["layer", "closure"], [TableRow(["1", "4e-8"]), TableRow(["2", "0.3"], "bad")])
        >>> len(table.rows)
        2
    """

    cells: Sequence[Cell]
    style: Style = ""


class CellText(NamedTuple):
    """Cell of a table as text.

    Attributes:
        text: the text.
        style: its style, without those of row and column.
        value: the number with all digits, for programs; empty unless the cell is a float in a column of numbers.
        is_number: whether the cell's column has numbers only.
    """

    text: str
    style: Style = ""
    value: str = ""
    is_number: bool = False

    @property
    def is_long(self) -> bool:
        """Whether a page may wrap the text."""
        return len(self.text) > LONG


class Table:
    """Table with a heading line.

    Args:
        columns: the columns, or their headings.
        rows: `TableRow`s, or sequences of cells. A row with fewer cells than columns is filled up with empty cells.
        caption: note below the table in a terminal. On a page it states what the table shows.
        collapsed: on a page, show only the caption until the reader opens the table.
        title: line above the table.
        indent: columns on the left of every line.

    Attributes:
        rows: the rows as lists of cells.
        styles: the styles of the rows.

    Raises:
        ValueError: a row has more cells than the table has columns.

    Example:
        >>> from addnorm.report import Table, TableRow
        >>> table = Table(["site", "rms"], [["attention", 1.25], TableRow(["mlp", 10.0], "bad")])
        >>> table.numeric, [cell.text for cell in table.texts[0]], table.styles
        ([False, True], ['attention', '1.25'], ['', 'bad'])
    """

    def __init__(
        self, columns: Iterable[Column | str], rows: Iterable[TableRow | Sequence[Cell]], caption: str = "",
        collapsed: bool = False, *, title: str = "", indent: int = 0,
    ) -> None:  # fmt: skip
        self.columns = [Column(item) if isinstance(item, str) else item for item in columns]
        self.caption, self.collapsed, self.title, self.indent = caption, collapsed, title, indent
        self.rows: list[list[Cell]] = []
        self.styles: list[Style] = []
        n = len(self.columns)
        for row in rows:
            cells, style = (row.cells, row.style) if isinstance(row, TableRow) else (row, "")
            if len(cells) > n:
                raise ValueError(f"a row has {len(cells)} cells, expected at most {n}, one for each column.")
            self.rows.append([*cells, *[None] * (n - len(cells))])
            self.styles.append(style)

    @cached_property
    def numeric(self) -> list[bool]:
        """Whether each column has numbers and no text."""
        columns = [[row[k] for row in self.rows if row[k] is not None] for k in range(len(self.columns))]
        return [bool(cells) and not any(isinstance(cell, str | tuple) for cell in cells) for cells in columns]

    @cached_property
    def aligned(self) -> list[Align]:
        """The alignment of each column."""
        return [
            item.align or ("right" if is_numeric else "left")
            for item, is_numeric in zip(self.columns, self.numeric, strict=True)
        ]

    @cached_property
    def texts(self) -> list[list[CellText]]:
        """The text of every cell, row by row."""
        columns = [self._texts_of(k) for k in range(len(self.columns))]
        return [list(row) for row in zip(*columns, strict=True)]

    def _texts_of(self, k: int) -> list[CellText]:
        """Return the texts of column `k`."""
        cells: list[Any] = [row[k] for row in self.rows]
        if self.numeric[k]:
            values = [repr(cell) if isinstance(cell, float) else "" for cell in cells]
            return [CellText(text, "", value, True) for text, value in zip(format_column(cells), values, strict=True)]
        return [
            CellText(*split_span(cell)) if isinstance(cell, str | tuple) else CellText(format_column([cell])[0])
            for cell in cells
        ]


@dataclass(frozen=True)
class Drawing:
    """SVG or HTML that only notebooks show.

    Attributes:
        markup: SVG or HTML, inserted as it is. Its texts must be escaped already.
    """

    markup: str


Block = Paragraph | Table | Finding | Drawing


def split_span(span: Span) -> tuple[str, Style]:
    """Return a span as a text and its style."""
    return (span, "") if isinstance(span, str) else span
