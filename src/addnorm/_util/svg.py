"""Charts as SVG elements: every colour and font is a CSS variable of chart.css, and no element has an id.

A chart is drawn for a width in pixels, so that its texts have the size of the page's texts on wide and on narrow pages.
Series differ by colour, dash and filling, points by the marker of their kind.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from typing import NamedTuple

from addnorm._util.charts import NUM_LOOKS, STRIDES, Axis, Chart, Map, Panel, Scale, Series, format_tick

WIDE, NARROW = 1000, 372  # pixels
DASHES = 4
# Outlines of the markers around their point.
ROUND = "m-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0z"
MARKERS = {
    "": ROUND, "start": "m-3-4l7 4l-7 4z", "attention": ROUND, "cross-attention": "m0-4.6l4.6 4.6l-4.6 4.6l-4.6-4.6z",
    "feed-forward": "m-3.2-3.2h6.4v6.4h-6.4z", "other": "m0-4.4l4.2 7.4h-8.4z",
    "final": "m0-6.5l1.6 4.4h4.6l-3.6 2.8l1.4 4.6l-4-2.8l-4 2.8l1.4-4.6l-3.6-2.8h4.6z",
}  # fmt: skip
NAMED = {
    "attention": "attention",
    "cross-attention": "cross-attention",
    "feed-forward": "feed-forward",
    "other": "other sublayer",
}
CROSS, TRIANGLE = "m-3.5-3.5l7 7m0-7l-7 7", "m-4-6h8l-4 6z"
MANY = 64  # points beyond which markers would cover the line
CHAR = 7.0  # average width of a character
ENTRY, NAME, TICKS, LABEL, BETWEEN = (
    22,
    26,
    22,
    20,
    16,
)  # heights: line of the legend, panel's name, ticks, axis's label, gap
LABELLED = 16  # a map with at most so many rows and columns shows its numbers, if they have room
BAR = 0.72  # width of a bar, in units of the x axis
LEVELS = 32  # opacities of a map's cells
DARK = 0.5  # share of the largest number from which on a cell's text has the colour of the paper


class Box(NamedTuple):
    """Rectangle of a panel in pixels, and the room for texts on its left."""

    x: float
    y: float
    width: float
    height: float
    left: float


def draw_chart(chart: Chart, width: int, classes: str = "chart") -> str:
    """Return a chart as an SVG element.

    Args:
        chart: the chart.
        width: width in pixels, `WIDE` or `NARROW`.
        classes: CSS classes of the element.
    """
    columns = min(chart.columns, len(chart.panels)) if width > NARROW else 1
    cell = (width - BETWEEN * (columns - 1)) / columns
    left = min(14 + CHAR * max(len(text) for panel in chart.panels for text in _side_texts(panel)), 0.4 * cell)
    labels = [*dict.fromkeys(series.label for panel in chart.panels for series in panel.series)]
    parts, y = _draw_legend(chart, labels, width)
    for begin in range(0, len(chart.panels), columns):
        bottom = 0.0
        y += NAME
        row: Sequence[Panel | Map] = chart.panels[begin : begin + columns]
        for j, panel in enumerate(row):
            box = Box(j * (cell + BETWEEN) + left, y, cell - left - 8, panel.height, left)
            axis, scale = _x_axis(chart, panel)
            is_last = begin + columns >= len(chart.panels) or axis is not chart.x or isinstance(panel, Map)
            parts.append(_text(box.x - left + 2, y - 10, panel.label, "name"))
            parts += _draw_map(panel, box) if isinstance(panel, Map) else _draw_panel(panel, labels, scale, box)
            parts += _draw_x_axis(axis, scale, box, is_last)
            bottom = max(bottom, panel.height + is_last * (TICKS * (1 + bool(axis.groups)) + LABEL * bool(axis.label)))
        y += bottom + BETWEEN / 2
    label = escape(f"{chart.title}. {chart.caption}")
    return (
        f'<svg class="{classes}" viewBox="0 0 {width} {y:.0f}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    )


def chart_file(chart: Chart) -> str:
    """Return a chart as the text of an SVG file, in light or dark as the reader prefers."""
    svg, style = draw_chart(chart, WIDE), read_style()
    begin = svg.index(">") + 1
    head = svg[: begin - 1].replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return f'{head}><style>{style}</style><rect class="paper" width="100%" height="100%"/>{svg[begin:]}\n'


def chart_image(chart: Chart) -> str:
    """Return a chart as an HTML image, for notebooks, whose pages have other styles."""
    data, text = base64.b64encode(chart_file(chart).encode()).decode(), escape(f"{chart.title}. {chart.caption}")
    return f'<img style="width:100%;max-width:{WIDE}px" alt="{text}" src="data:image/svg+xml;base64,{data}">'


def read_style() -> str:
    """Return the style of the elements of a chart."""
    return resources.files("addnorm._util").joinpath("chart.css").read_text(encoding="utf-8")


def _side_texts(panel: Panel | Map) -> Iterable[str]:
    """Return the texts on the left side of a panel: a map's sources, or the numbers of the ticks."""
    return panel.sources if isinstance(panel, Map) else map(format_tick, panel.scale.ticks())


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, text: str, classes: str = "") -> str:
    return f'<text class="{classes}" x="{_number(x)}" y="{_number(y)}">{escape(text)}</text>'


