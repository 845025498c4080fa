"""Paragraphs, tables and findings: described once, rendered for terminals (rich), notebooks (HTML), plain text and Markdown.

A class with a display derives from `Rendered` and yields its blocks:

    class Report(Rendered):
        def _blocks(self):
            yield Paragraph(("Model", "strong"), ": 2 sublayers")
            yield Table(["site", "rms"], [["attention", 1.02], TableRow(["mlp", math.nan], "bad")])
            yield Finding("The stream is the sum of all writes.", "proved", "relative error below 1e-6", {"error": 2e-9})

rich is imported only when a block is rendered with it.
"""

from __future__ import annotations

import html
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from addnorm._util.numbers import format_column

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table as RichTable
    from rich.text import Text

__all__ = [
    "VERDICTS", "Block", "Cell", "Column", "Drawing", "Finding", "Paragraph", "Rendered", "Style", "Table", "TableRow",
    "make_console", "to_html", "to_markdown", "to_rich", "to_text",
]  # fmt: skip

Style = Literal["", "strong", "accent", "dim", "good", "warning", "bad"]
Span = str | tuple[str, Style]  # a text, or a text with its style
Cell = Span | float | None  # a float, also an int, is formatted with the other numbers of its column; None is empty
Align = Literal["left", "right"]

WIDTH = 100  # columns of plain text
GAP = 2  # columns between two columns of a table
LEAST = 20  # columns of a console, also of one that says that it has fewer: rich prints nothing into 0 columns
FOLDED = 8  # columns that a folding column keeps before others are left out
NARROW = 60  # columns that titles and captions may take beside a table that is narrower
SCROLL = 30  # rows of a table beyond which it scrolls in a notebook
LONG = 36  # characters of a cell beyond which a page may wrap it

# Each style in a terminal and in HTML.
STYLES: dict[Style, tuple[str, str]] = {
    "": ("", ""),
    "strong": ("bold", "font-weight:bold"),
    "accent": ("bold cyan", "font-weight:bold"),
    "dim": ("dim", "opacity:0.7"),
    "good": ("green", "color:#060"),
    "warning": ("yellow", "color:#850"),
    "bad": ("bold red", "color:#b00;font-weight:bold"),
}

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
    """

    claim: str
    verdict: str = VERDICTS[None]
    criterion: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    topic: str = ""

    @property
    def sentence(self) -> str:
        """The claim."""
        return self.claim


class Paragraph:
    """Text of one or more lines.

    Args:
        spans: texts, and pairs of a text and its style.
        style: of the whole text.
        indent: columns on the left of every line.
        hang: further columns on the left of every line but the first.
        space: leave an empty line above.
        width: wrap at this width where the terminal is wider.
    """

    def __init__(
        self, *spans: Span, style: Style = "", indent: int = 0, hang: int = 0, space: bool = False, width: int | None = None,
    ) -> None:  # fmt: skip
        self.spans = [*map(_split, spans)]
        self.style, self.indent, self.hang, self.space, self.width = style, indent, hang, space, width

    def __str__(self) -> str:
        return "".join(text for text, _ in self.spans)


@dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        header: heading; it may have several lines.
        align: side of the texts; None is right for a column of numbers, and left for others.
        fold: wrap long texts. Others stay on one line.
        drop: when the column is left out of a table that is wider than the terminal: never, before the gaps between the columns
            become narrower ("first"), or after that ("last"). The rightmost column is left out before the others.
        style: of the column's texts.
        format: function that returns the text of a number; None formats the numbers of the column with equal decimals.
    """

    header: str
    align: Align | None = None
    fold: bool = False
    drop: Literal["never", "first", "last"] = "never"
    style: Style = ""
    format: Callable[[Any], str] | None = None


@dataclass(frozen=True)
class TableRow:
    """Row of a table: a cell for each column, and a style for the whole row."""

    cells: Sequence[Cell]
    style: Style = ""


