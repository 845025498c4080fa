"""Paragraphs and tables, rendered for terminals (rich), notebooks (HTML), plain text and Markdown from one description.

A class with a display derives from `Rendered` and yields its blocks:

    class Report(Rendered):
        def _blocks(self):
            yield Paragraph(("Model", "strong"), ": 2 sublayers")
            yield Table([Column("site"), Column("rms", "right")], [["attention", "1.02"], Row(["mlp", "nan"], "bad")])

rich is imported only when a block is rendered with it.
"""

from __future__ import annotations

import html
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

__all__ = [
    "Block", "Column", "Drawing", "Paragraph", "Rendered", "Row", "Style", "Table", "make_console", "to_html", "to_markdown",
    "to_rich", "to_text",
]  # fmt: skip

Style = Literal["", "strong", "accent", "dim", "good", "warning", "bad"]
Span = str | tuple[str, Style]  # a text, or a text with its style

WIDTH = 100  # columns of plain text
GAP = 2  # columns between two columns of a table
LEAST = 20  # columns of a console, also of one that says that it has fewer: rich prints nothing into 0 columns
FOLDED = 8  # columns that a folding column keeps before others are left out
NARROW = 60  # columns that titles and captions may take beside a table that is narrower
SCROLL = 30  # rows of a table beyond which it scrolls in a notebook

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
        self,
        *spans: Span,
        style: Style = "",
        indent: int = 0,
        hang: int = 0,
        space: bool = False,
        width: int | None = None,
    ) -> None:
        self.spans: list[tuple[str, Style]] = [(span, "") if isinstance(span, str) else span for span in spans]
        self.style, self.indent, self.hang, self.space, self.width = style, indent, hang, space, width

    def __str__(self) -> str:
        return "".join(text for text, _ in self.spans)


@dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        header: heading; it may have several lines.
        align: side of the texts.
        fold: wrap long texts. Others stay on one line.
        drop: when the column is left out of a table that is wider than the terminal: never, before the gaps between the columns
            become narrower ("first"), or after that ("last"). The rightmost column is left out before the others.
        style: of the column's texts.
    """

    header: str
    align: Literal["left", "right"] = "left"
    fold: bool = False
    drop: Literal["never", "first", "last"] = "never"
    style: Style = ""


@dataclass(frozen=True)
class Row:
    """Row of a table: a cell for each column, and a style for the whole row."""

    cells: Sequence[Span]
    style: Style = ""


class Table:
    """Table with a heading line.

    Args:
        columns: the columns, or their headings.
        rows: rows, or sequences of cells. A row with fewer cells than columns is filled up with empty ones.
        title: line above.
        caption: note below.
        indent: columns on the left of every line.
        header: show the headings.

    Raises:
        ValueError: a row has more cells than the table has columns.
    """

    def __init__(
        self, columns: Iterable[Column | str], rows: Iterable[Row | Sequence[Span]], *, title: str = "", caption: str = "",
        indent: int = 0, header: bool = True,
    ) -> None:  # fmt: skip
        self.columns = [Column(item) if isinstance(item, str) else item for item in columns]
        self.title, self.caption, self.indent, self.header = title, caption, indent, header
        self.gap = GAP
        self.rows: list[tuple[list[tuple[str, Style]], Style]] = []
        for row in rows:
            cells, style = (row.cells, row.style) if isinstance(row, Row) else (row, "")
            if len(cells) > len(self.columns):
                raise ValueError(
                    f"a row has {len(cells)} cells, expected at most {len(self.columns)}, one for each column."
                )
            pairs: list[tuple[str, Style]] = [(item, "") if isinstance(item, str) else item for item in cells]
            self.rows.append((pairs + [("", "")] * (len(self.columns) - len(pairs)), style))

    @property
    def width(self) -> int:
        """Columns that the table takes in a terminal where nothing is wrapped."""
        return self._measure(sys.maxsize)

    def _measure(self, folded: int) -> int:
        """Return the columns of a table whose folding columns have at most that width."""
        from rich.cells import cell_len

        texts = [[column.header] * self.header for column in self.columns]
        for cells, _ in self.rows:
            for column, (text, _) in zip(texts, cells, strict=True):
                column.append(text)
        widths = [max((cell_len(line) for text in column for line in text.split("\n")), default=0) for column in texts]
        widths = [min(width, folded) if item.fold else width for item, width in zip(self.columns, widths, strict=True)]
        return self.indent + sum(widths) + self.gap * (len(widths) - 1)

    def fit(self, width: int) -> Table:
        """Return the table for a terminal of that width.

        A table with columns that may be dropped and that is too wide gets headings of two lines, then loses columns as
        `Column.drop` says. The caption names the "last" columns that were left out. Other tables stay as they are.
        """
        if self.width <= width or all(column.drop == "never" for column in self.columns):
            return self
        if self._measure(FOLDED) <= width:
            return self
        table = self._with([*range(len(self.columns))], broken=True)
        left_out: list[str] = []
        for when in ("first", "last"):
            table.gap = table.gap if when == "first" or table._measure(FOLDED) <= width else 1
            places = [place for place, column in enumerate(table.columns) if column.drop == when]
            while places and table._measure(FOLDED) > width:
                dropped = places.pop()
                if when == "last":
                    left_out.insert(0, " ".join(table.columns[dropped].header.split()))
                table = table._with([place for place in range(len(table.columns)) if place != dropped])
        if left_out:
            table.caption = f"{table.caption} A wider terminal shows more: {', '.join(left_out)}.".strip()
        return table

    def _with(self, places: Sequence[int], broken: bool = False) -> Table:
        """Return a copy with these columns; `broken` puts their headings in two lines."""
        columns = [self.columns[place] for place in places]
        if broken:
            columns = [
                item if item.drop == "first" else replace(item, header=item.header.replace(" ", "\n", 1))
                for item in columns
            ]
        rows = [Row([cells[place] for place in places], style) for cells, style in self.rows]
        table = Table(columns, rows, title=self.title, caption=self.caption, indent=self.indent, header=self.header)
        table.gap = self.gap
        return table


@dataclass(frozen=True)
class Drawing:
    """Drawing that only notebooks show.

    Attributes:
        markup: SVG or HTML, inserted as it is. Its texts must be escaped already.
    """

    markup: str


Block = Paragraph | Table | Drawing


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
    for block in blocks:
        if isinstance(block, Table):
            table = block.fit(width)
            room = max(table.width, NARROW)
            if table.title:
                yield _rich_paragraph(Paragraph(table.title, style="strong", indent=table.indent, width=room), width)
            yield _rich_table(table)
            if table.caption:
                yield _rich_paragraph(Paragraph(table.caption, style="dim", indent=table.indent, width=room), width)
        elif isinstance(block, Paragraph):
            yield _rich_paragraph(block, width)


def to_text(blocks: Iterable[Block], width: int = WIDTH) -> str:
    """Return the blocks as plain text.

    Example:
        >>> from addnorm._util.tables import Column, Paragraph, Table, to_text
        >>> print(to_text([Paragraph("Two sublayers:"), Table(["site", Column("rms", "right")], [["mlp", "1.5"]], indent=2)]))
        Two sublayers:
          site  rms
          mlp   1.5
    """
    console = make_console(width=width, file=io.StringIO())
    with console.capture() as captured:
        for part in to_rich(blocks, width):
            console.print(part)
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
        >>> from addnorm._util.tables import Column, Row, Table, to_markdown
        >>> print(to_markdown(Table(["norm", Column("us", "right")], [["RMSNorm", "2.5"], Row(["a|b", "3"], "strong")])))
        | norm | us |
        | :-- | --: |
        | RMSNorm | 2.5 |
        | **a\|b** | **3** |
    """

    def line(cells: Iterable[tuple[str, Style]], style: Style) -> str:
        texts = [(" ".join(text.splitlines()).replace("|", r"\|"), span_style or style) for text, span_style in cells]
        return f"| {' | '.join(f'**{text}**' if text and span_style == 'strong' else text for text, span_style in texts)} |"

    head = line([(column.header, "") for column in table.columns], "")
    rule = f"| {' | '.join('--:' if column.align == 'right' else ':--' for column in table.columns)} |"
    return "\n".join([head, rule, *(line(cells, style) for cells, style in table.rows)])


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
            file=file,
            width=width,
            color_system=None,
            force_terminal=False,
            force_jupyter=False,
            highlight=False,
            emoji=False,
        )
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