def _path(steps: Iterable[str], classes: str) -> str:
    d = "".join(steps)
    return f'<path class="{classes}" d="{d}"/>' if d else ""


def _marks(points: Iterable[tuple[float, float]], shape: str) -> Iterator[str]:
    return (f"M{_number(x)} {_number(y)}{shape}" for x, y in points)


def _style_classes(series: Series, labels: Sequence[str]) -> str:
    """Return the CSS classes of a series' colour and dash. The dash changes each time that the colours repeat."""
    colour = labels.index(series.label) if series.colour is None else series.colour
    dash = colour + colour // NUM_LOOKS if series.dash is None else series.dash
    return f"s{colour % NUM_LOOKS + 1} d{dash % DASHES}"


def _draw_legend(chart: Chart, labels: Sequence[str], width: int) -> tuple[list[str], float]:
    """Return the legend above the panels, and its height."""
    entries: dict[str, str] = {}
    for panel in chart.panels:
        if isinstance(panel, Map):
            negative = any(share < 0 for column in panel.shares for share in column)
            for share in (*[-panel.most / 4] * negative, *(panel.most * part for part in (0.01, 0.1, 0.25, 0.5, 1))):
                entries[f"{share:.2g}"] = _cell(["M4-6h18v12h-18z"], share, panel.most)
            continue
        if len({one.label for one in panel.series}) > 1:
            for one in panel.series:
                swatch = _path(["M4-5h18v10h-18z"], "bar") if one.form == "bars" else _path(["M0 0h26"], "line")
                point = _path(_marks([(13, 0)], ROUND), "point") if "" in one.kinds else ""
                entries.setdefault(one.label, f'<g class="{_style_classes(one, labels)}">{swatch}{point}</g>')
        entries |= {name: _path(["M0 0h26"], "rule") for name, y in panel.lines.items() if panel.scale.has(y)}
        if panel.lost:
            entries["NaN or infinite"] = _path(_marks([(13, 0)], CROSS), "lost")
        if panel.zeros:
            entries["0, off the log axis"] = _path(_marks([(13, 3)], TRIANGLE), "zeros")
    kinds = {kind for panel in chart.panels for one in panel.series for kind in one.kinds}
    entries |= {name: _path(_marks([(13, 0)], MARKERS[kind]), "kind") for kind, name in NAMED.items() if kind in kinds}
    parts, x, y = [], 2.0, ENTRY / 2
    for name, swatch in entries.items():
        size = 34 + CHAR * len(name)
        if x > 2 and x + size > width:
            x, y = 2.0, y + ENTRY
        parts.append(f'<g transform="translate({_number(x)} {_number(y)})">{swatch}{_text(32, 4, name)}</g>')
        x += size + 14
    return parts, y + ENTRY / 2 if entries else 0.0


