"""`draw_figure`: a matplotlib drawing as a `Figure`, SVG with the page's colours and fonts.

- Each figure is drawn twice, for wide and narrow pages, so that its text has the size of the page's text in both.
- pyplot is not used: no window opens and no setting changes.
- The colours of `COLOUR_VARIABLES` become CSS variables, so one drawing is right in light and dark; other colours stay.
- Ids begin with the name of the drawing, and only referenced elements have one, so drawings on one page do not collide.
- There is no prolog, metadata, date or link: the same drawing always gives the same text.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from addnorm._util.optional import require
from addnorm.report.page import Figure, Table
from addnorm.stream.record.axes import format_tick

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["COLOUR_VARIABLES", "INK", "PAPER", "apply_theme", "draw_figure"]

WIDE, NARROW = 9.6, 3.9  # inches; a page shows the drawings at 1.4 and 1.2 times this size
DPI = 200  # of rasterized heat maps
TWO_ROWS = 0.4  # inches: height of a legend with two rows
VECTOR_CELLS = 1000  # heat maps with more cells are rasterized

# Ink and paper differ from all colours of colour maps, so they can be recognized in the SVG.
INK, PAPER = "#1b1c1d", "#fefdfc"
COLOUR_VARIABLES = {
    INK: "var(--ink)", PAPER: "var(--paper)", "#dddddd": "var(--grid)", "#6b6b6b": "var(--muted)",
    "#b00020": "var(--alarm)", "#0072b2": "var(--series-1)", "#d55e00": "var(--series-2)",
    "#009e73": "var(--series-3)", "#cc79a7": "var(--series-4)", "#6a3d9a": "var(--series-5)", "#8c510a": "var(--series-6)",
    "#3b3b3b": "var(--series-7)",
}  # fmt: skip
"""Colours of addnorm's drawings, and the variables of style.css that replace them."""

SETTINGS = {
    "svg.fonttype": "none", "axes.facecolor": PAPER, "figure.facecolor": "none", "axes.edgecolor": "#6b6b6b",
    "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "xtick.color": "#6b6b6b", "ytick.color": "#6b6b6b",
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.linewidth": 0.7, "xtick.major.width": 0.7,
    "ytick.major.width": 0.7, "hatch.linewidth": 0.7, "font.family": ["sans-serif"], "font.sans-serif": ["DejaVu Sans"],
    "axes.unicode_minus": True, "mathtext.default": "regular", "svg.image_inline": True,
}  # fmt: skip
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
_REFERENCE = re.compile(r"(?<=#)[\w.-]+(?=\)|$)")
_FONT = re.compile(r"(?<=px )[^;]+|(?<=font-family: )[^;]+")
_LONG = re.compile(r"-?\d+\.\d{3,}")
_NOT_TURNED = re.compile(r"rotate\(-?0(\.0)? [^)]*\)")
_GEOMETRY = ("d", "x", "y", "width", "height", "transform", "x1", "x2", "y1", "y2", "cx", "cy", "r", "points")
SUPERSCRIPT, SUBSCRIPT = (str.maketrans("-0123456789L", line) for line in ("⁻⁰¹²³⁴⁵⁶⁷⁸⁹ᴸ", "₋₀₁₂₃₄₅₆₇₈₉ʟ"))


def draw_figure(
    name: str, draw: Callable[[Canvas], object], *, title: str, caption: str, table: Table,
    height: float | Callable[[bool], float] = 3.6,
) -> Figure:  # fmt: skip
    """Draw a figure of a page.

    Args:
        name: name of the figure, unique on the page: letters, digits and hyphens.
        draw: function that draws on an empty matplotlib figure; it is called once per width. Example:
            `lambda figure: rec.plot.stream(ax=figure.add_subplot())`. The title of the first Axes is removed.
        title: what the figure shows.
        caption: how to read it.
        table: the drawn numbers.
        height: height in inches (the width is 9.6 inches), or a function of whether the page is wide that returns it. Legends
            of more than two rows add to the height.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the name is invalid, or `draw` has nothing to draw.
    """
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ValueError(
            f"name is {name!r}, expected letters, digits and hyphens: the ids of the drawing begin with it."
        )
    matplotlib = require("matplotlib", "draw")
    figures = require("matplotlib.figure", "draw")
    label = f"{title}. {caption}"
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser's fonts draw the text
        svgs = []
        for form, width in (("wide", WIDE), ("narrow", NARROW)):
            inches = height(width == WIDE) if callable(height) else height
            figure = figures.Figure(figsize=(width, inches), layout="constrained")
            figure.get_layout_engine().set(h_pad=0.09)  # inches between panels
            draw(figure)
            figure.set_figheight(inches + _legend_height(figure))
            _prepare(figure)
            _align(figure)
            svgs.append(apply_theme(_to_svg(figure), f"{name}-{form}", label, f"chart {form}"))
    return Figure(title, caption, svgs[0], table, svgs[1])


def _legend_height(figure: Canvas) -> float:
    """Return in inches how much higher than two rows the legends are."""
    legends = [legend for ax in figure.axes if (legend := ax.get_legend()) is not None]
    return sum(max(legend.get_window_extent().height / figure.dpi - TWO_ROWS, 0.0) for legend in legends)