class CellText(NamedTuple):
    """Cell of a table as text.

    Attributes:
        text: the text.
        style: its style, without those of row and column.
        value: a float with all digits, for programs.
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
        rows: rows, or sequences of cells. A row with fewer cells than columns is filled up with empty ones.
        caption: note below, in a terminal; what the table shows, on a page.
        collapsed: on a page, show only the caption until the reader opens the table.
        title: line above.
        indent: columns on the left of every line.
        header: show the headings.

    Attributes:
        rows: the rows as lists of cells.
        styles: the styles of the rows.

    Raises:
        ValueError: a row has more cells than the table has columns.

    Example:
        >>> from addnorm._util.tables import Column, Table, TableRow
        >>> table = Table(["site", "rms"], [["attention", 1.25], TableRow(["mlp", 10.0], "bad")])
        >>> table.numeric, [cell.text for cell in table.texts[0]], table.styles
        ([False, True], ['attention', '1.25'], ['', 'bad'])
    """

    kind = "table"

    def __init__(
        self, columns: Iterable[Column | str], rows: Iterable[TableRow | Sequence[Cell]], caption: str = "",
        collapsed: bool = False, *, title: str = "", indent: int = 0, header: bool = True,
    ) -> None:  # fmt: skip
        self.columns = [Column(item) if isinstance(item, str) else item for item in columns]
        self.caption, self.collapsed, self.title, self.indent, self.header = caption, collapsed, title, indent, header
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
        """For each column whether it has numbers and no text."""
        columns = [[row[k] for row in self.rows if row[k] is not None] for k in range(len(self.columns))]
        return [bool(cells) and not any(isinstance(cell, str | tuple) for cell in cells) for cells in columns]

    @cached_property
    def aligned(self) -> list[Align]:
        """The side of each column's texts."""
        return [
            item.align or ("right" if is_numeric else "left")
            for item, is_numeric in zip(self.columns, self.numeric, strict=True)
        ]

    @cached_property
    def texts(self) -> list[list[CellText]]:
        """The rows as texts."""
        columns = [self._texts_of(k) for k in range(len(self.columns))]
        return [list(row) for row in zip(*columns, strict=True)]

    def _texts_of(self, k: int) -> Iterator[CellText]:
        """Yield the texts of a column."""
        cells, is_number, form = [row[k] for row in self.rows], self.numeric[k], self.columns[k].format
        numbers = [cell for cell in cells if not isinstance(cell, str | tuple)]
        if form is not None:
            formatted = ["" if number is None else form(number) for number in numbers]
        else:
            formatted = format_column(numbers) if is_number else [format_column([number])[0] for number in numbers]
        texts = iter(formatted)
        for cell in cells:
            if isinstance(cell, str | tuple):
                yield CellText(*_split(cell))
            else:
                value = repr(cell) if is_number and isinstance(cell, float) else ""
                yield CellText(next(texts), value=value, is_number=is_number)

    @property
    def width(self) -> int:
        """Columns that the table takes in a terminal where nothing is wrapped."""
        return _measure(self, _rich_table(self))


@dataclass(frozen=True)
class Drawing:
    """Drawing that only notebooks show.

    Attributes:
        markup: SVG or HTML, inserted as it is. Its texts must be escaped already.
    """

    markup: str


Block = Paragraph | Table | Finding | Drawing


class Rendered:
    """Mixin that shows an object in terminals, notebooks and as text. Subclasses define `_blocks`."""

    __slots__ = ()

    def _blocks(self) -> Iterator[Block]:
        """Yield what is shown, from top to bottom."""
        raise NotImplementedError

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from to_rich(self._blocks(), options.max_width)

    def __str__(self) -> str:
        return to_text(self._blocks(), max(NARROW, min(WIDTH, get_terminal_size((WIDTH, 0)).columns)))

    def _repr_html_(self) -> str:
        return to_html(self._blocks())


def to_rich(blocks: Iterable[Block], width: int) -> Iterator[RenderableType]:
    """Yield the blocks as objects that rich prints."""
    for block in map(_as_paragraph, blocks):
        if isinstance(block, Table):
            from rich.padding import Padding

            table, caption = _fit(block, width)
            room = max(_measure(block, table), NARROW)
            if block.title:
                yield _rich_paragraph(Paragraph(block.title, style="strong", indent=block.indent, width=room), width)
            yield Padding(table, (0, 0, 0, block.indent), expand=False)
            if caption:
                yield _rich_paragraph(Paragraph(caption, style="dim", indent=block.indent, width=room), width)
        elif isinstance(block, Paragraph):
            yield _rich_paragraph(block, width)


