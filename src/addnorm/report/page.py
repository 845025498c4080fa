"""Pages as data, and their rendering as one HTML file without network or script, for light and dark, screen and paper.

A `Page` has `Section`s of blocks: `Table`, `Figure`, `Findings`, `Formula`, `Facts`. All texts are plain text and are escaped in
the HTML. page.html and style.css define the appearance. The same page always gives the same HTML.

A figure is a `Chart` in the page's colours, or a drawing of matplotlib, with the table of its numbers. It is drawn twice, for
wide and narrow pages, so that its text has the size of the page's text in both.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from addnorm._util.blocks import Finding, Table
from addnorm._util.charts import Chart
from addnorm._util.files import check_writable, write_text
from addnorm._util.optional import require
from addnorm._util.svg import NARROW, WIDE, draw_chart, read_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

INCHES = {"wide": 9.6, "narrow": 3.9}  # widths of a drawing of matplotlib
SUFFIXES = (".html", ".htm")


@dataclass(frozen=True)
class Figure:
    """Drawing with the table of its numbers, made by `addnorm.report.draw_figure` or from a `Chart`.

    Args:
        title: what the figure shows.
        caption: how to read it, in a sentence or two.
        svg: the drawing for wide pages.
        table: the numbers.
        narrow: the drawing for narrow pages. An empty text means `svg`.

    Example:
        >>> from addnorm.report import Figure, Table
        >>> table = Table(["layer", "norm of x"], [[1, 3.2]])
        >>> figure = Figure("Size of the stream", "It grows.", "<svg></svg>", table)
    """

    title: str
    caption: str
    svg: str
    table: Table
    narrow: str = ""


@dataclass(frozen=True)
class Findings:
    """Block with a list of findings.

    Example:
        >>> from addnorm.report import Finding, Findings, Section
        >>> section = Section("Findings", "", [Findings([Finding("The stream grows with depth.", "proved")])])
    """

    items: Sequence[Finding]


@dataclass(frozen=True)
class Formula:
    """Equations, one per line, with an explanation.

    Example:
        >>> from addnorm.report import Formula, Section
        >>> section = Section("The wiring", "", [Formula(["y = LayerNorm(x + Sublayer(x))"], "Post-LN, the original.")])
    """

    lines: Sequence[str]
    text: str = ""


@dataclass(frozen=True)
class Facts:
    """Names with their values: settings, versions, seeds, the command.

    Example:
        >>> from addnorm.report import Facts, Section, versions
        >>> section = Section("Settings", "", [Facts({"seed": "0", **versions()})])
    """

    items: Mapping[str, str]


Block = Table | Figure | Findings | Formula | Facts


@dataclass(frozen=True)
class Section:
    """Part of a page under one heading.

    Args:
        title: the heading, also in the table of contents.
        intro: an introductory paragraph, or an empty string.
        blocks: the content, in order.

    Example:
        >>> from addnorm.report import Formula, Page, Section
        >>> section = Section("The wiring", "What was compared.", [Formula(["x + f(N(x))"])])
        >>> page = Page("A report", "One equation.", [], [section])
    """

    title: str
    intro: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """Page of a report as data, which `render` turns into HTML.

    Args:
        title: the heading of the page.
        subtitle: one sentence.
        verdict: the most important sentences.
        sections: the sections, in order.
        tiles: a few names and values in large type.
        footer: the last lines: versions, date, command.
        facts: names and values below the subtitle: model, inputs, date, loss.

    Example:
        >>> from addnorm.report import Finding, Page, Section, Table
        >>> table = Table(["site", "rms"], [["attention 1", 1.25]])
        >>> page = Page("A model", "One sublayer.", [Finding("It closes.", "proved")], [Section("Sites", "", [table])])
        >>> page.sections[0].blocks[0].numeric
        [False, True]
    """

    title: str
    subtitle: str
    verdict: Sequence[Finding]
    sections: Sequence[Section]
    tiles: Mapping[str, str] = field(default_factory=dict)
    footer: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def figure_of(chart: Chart) -> Figure:
    """Draw a chart for wide and for narrow pages, and return both drawings with the chart's table as a `Figure`.

    Example:
        >>> from addnorm._util.charts import Axis, Chart, Panel, Series
        >>> from addnorm.report.page import figure_of
        >>> losses = Panel("loss", [Series("pre_ln", [(1, 3.0), (2, 2.5)])])
        >>> figure = figure_of(Chart("Learning", "The loss by step.", [losses], Axis("step")))
        >>> figure.svg[:46]
        '<svg class="chart wide" viewBox="0 0 1000 276"'
    """
    wide, narrow = (draw_chart(chart, width, f"chart {form}") for form, width in (("wide", WIDE), ("narrow", NARROW)))
    return Figure(chart.title, chart.caption, wide, chart.table, narrow)


def draw_figure(
    name: str, draw: Callable[[Canvas], object], *, title: str, caption: str, table: Table,
    height: float | Callable[[bool], float] = 3.6,
) -> Figure:  # fmt: skip
    """Draw a figure of a page with matplotlib. Dark pages invert its colours.

    Args:
        name: name of the figure. The same drawing with the same name always gives the same SVG text.
        draw: function that draws on an empty matplotlib figure. It is called once per width. Example:
            `lambda figure: rec.plot.stream(ax=figure.add_subplot())`.
        title: what the figure shows.
        caption: how to read it.
        table: the drawn numbers.
        height: height in inches (the width is 9.6 inches), or a function of whether the page is wide that returns it.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> from addnorm.report import Table, draw_figure
        >>> table = Table(["layer", "norm of x"], [[1, 3.2], [2, 4.1]])
        >>> draw = lambda figure: figure.add_subplot().plot([1, 2], [3.2, 4.1])
        >>> figure = draw_figure("size", draw, title="Size of the stream", caption="It grows.", table=table)
        >>> figure.svg.startswith("<svg")
        True
    """
    matplotlib, figures = require("matplotlib", "draw"), require("matplotlib.figure", "draw")
    svgs = []
    with matplotlib.rc_context({"svg.hashsalt": name}):
        for form, width in INCHES.items():
            inches = height(form == "wide") if callable(height) else height
            figure, file = figures.Figure(figsize=(width, inches), layout="constrained"), io.BytesIO()
            draw(figure)
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            data = base64.b64encode(file.getvalue()).decode()
            label = escape(f"{title}. {caption}")
            svgs.append(
                f'<svg class="chart {form}" viewBox="0 0 {width} {inches}" role="img" aria-label="{label}">'
                f'<image class="plot" width="{width}" height="{inches}" href="data:image/svg+xml;base64,{data}"/></svg>'
            )
    return Figure(title, caption, svgs[0], table, svgs[1])


def render(page: Page) -> str:
    """Return the HTML of a page.

    Raises:
        ImportError: jinja2 is not installed.
        TypeError: `page` is no `Page`.

    Example:
        >>> from addnorm.report import Formula, Page, Section, render
        >>> page = Page("A report", "One equation.", [], [Section("The wiring", "", [Formula(["x + f(N(x))"])])])
        >>> render(page)[:15]
        '<!DOCTYPE html>'
    """
    if not isinstance(page, Page):
        raise TypeError(
            f"page is {type(page).__name__}, expected a Page, as build_model_page and build_comparison_page return."
        )
    jinja2 = require("jinja2", "write a report")
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    text: str = environment.from_string(_read("page.html")).render(page=page, style=read_style() + _read("style.css"))
    return text.lstrip()


def write(page: Page, path: str | Path) -> Path:
    """Write a page to a file atomically, create its folder if needed, and return the path.

    Args:
        page: the page.
        path: the file. Its name must end in .html or .htm.

    Raises:
        ImportError: jinja2 is not installed.
        TypeError: `page` is no `Page`.
        ValueError: the name does not end in .html.
        OSError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from addnorm.report import Formula, Page, Section, write
        >>> page = Page("A report", "One equation.", [], [Section("The wiring", "", [Formula(["x + f(N(x))"])])])
        >>> write(page, Path(tempfile.mkdtemp(), "report.html")).name
        'report.html'
    """
    text = render(page)
    _check_suffix(path)
    return write_text(path, text)


def check_path(path: str | Path) -> None:
    """Check that `write` can write to a path, and create its folder. Call it before work that takes long.

    Raises:
        ImportError: jinja2 is not installed.
        ValueError: the name does not end in .html.
        OSError: the file cannot be written.

    Example:
        >>> from addnorm.report import check_path
        >>> check_path("report.txt")
        Traceback (most recent call last):
        ValueError: ...
    """
    require("jinja2", "write a report")
    _check_suffix(path)
    check_writable(path)


def _check_suffix(path: str | Path) -> None:
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"path is {str(path)!r}, expected a file that ends in .html: browsers open it by its suffix.")


def _read(name: str) -> str:
    return resources.files("addnorm.report").joinpath(name).read_text(encoding="utf-8")