def _prepare(figure: Canvas) -> None:
    """Remove the title, mathtext and large vector maps, which suit a notebook and not a page."""
    for index, ax in enumerate(figure.axes):
        if not index:
            ax.set_title("", loc="left")
        for axis in (ax.xaxis, ax.yaxis):
            _remove_mathtext(axis)
        for text in ax.texts:
            text.set_text(to_unicode(text.get_text()))
        for mesh in ax.collections:
            cells = mesh.get_array()
            if cells is not None and cells.size > VECTOR_CELLS:
                mesh.set_rasterized(True)


def _align(figure: Canvas) -> None:
    """Align panels above one another, whose tick labels have different widths, by their depths."""
    if len(figure.axes) < 2 or any(ax.get_label() == "<colorbar>" for ax in figure.axes):
        return
    figure.draw_without_rendering()  # runs the layout
    figure.set_layout_engine("none")
    boxes = [ax.get_position() for ax in figure.axes]
    left, right = max(box.x0 for box in boxes), min(box.x1 for box in boxes)
    for ax, box in zip(figure.axes, boxes, strict=True):
        ax.set_position((left, box.y0, right - left, box.height))
    figure.align_ylabels()


def _remove_mathtext(axis: Any) -> None:
    """Format ticks without mathtext, which SVG places letter by letter in another font's widths, and without an axis factor."""
    from matplotlib.ticker import FixedFormatter, FuncFormatter, ScalarFormatter

    formatter = axis.get_major_formatter()
    if type(formatter) is ScalarFormatter:
        axis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    elif isinstance(formatter, FixedFormatter | FuncFormatter):
        axis.set_major_formatter(FuncFormatter(lambda value, place: to_unicode(formatter(value, place))))


def to_unicode(text: str) -> str:
    """Return simple mathtext as Unicode text: $x_0$ and $10^{-2}$.

    Example:
        >>> from addnorm.report.figure import to_unicode
        >>> to_unicode("$x_0$"), to_unicode("$10^{-2}$")
        ('x₀', '10⁻²')
    """
    if not text.startswith("$"):
        return text
    text = re.sub(r"\^\{?([-\d]+)\}?", lambda match: match[1].translate(SUPERSCRIPT), text.strip("$"))
    return re.sub(r"_\{?(\d+|L)\}?", lambda match: match[1].translate(SUBSCRIPT), text)


def _to_svg(figure: Canvas) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", dpi=DPI, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return file.getvalue()


def apply_theme(svg: str, name: str, label: str, classes: str) -> str:
    """Return the SVG for use in a page.

    Args:
        svg: the SVG that matplotlib wrote.
        name: name of the drawing, unique on the page: letters, digits and hyphens.
        label: description for screen readers.
        classes: classes of the element in style.css.
    """
    root = ElementTree.fromstring(svg)
    _strip(root)
    for child in [child for child in root if child.tag in ("metadata", "title")]:
        root.remove(child)
    view = root.get("viewBox", "")
    root.attrib = {"class": classes, "viewBox": view, "role": "img", "aria-label": label}
    names = _rename_ids(root, name)
    for element in root.iter():
        if element is root:
            continue
        _restyle(element)
        for key, value in element.attrib.items():
            if key == "href" or "url(#" in value:
                element.set(key, _REFERENCE.sub(lambda match: names.get(match[0], match[0]), value))
    return ElementTree.tostring(root, encoding="unicode")


def _strip(root: ElementTree.Element) -> None:
    """Remove namespaces, which HTML does not need, style sheets, and white space between elements."""
    for element in root.iter():
        element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        for rules in [child for child in element if child.tag.endswith("}style")]:
            element.remove(rules)  # they would apply to the whole page; style.css has these rules
        if not element.tag.endswith(("}text", "}tspan")):
            element.text = None
        element.tag = element.tag.rpartition("}")[2]
        element.tail = "\n" if element.tag == "g" else None


def _rename_ids(root: ElementTree.Element, name: str) -> dict[str, str]:
    """Remove unreferenced ids, rename the others in their order, and return the new names by the old ones."""
    referenced = {
        target
        for element in root.iter()
        for key, value in element.attrib.items()
        if key == "href" or "url(#" in value
        for target in _REFERENCE.findall(value)
    }
    names: dict[str, str] = {}
    for element in root.iter():
        if (old := element.attrib.pop("id", None)) in referenced and old is not None:
            names[old] = f"{name}-{len(names) + 1}"
            element.set("id", names[old])
    return names


def _restyle(element: ElementTree.Element) -> None:
    """Replace fonts and colours by the page's, and round coordinates to two decimals."""
    for key in ("fill", "stroke"):  # in patterns; attributes cannot use CSS variables
        if element.get(key, "").lower() in COLOUR_VARIABLES:
            element.set("style", f"{key}: {element.attrib.pop(key)}; {element.get('style', '')}".rstrip("; "))
    style = element.get("style")
    if style is not None:
        if element.tag == "text" and not re.search(r"(^|[; ])fill:", style):
            style = f"{style}; fill: #000000"  # matplotlib omits black
        style = _COLOUR.sub(lambda match: COLOUR_VARIABLES.get(match[0].lower(), match[0]), style)
        element.set("style", _FONT.sub("var(--font)", style))
    if "transform" in element.attrib and not (turned := _NOT_TURNED.sub("", element.attrib["transform"])).strip():
        del element.attrib["transform"]
    elif "transform" in element.attrib:
        element.set("transform", turned)
    for key in _GEOMETRY:
        if key in element.attrib:
            element.set(key, _LONG.sub(lambda match: f"{float(match[0]):.2f}", element.attrib[key]))
