"""A drawing of matplotlib's as a `Figure`: SVG in the page's colours and fonts, with the numbers behind it as a table.

It is drawn twice, for wide and for narrow pages, so that its letters have the size of the page's in both. Nothing of pyplot is
touched: no window, no setting that stays.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from addnorm._util.optional import require
from addnorm.report.blocks import Figure, Table
from addnorm.report.svg import INK, PAPER, themed
from addnorm.stream.record.axes import format_tick

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["drawn"]

WIDE, NARROW = 9.6, 3.9  # inches; a page shows them at 1.4 and 1.2 times the size
DPI = 200  # of pictures
TWO_ROWS = 0.4  # inches, of a legend
VECTORS = 1000  # a heat map of more cells is a picture
SETTINGS = {
    "svg.fonttype": "none", "axes.facecolor": PAPER, "figure.facecolor": "none", "axes.edgecolor": "#6b6b6b",
    "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "xtick.color": "#6b6b6b", "ytick.color": "#6b6b6b",
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.linewidth": 0.7, "xtick.major.width": 0.7,
    "ytick.major.width": 0.7, "hatch.linewidth": 0.7, "font.family": ["sans-serif"], "font.sans-serif": ["DejaVu Sans"],
    "axes.unicode_minus": True, "mathtext.default": "regular", "svg.image_inline": True,
}  # fmt: skip
SUPERSCRIPT, SUBSCRIPT = (str.maketrans("-0123456789L", line) for line in ("⁻⁰¹²³⁴⁵⁶⁷⁸⁹ᴸ", "₋₀₁₂₃₄₅₆₇₈₉ʟ"))


def drawn(
    name: str, draw: Callable[[Canvas], object], *, title: str, caption: str, table: Table,
    height: float | Callable[[bool], float] = 3.6,
) -> Figure:  # fmt: skip
    """A figure of a page.

    Args:
        name: unlike that of any other figure of the page: letters, digits and hyphens.
        draw: is given an empty figure of matplotlib's, and draws on it, once for each width:
            `lambda figure: rec.plot.stream(ax=figure.add_subplot())`. The title of its first Axes is left out: the page has one.
        title: what it shows.
        caption: how to read it, and what is to be seen.
        table: the numbers that are drawn.
        height: in inches; 9.6 of them are as wide as the page. Or what gives it, called with whether the page is wide. A
            legend of more than two rows is given room beside it.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: of `draw`, if there is nothing to draw.
    """
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ValueError(f"name is {name!r}, expected letters, digits and hyphens: it begins the ids of the drawing.")
    matplotlib = require("matplotlib", "draw")
    figures = require("matplotlib.figure", "draw")
    label = f"{title}. {caption}"
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the reader's fonts write it, not matplotlib's
        svgs = []
        for form, width in (("wide", WIDE), ("narrow", NARROW)):
            inches = height(width == WIDE) if callable(height) else height
            figure = figures.Figure(figsize=(width, inches), layout="constrained")
            figure.get_layout_engine().set(h_pad=0.09)  # inches between panels
            draw(figure)
            figure.set_figheight(inches + _legends(figure))
            _prepare(figure)
            _align(figure)
            svgs.append(themed(_saved(figure), f"{name}-{form}", label, f"chart {form}"))
    return Figure(title, caption, svgs[0], table, svgs[1])


def _legends(figure: Canvas) -> float:
    """How much higher than two rows the legends are, in inches: what they would take from the drawing."""
    legends = [found for ax in figure.axes if (found := ax.get_legend()) is not None]
    return sum(max(legend.get_window_extent().height / figure.dpi - TWO_ROWS, 0.0) for legend in legends)


def _prepare(figure: Canvas) -> None:
    """What a page wants otherwise than a notebook."""
    for place, ax in enumerate(figure.axes):
        if not place:
            ax.set_title("", loc="left")
        for axis in (ax.xaxis, ax.yaxis):
            _plain(axis)
        for text in ax.texts:
            text.set_text(unicode(text.get_text()))
        for mesh in ax.collections:
            cells = mesh.get_array()
            if cells is not None and cells.size > VECTORS:
                mesh.set_rasterized(True)


def _align(figure: Canvas) -> None:
    """Panels that stand below one another have the same depths at the same places, whatever their ticks are as wide as."""
    if len(figure.axes) < 2 or any(ax.get_label() == "<colorbar>" for ax in figure.axes):
        return
    figure.draw_without_rendering()  # which lays it out
    figure.set_layout_engine("none")
    boxes = [ax.get_position() for ax in figure.axes]
    left, right = max(box.x0 for box in boxes), min(box.x1 for box in boxes)
    for ax, box in zip(figure.axes, boxes, strict=True):
        ax.set_position((left, box.y0, right - left, box.height))
    figure.align_ylabels()


def _plain(axis: Any) -> None:
    """Ticks without mathtext, which SVG places letter by letter with the widths of another font; no factor beside the axis."""
    from matplotlib.ticker import FixedFormatter, FuncFormatter, ScalarFormatter

    formatter = axis.get_major_formatter()
    if type(formatter) is ScalarFormatter:
        axis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    elif isinstance(formatter, FixedFormatter | FuncFormatter):
        axis.set_major_formatter(FuncFormatter(lambda value, place: unicode(formatter(value, place))))


def unicode(text: str) -> str:
    """Simple mathtext in Unicode's letters: $x_0$ and $10^{-2}$.

    Example:
        >>> from addnorm.report.figure import unicode
        >>> unicode("$x_0$"), unicode("$10^{-2}$")
        ('x₀', '10⁻²')
    """
    if not text.startswith("$"):
        return text
    text = re.sub(r"\^\{?([-\d]+)\}?", lambda found: found[1].translate(SUPERSCRIPT), text.strip("$"))
    return re.sub(r"_\{?(\d+|L)\}?", lambda found: found[1].translate(SUBSCRIPT), text)


def _saved(figure: Canvas) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", dpi=DPI, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return file.getvalue()