def to_text(blocks: Iterable[Block], width: int = WIDTH) -> str:
    """Return the blocks as plain text.

    Example:
        >>> from addnorm._util.tables import Paragraph, Table, to_text
        >>> print(to_text([Paragraph("Two sublayers:"), Table(["site", "rms"], [["mlp", 1.5]], indent=2)]))
        Two sublayers:
          site    rms
          mlp   1.500
    """
    from rich.console import Group

    console = make_console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(Group(*to_rich(blocks, width)))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def to_html(blocks: Iterable[Block]) -> str:
    r"""Return the blocks as HTML: no script, no style sheet, every text escaped.

    Example:
        >>> from addnorm._util.tables import Paragraph, to_html
        >>> to_html([Paragraph(("a < b", "strong"), "\nline 2", indent=2)])
        '<p style="margin-left:2ch"><span style="font-weight:bold">a &lt; b</span><br>line 2</p>'
    """
    return "".join(map(_html_block, blocks))


def to_markdown(table: Table) -> str:
    r"""Return a table as Markdown, without its title and caption. Cells may contain Markdown; only `|` is escaped.

    Example:
        >>> from addnorm._util.tables import Table, TableRow, to_markdown
        >>> print(to_markdown(Table(["norm", "us"], [["RMSNorm", 2.5], TableRow(["a|b", 3.0], "strong")])))
        | norm | us |
        | :-- | --: |
        | RMSNorm | 2.500 |
        | **a\|b** | **3.000** |
    """

    def line(cells: Iterable[tuple[str, bool]]) -> str:
        texts = [(" ".join(text.splitlines()).replace("|", r"\|"), is_strong) for text, is_strong in cells]
        return f"| {' | '.join(f'**{text}**' if text and is_strong else text for text, is_strong in texts)} |"

    return "\n".join([
        line((column.header, False) for column in table.columns),
        line(("--:" if side == "right" else ":--", False) for side in table.aligned),
        *(
            line((cell.text, (cell.style or style) == "strong") for cell in cells)
            for cells, style in zip(table.texts, table.styles, strict=True)
        ),
    ])  # fmt: skip


def make_console(*, stderr: bool = False, width: int | None = None, file: io.StringIO | None = None) -> Console:
    """Return a console of rich for stdout, stderr or a file.

    Args:
        stderr: print on stderr.
        width: number of columns where the output is not a terminal and COLUMNS is not a positive number.
        file: print plain text into this file.
    """
    from rich.console import Console

    if file is not None:
        return Console(
            file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False, highlight=False, emoji=False,
        )  # fmt: skip
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal without Greek letters shows ?, not a traceback
    console = Console(stderr=stderr, highlight=False)
    columns = os.environ.get("COLUMNS", "")
    stated = columns.isdecimal() and int(columns) > 0
    if not console.width or not (width is None or console.is_terminal or stated):
        console.width = width or WIDTH
    console.width = max(console.width, LEAST)
    return console


def _split(span: Span) -> tuple[str, Style]:
    return (span, "") if isinstance(span, str) else span


def _as_paragraph(block: Block) -> Paragraph | Table | Drawing:
    """Return a finding as the paragraph that shows it, and another block as it is."""
    if isinstance(block, Finding):
        return Paragraph(block.claim, style="bad" if block.verdict == VERDICTS[False] else "", hang=2, width=WIDTH)
    return block


def _rich_text(spans: Iterable[tuple[str, Style]], style: Style = "") -> Text:
    from rich.text import Text

    return Text.assemble(*((text, STYLES[style_of_span][0]) for text, style_of_span in spans), style=STYLES[style][0])


def _rich_paragraph(block: Paragraph, width: int) -> RenderableType:
    from rich.console import Console
    from rich.text import Text

    room = max(min(width, block.width or width) - block.indent - block.hang, 1)
    lines = _rich_text(block.spans, block.style).wrap(Console(force_jupyter=False), room)  # wrap ignores its settings
    for line in lines:
        line.rstrip()
    first, later = " " * block.indent, " " * (block.indent + block.hang)
    padded = [Text.assemble(later if k else first, line) for k, line in enumerate(lines)]
    return Text("\n").join([Text()] * block.space + padded)