def _x_axis(chart: Chart, panel: Panel | Map) -> tuple[Axis, Scale]:
    """Return the x axis of a panel, with room for the markers at its ends."""
    if isinstance(panel, Map):
        return chart.x, Scale(-0.5, len(panel.shares) - 0.5)
    axis = panel.x or chart.x
    values = [*(axis.ticks or ()), *(x for series in panel.series for x, _ in series.points)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if axis.log:
        room = (high / low) ** 0.04
        return axis, Scale(low / room, high * room, True)
    room = 0.6 if axis.ticks else 0.012 * (high - low) or 1.0
    return axis, Scale(low - room, high + room)


def _draw_x_axis(axis: Axis, scale: Scale, box: Box, is_labelled: bool) -> Iterator[str]:
    """Yield the line, the ticks and the labels of an x axis. Numbers that have no room are left out."""
    y = box.y + box.height
    yield _path([f"M{_number(box.x)} {_number(y)}h{_number(box.width)}"], "axis")
    if not is_labelled:
        return
    ticks = {tick: format_tick(tick) for tick in scale.ticks(6)} if axis.ticks is None else axis.ticks
    places = [
        (box.x + box.width * scale.place(tick), text) for tick, text in ticks.items() if scale.low <= tick <= scale.high
    ]
    room = 8 + CHAR * max((len(text) for _, text in places if text.isdigit()), default=1)
    stride = next(number for number in STRIDES if len(places) * room / number <= box.width)
    kept = [(x, text) for x, text in places if not text.isdigit()]
    for x, text in places:
        if text.isdigit() and int(text) % stride == 0 and all(abs(x - other) >= room for other, _ in kept):
            kept.append((x, text))
    yield _path((f"M{_number(x)} {_number(y)}v4" for x, _ in kept), "axis")
    yield from (_text(x, y + 17, text, "mid") for x, text in kept)
    for name, ends in axis.groups.items():
        y = box.y + box.height + TICKS
        yield _text(box.x + box.width * scale.place(sum(ends) / 2), y + 15, name, "mid")
    yield _text(box.x + box.width / 2, y + TICKS + 13, axis.label, "mid name") if axis.label else ""


def _draw_panel(panel: Panel, labels: Sequence[str], across: Scale, box: Box) -> Iterator[str]:
    """Yield the grid, the y axis, and the series of a panel."""
    scale = panel.scale
    grid = [(box.y + box.height * (1 - scale.place(tick)), format_tick(tick)) for tick in scale.ticks()]
    yield _path((f"M{_number(box.x)} {_number(y)}h{_number(box.width)}" for y, _ in grid), "grid")
    yield from (_text(box.x - 7, y + 4, text, "end") for y, text in grid)
    # The inner element cuts off what lies beyond the limits.
    yield f'<svg x="{_number(box.x)}" y="{_number(box.y - 6)}" width="{_number(box.width)}" height="{_number(box.height + 12)}">'

    def place(x: float, y: float) -> tuple[float, float]:
        return box.width * across.place(x), 6 + box.height * (1 - scale.place(y))

    rules = {
        "axis": [0.0] * (scale.low < 0 and scale.has(0.0)),
        "rule": [y for y in panel.lines.values() if scale.has(y)],
    }
    for classes, heights in rules.items():
        yield _path((f"M0 {_number(place(across.high, y)[1])}h{_number(box.width)}" for y in heights), classes)
    for series in panel.series:
        yield f'<g class="{_style_classes(series, labels)}"><title>{escape(series.label)}</title>'
        kinds = series.kinds or [""] * len(series.points)
        drawn = [
            (*place(x, y), kind) for (x, y), kind in zip(series.points, kinds, strict=True)
            if math.isfinite(y) and (y > 0 or not scale.log)
        ]  # fmt: skip
        if series.form == "bars":
            width, base = BAR * box.width / (across.high - across.low), place(across.high, max(scale.low, 0.0))[1]
            edges = f"h{_number(width)}V{_number(base)}z"
            yield _path((f"M{_number(x - width / 2)} {_number(base)}V{_number(y)}{edges}" for x, y, _ in drawn), "bar")
        elif series.form == "line":
            yield _path((f"{'L' if j else 'M'}{_number(x)} {_number(y)}" for j, (x, y, _) in enumerate(drawn)), "line")
        if series.form == "dots" or (series.form == "line" and series.kinds and len(drawn) <= MANY):
            for kind in dict.fromkeys(kind for _, _, kind in drawn):
                own = ((x, y) for x, y, of in drawn if of == kind)
                yield _path(_marks(own, MARKERS.get(kind, MARKERS["other"])), "point")
        yield "</g>"
    lost, zeros = ([box.width * across.place(x) for x, _ in points] for points in (panel.lost, panel.zeros))
    yield _path(_marks(((x, 14) for x in lost), CROSS), "lost")
    yield _path(_marks(((x, box.height + 6) for x in zeros), TRIANGLE), "zeros")
    yield "</svg>"


def _draw_map(panel: Map, box: Box) -> Iterator[str]:
    """Yield the cells of a map. Cells before a source's write are blank.

    The opacity is the square root of the share: shares in a deep stream are small and of either sign, except that of x_0.
    """
    width, height = box.width / len(panel.shares), box.height / len(panel.sources)
    cells: dict[float, list[str]] = {}
    texts: list[str] = []
    room = int((box.left - 7) / CHAR)
    is_labelled = max(len(panel.shares), len(panel.sources)) <= LABELLED and width > 5 * CHAR
    for row, (source, numbers) in enumerate(zip(panel.sources, panel.cells, strict=True)):
        y = box.y + box.height - height * (row + 1)  # the first source is the lowest
        for k, share in enumerate(numbers):
            if math.isfinite(share):
                x = box.x + width * k
                step = f"M{_number(x)} {_number(y)}h{width:.2f}v{height:.2f}h-{width:.2f}z"
                level = math.copysign(round(LEVELS * _opacity(share, panel.most)) / LEVELS, share)
                cells.setdefault(level, []).append(step)
                if is_labelled:
                    texts.append(
                        _text(
                            x + width / 2,
                            y + height / 2 + 4,
                            f"{share:.2f}",
                            "mid dark" if abs(share) > DARK * panel.most else "mid",
                        )
                    )
        text = source if len(source) <= room else f"…{source[1 - room :]}"
        texts.append(_text(box.x - 7, y + height / 2 + 4, text, "end"))
    yield from (_cell(steps, math.copysign(level**2 * panel.most, level), panel.most) for level, steps in cells.items())
    yield from texts


def _opacity(share: float, most: float) -> float:
    return math.sqrt(min(abs(share) / (most or 1.0), 1.0))


def _cell(steps: Iterable[str], share: float, most: float) -> str:
    """Return the SVG path of all cells that have the same share."""
    opacity = 0.04 + 0.96 * _opacity(share, most)
    return f'<path class="cell s{2 if share < 0 else 1}" fill-opacity="{opacity:.2f}" d="{"".join(steps)}"/>'