def _rich_text(spans: Sequence[tuple[str, Style]], style: Style = "") -> Text:
    from rich.text import Text

    text = Text(style=STYLES[style][0])
    for part, span_style in spans:
        text.append(part, STYLES[span_style][0])
    return text


def _rich_paragraph(block: Paragraph, width: int) -> RenderableType:
    from rich.console import Console
    from rich.text import Text

    text, console = _rich_text(block.spans, block.style), Console(force_jupyter=False)  # wrap ignores its settings
    room = max(min(width, block.width or width) - block.indent - block.hang, 1)
    lines = [line for part in text.split("\n", allow_blank=True) or [text] for line in part.wrap(console, room)]
    first, later = " " * block.indent, " " * (block.indent + block.hang)
    for line in lines:
        line.rstrip()
    padded = [Text.assemble(later if k else first, line) for k, line in enumerate(lines)]
    return Text("\n").join([Text()] * block.space + padded)


def _rich_table(block: Table) -> RenderableType:
    from rich.padding import Padding
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(
        box=None, padding=(0, block.gap, 0, 0), pad_edge=False, header_style="dim", show_header=block.header,
    )  # fmt: skip
    for column in block.columns:
        table.add_column(
            Text(column.header),
            justify=column.align,
            overflow="fold",
            no_wrap=not column.fold,
            style=STYLES[column.style][0],
        )
    for cells, style in block.rows:
        table.add_row(*(_rich_text([cell]) for cell in cells), style=STYLES[style][0] or None)
    return Padding(table, (0, 0, 0, block.indent), expand=False) if block.indent else table


def _html(tag: str, spans: Iterable[tuple[str, Style]], style: Style = "", css: str = "") -> str:
    """Return an element with its texts escaped."""
    inner = ""
    for part, span_style in spans:
        text = html.escape(part).replace("\n", "<br>")
        inner += f'<span style="{STYLES[span_style][1]}">{text}</span>' if span_style else text
    css = ";".join(filter(None, [css, STYLES[style][1]]))
    return f'<{tag} style="{css}">{inner}</{tag}>' if css else f"<{tag}>{inner}</{tag}>"


def _html_block(block: Block) -> str:
    if isinstance(block, Paragraph):
        return _html("p", block.spans, block.style, f"margin-left:{block.indent}ch" if block.indent else "")
    return _html_table(block) if isinstance(block, Table) else block.markup


def _html_table(block: Table) -> str:
    aligned = [f"text-align:{column.align}" for column in block.columns]
    head = "".join(_html("th", [(c.header, "")], "", css) for c, css in zip(block.columns, aligned, strict=True))
    body = "".join(
        "<tr>" + "".join(
            _html("td", [(text, "")], span_style or style or column.style, css)
            for (text, span_style), column, css in zip(cells, block.columns, aligned, strict=True)
        ) + "</tr>"
        for cells, style in block.rows
    )  # fmt: skip
    title = _html("caption", [(block.title, "strong")], "", "text-align:left") if block.title else ""
    table = f"<table>{title}{f'<thead><tr>{head}</tr></thead>' if block.header else ''}<tbody>{body}</tbody></table>"
    if len(block.rows) > SCROLL:
        table = f'<div style="max-height:24em;overflow:auto">{table}</div>'
    return table + (_html("p", [(block.caption, "")], "dim") if block.caption else "")