def _fit(table: Table, width: int) -> tuple[RichTable, str]:
    """Return the table and its caption for a terminal of that width.

    A table with columns that may be dropped and that is too wide gets headings of two lines, then loses columns as `Column.drop`
    says. The caption names the "last" columns that were left out. Other tables stay as they are.
    """
    places, left_out, gap = [*range(len(table.columns))], list[str](), GAP

    def is_too_wide(broken: bool = True) -> bool:
        return _measure(table, _rich_table(table, places, gap, broken, FOLDED)) > width

    if all(column.drop == "never" for column in table.columns) or not is_too_wide(broken=False):
        return _rich_table(table), table.caption
    for when in ("first", "last"):
        if when == "last" and is_too_wide():
            gap = 1
        for place in reversed([*places]):
            if table.columns[place].drop == when and is_too_wide():
                places.remove(place)
                if when == "last":
                    left_out.insert(0, " ".join(table.columns[place].header.split()))
    more = [f"A wider terminal shows more: {', '.join(left_out)}."] if left_out else []
    return _rich_table(table, places, gap, broken=True), " ".join([*filter(None, [table.caption]), *more])


def _rich_table(
    table: Table, places: Sequence[int] | None = None, gap: int = GAP, broken: bool = False, folded: int | None = None
) -> RichTable:
    """Return the table for rich.

    Args:
        table: the table.
        places: indices of the columns that are shown; None is all.
        gap: columns between two columns.
        broken: put headings in two lines, except those of columns that are dropped first.
        folded: largest width of the folding columns.
    """
    from rich.table import Table as RichTable
    from rich.text import Text

    places = range(len(table.columns)) if places is None else places
    rich_table = RichTable(
        box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim", show_header=table.header
    )
    for column, side in ((table.columns[place], table.aligned[place]) for place in places):
        header = column.header.replace(" ", "\n", 1) if broken and column.drop != "first" else column.header
        rich_table.add_column(
            Text(header), justify=side, overflow="fold", no_wrap=not column.fold, style=STYLES[column.style][0],
            max_width=folded if column.fold else None,
        )  # fmt: skip
    for cells, style in zip(table.texts, table.styles, strict=True):
        row = (cells[place] for place in places)
        rich_table.add_row(*(_rich_text([(cell.text, cell.style)]) for cell in row), style=STYLES[style][0] or None)
    return rich_table


def _measure(table: Table, rich_table: RichTable) -> int:
    """Return the columns that a table takes with its indent where nothing is wrapped."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(width=10_000, force_jupyter=False)
    return table.indent + Measurement.get(console, console.options, rich_table).maximum


def _html(tag: str, spans: Iterable[tuple[str, Style]], style: Style = "", css: str = "") -> str:
    """Return an element with its texts escaped."""
    inner = ""
    for part, span_style in spans:
        text = html.escape(part).replace("\n", "<br>")
        inner += f'<span style="{STYLES[span_style][1]}">{text}</span>' if span_style else text
    css = ";".join(filter(None, [css, STYLES[style][1]]))
    return f'<{tag} style="{css}">{inner}</{tag}>' if css else f"<{tag}>{inner}</{tag}>"


def _html_block(block: Block) -> str:
    block = _as_paragraph(block)
    if isinstance(block, Paragraph):
        return _html("p", block.spans, block.style, f"margin-left:{block.indent}ch" if block.indent else "")
    return _html_table(block) if isinstance(block, Table) else block.markup


def _html_table(table: Table) -> str:
    aligned = [f"text-align:{side}" for side in table.aligned]
    head = "".join(_html("th", [(c.header, "")], "", css) for c, css in zip(table.columns, aligned, strict=True))
    body = "".join(
        "<tr>" + "".join(
            _html("td", [(cell.text, "")], cell.style or style or column.style, css)
            for cell, column, css in zip(cells, table.columns, aligned, strict=True)
        ) + "</tr>"
        for cells, style in zip(table.texts, table.styles, strict=True)
    )  # fmt: skip
    title = _html("caption", [(table.title, "strong")], "", "text-align:left") if table.title else ""
    text = f"<table>{title}{f'<thead><tr>{head}</tr></thead>' if table.header else ''}<tbody>{body}</tbody></table>"
    if len(table.rows) > SCROLL:
        text = f'<div style="max-height:24em;overflow:auto">{text}</div>'
    return text + (_html("p", [(table.caption, "")], "dim") if table.caption else "")
