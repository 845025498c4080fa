"""Paragraphs, tables and findings in terminals (rich), notebooks (HTML), plain text and Markdown.

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
from collections.abc import Iterable, Iterator, Sequence
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from addnorm._util.blocks import VERDICTS, Block, Drawing, Finding, Paragraph, Style, Table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table as RichTable
    from rich.text import Text

WIDTH = 100  # columns of plain text
GAP = 2  # columns between two columns of a table
LEAST = 20  # minimum columns of a console, also of one that reports fewer: rich prints nothing into 0 columns
FOLDED = 8  # width that a column with `fold` keeps before other columns are left out
NARROW = 60  # columns that a title or a caption may use even if its table is narrower
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


class Rendered:
    """Mixin that shows an object in terminals, notebooks and as text. Subclasses define `_blocks`."""

    __slots__ = ()

    def _blocks(self) -> Iterator[Block]:
        """Yield the blocks that are shown, from top to bottom."""
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


def print_blocks(console: Console, *blocks: Block) -> None:
    """Print paragraphs and tables, at most `WIDTH` columns wide."""
    width = min(console.width, WIDTH)
    for part in to_rich(blocks, width):
        console.print(part, width=width)


def to_text(blocks: Iterable[Block], width: int = WIDTH) -> str:
    """Return the blocks as plain text.

    Example:
        >>> from addnorm._util.blocks import Paragraph, Table
        >>> from addnorm._util.render import to_text
        >>> print(to_text([Paragraph("Two sublayers:"), Table(["site", "rms"], [["mlp", 1.5]], indent=2)]))
        Two sublayers:
          site    rms
          mlp   1.500
    """
    from rich.console import Console, Group

    text = io.StringIO()
    console = Console(
        file=text, width=width, color_system=None, force_terminal=False, force_jupyter=False, highlight=False, emoji=False,
    )  # fmt: skip
    console.print(Group(*to_rich(blocks, width)))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def to_html(blocks: Iterable[Block]) -> str:
    r"""Return the blocks as HTML: no script, no style sheet, every text escaped.

    Example:
        >>> from addnorm._util.blocks import Paragraph
        >>> from addnorm._util.render import to_html
        >>> to_html([Paragraph(("a < b", "strong"), "\nline 2", indent=2)])
        '<p style="margin-left:2ch"><span style="font-weight:bold">a &lt; b</span><br>line 2</p>'
    """
    return "".join(map(_html_block, blocks))


def to_markdown(table: Table) -> str:
    r"""Return a table as Markdown, without its title and caption. Cells may contain Markdown; only `|` is escaped.

    Example:
        >>> from addnorm._util.blocks import Table, TableRow
        >>> from addnorm._util.render import to_markdown
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


def make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console of rich for stdout or stderr.

    Args:
        stderr: print on stderr.
        width: number of columns where the output is not a terminal and COLUMNS is not a positive number.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal without Greek letters shows ?, not a traceback

    class Output(Console):
        """Console that raises BrokenPipeError when the pipe is closed; rich itself would exit with code 1."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError from None

    console = Output(stderr=stderr, highlight=False)
    columns = os.environ.get("COLUMNS", "")
    stated = columns.isdecimal() and int(columns) > 0
    if not console.width or not (width is None or console.is_terminal or stated):
        console.width = width or WIDTH
    console.width = max(console.width, LEAST)
    return console


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
    """Return the table and its caption for a terminal of `width` columns.

    A table with columns that may be dropped and that is too wide gets headings of two lines, then loses columns as `Column.drop`
    says. The caption names the "last" columns that were left out. Other tables stay as they are.
    """
    places = [*range(len(table.columns))]

    def fits(places: Sequence[int], gap: int, broken: bool = True) -> bool:
        return _measure(table, _rich_table(table, places, gap, broken, FOLDED)) <= width

    if all(column.drop == "never" for column in table.columns) or fits(places, GAP, broken=False):
        return _rich_table(table, places), table.caption
    layouts = []
    for when, gap in (("first", GAP), ("last", 1)):
        layouts.append((places, gap))
        for place in reversed(places):
            if table.columns[place].drop == when:
                places = [other for other in places if other != place]
                layouts.append((places, gap))
    places, gap = next((layout for layout in layouts if fits(*layout)), layouts[-1])
    left_out = [column.header for k, column in enumerate(table.columns) if column.drop == "last" and k not in places]
    more = f"A wider terminal shows more: {', '.join(' '.join(header.split()) for header in left_out)}."
    return _rich_table(table, places, gap, broken=True), " ".join(filter(None, [table.caption, more * bool(left_out)]))


def _rich_table(
    table: Table, places: Sequence[int], gap: int = GAP, broken: bool = False, folded: int | None = None
) -> RichTable:
    """Return `table` as a table of rich.

    Args:
        table: the table.
        places: indices of the columns that are shown.
        gap: number of blanks between two columns.
        broken: put headings in two lines, except those of columns that are dropped first.
        folded: maximum width of the columns with `fold`.
    """
    from rich.table import Table as RichTable
    from rich.text import Text

    rich_table = RichTable(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
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
    """Return the width of a table with its indent, in columns of a terminal, if nothing is wrapped."""
    from rich.console import Console

    return table.indent + Console(width=10_000, force_jupyter=False).measure(rich_table).maximum


def _html(tag: str, spans: Iterable[tuple[str, Style]], style: Style = "", css: str = "") -> str:
    """Return an HTML element with escaped texts."""
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
    text = f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    if len(table.rows) > SCROLL:
        text = f'<div style="max-height:24em;overflow:auto">{text}</div>'
    return text + (_html("p", [(table.caption, "")], "dim") if table.caption else "")
