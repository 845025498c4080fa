"""Figures of a page: a `Chart` in the page's colours, or a drawing of matplotlib, each with the table of its numbers.

Each figure is drawn twice, for wide and narrow pages, so that its text has the size of the page's text in both.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

from addnorm._util.blocks import Table
from addnorm._util.charts import Chart
from addnorm._util.optional import require
from addnorm.report.page import Figure
from addnorm.report.svg import NARROW, WIDE, draw_chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

INCHES = {"wide": 9.6, "narrow": 3.9}  # widths of a drawing of matplotlib


def figure_of(chart: Chart) -> Figure:
    """Draw a chart for wide and for narrow pages, and return both drawings with the chart's table as a `Figure`.

    Example:
        >>> from addnorm._util.charts import Axis, Chart, Panel, Series
        >>> from addnorm.report.figure import figure_of
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
