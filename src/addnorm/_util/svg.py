"""Charts as SVG elements: every colour and font is a CSS variable of chart.css, and no element has an id.

A chart is drawn for a width in pixels, so that its texts have the size of the page's texts on wide and on narrow pages.
Series differ by colour, dash and filling, points by the marker of their kind.
"""

import base64
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources

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
# Heights: line of the legend, panel's name, ticks, axis's label, gap.
ENTRY, NAME, TICKS, LABEL, BETWEEN = 22, 26, 22, 20, 16
LABELLED = 16  # a map with at most so many rows and columns shows its numbers, if they have room
BAR = 0.72  # width of a bar, in units of the x axis
LEVELS = 32  # opacities of a map's cells
DARK = 0.5  # share of the largest number from which on a cell's text has the colour of the paper


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
        for j, panel in enumerate(chart.panels[begin : begin + columns]):
            x, size = j * (cell + BETWEEN) + left, cell - left - 8
            axis, scale = _x_axis(chart, panel)
            is_last = begin + columns >= len(chart.panels) or axis is not chart.x or isinstance(panel, Map)
            drawn = _draw_map(panel, size, left) if isinstance(panel, Map) else _draw_panel(panel, labels, scale, size)
            parts.append(_group(x, y, _text(2 - left, -10, panel.label, "name"), *drawn))
            parts.append(_group(x, y + panel.height, *_draw_x_axis(axis, scale, size, is_last)))
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
    """Return a chart as an HTML image, for notebooks, whose pages have their own styles."""
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


def _group(x: float, y: float, *elements: str) -> str:
    """Return elements whose coordinates begin at (x, y)."""
    return f'<g transform="translate({_number(x)} {_number(y)})">{"".join(elements)}</g>'


def _marks(points: Iterable[tuple[float, float]], shape: str) -> Iterator[str]:
    return (f"M{_number(x)} {_number(y)}{shape}" for x, y in points)


def _style_classes(series: Series, labels: Sequence[str]) -> str:
    """Return the CSS classes of a series' colour and dash. The dash changes each time that the colours repeat."""
    colour = labels.index(series.label) if series.colour is None else series.colour
    dash = colour + colour // NUM_LOOKS if series.dash is None else series.dash
    return f"s{colour % NUM_LOOKS + 1} d{dash % DASHES}"


def _list_legend(chart: Chart, labels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and swatch of each legend entry; a name that several panels use is yielded several times."""
    for panel in chart.panels:
        if isinstance(panel, Map):
            has_negative = any(share < 0 for column in panel.shares for share in column)
            for part in (*[-0.25] * has_negative, 0.01, 0.1, 0.25, 0.5, 1.0):
                yield f"{panel.most * part:.2g}", _cell(["M4-6h18v12h-18z"], _strength(part))
            continue
        if len({one.label for one in panel.series}) > 1:
            for one in panel.series:
                swatch = _path(["M4-5h18v10h-18z"], "bar") if one.form == "bars" else _path(["M0 0h26"], "line")
                point = _path(_marks([(13, 0)], ROUND), "point") if "" in one.kinds else ""
                yield one.label, f'<g class="{_style_classes(one, labels)}">{swatch}{point}</g>'
        yield from ((name, _path(["M0 0h26"], "rule")) for name, y in panel.lines.items() if panel.scale.has(y))
        if panel.lost:
            yield "NaN or infinite", _path(_marks([(13, 0)], CROSS), "lost")
        if panel.zeros:
            yield "0, off the log axis", _path(_marks([(13, 3)], TRIANGLE), "zeros")
    kinds = {kind for panel in chart.panels for one in panel.series for kind in one.kinds}
    yield from (
        (name, _path(_marks([(13, 0)], MARKERS[kind]), "kind")) for kind, name in NAMED.items() if kind in kinds
    )


def _draw_legend(chart: Chart, labels: Sequence[str], width: int) -> tuple[list[str], float]:
    """Return the legend above the panels, and its height."""
    swatches: dict[str, str] = {}
    for name, swatch in _list_legend(chart, labels):
        swatches.setdefault(name, swatch)
    parts, x, y = [], 2.0, ENTRY / 2
    for name, swatch in swatches.items():
        size = 34 + CHAR * len(name)
        if x > 2 and x + size > width:
            x, y = 2.0, y + ENTRY
        parts.append(_group(x, y, swatch, _text(32, 4, name)))
        x += size + 14
    return parts, y + ENTRY / 2 if swatches else 0.0


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


def _draw_x_axis(axis: Axis, scale: Scale, width: float, is_labelled: bool) -> Iterator[str]:
    """Yield the line, the ticks and the labels of an x axis. Numbers that have no room are left out."""
    yield _path([f"M0 0h{_number(width)}"], "axis")
    if not is_labelled:
        return
    ticks = {tick: format_tick(tick) for tick in scale.ticks(6)} if axis.ticks is None else axis.ticks
    places = [(width * scale.place(tick), text) for tick, text in ticks.items() if scale.has(tick)]
    room = 8 + CHAR * max((len(text) for _, text in places if text.isdigit()), default=1)
    stride = next(number for number in STRIDES if len(places) * room / number <= width)
    kept = [(x, text) for x, text in places if not text.isdigit()]
    for x, text in places:
        if text.isdigit() and int(text) % stride == 0 and all(abs(x - other) >= room for other, _ in kept):
            kept.append((x, text))
    yield _path((f"M{_number(x)} 0v4" for x, _ in kept), "axis")
    yield from (_text(x, 17, text, "mid") for x, text in kept)
    for name, ends in axis.groups.items():
        yield _text(width * scale.place(sum(ends) / 2), TICKS + 15, name, "mid")
    if axis.label:
        below = TICKS * (1 + bool(axis.groups))
        yield _text(width / 2, below + 13, axis.label, "mid name")


def _draw_panel(panel: Panel, labels: Sequence[str], across: Scale, width: float) -> Iterator[str]:
    """Yield the grid, the y axis, and the series of a panel."""
    scale = panel.scale

    def level(y: float) -> float:
        return 6 + panel.height * (1 - scale.place(y))

    yield from (_text(-7, level(tick) - 2, format_tick(tick), "end") for tick in scale.ticks())
    # The inner element cuts off lines beyond the limits.
    yield f'<svg y="-6" width="{_number(width)}" height="{_number(panel.height + 12)}">'
    rules = {
        "grid": scale.ticks(),
        "axis": [0.0] * (scale.low < 0 and scale.has(0.0)),
        "rule": [y for y in panel.lines.values() if scale.has(y)],
    }
    for classes, values in rules.items():
        yield _path((f"M0 {_number(level(y))}h{_number(width)}" for y in values), classes)
    for series in panel.series:
        yield f'<g class="{_style_classes(series, labels)}"><title>{escape(series.label)}</title>'
        kinds = series.kinds or [""] * len(series.points)
        drawn = [
            (width * across.place(x), level(y), kind) for (x, y), kind in zip(series.points, kinds, strict=True)
            if math.isfinite(y) and (y > 0 or not scale.log)
        ]  # fmt: skip
        if series.form == "bars":
            bar, base = BAR * width / (across.high - across.low), level(max(scale.low, 0.0))
            edges = f"h{_number(bar)}V{_number(base)}z"
            yield _path((f"M{_number(x - bar / 2)} {_number(base)}V{_number(y)}{edges}" for x, y, _ in drawn), "bar")
        elif series.form == "line":
            yield _path((f"{'L' if j else 'M'}{_number(x)} {_number(y)}" for j, (x, y, _) in enumerate(drawn)), "line")
        if series.form == "dots" or (series.form == "line" and series.kinds and len(drawn) <= MANY):
            for kind in dict.fromkeys(kind for _, _, kind in drawn):
                own = ((x, y) for x, y, of in drawn if of == kind)
                yield _path(_marks(own, MARKERS.get(kind, MARKERS["other"])), "point")
        yield "</g>"
    for classes, points, y, shape in (
        ("lost", panel.lost, 14, CROSS), ("zeros", panel.zeros, panel.height + 6, TRIANGLE),
    ):  # fmt: skip
        yield _path(_marks(((width * across.place(x), y) for x, _ in points), shape), classes)
    yield "</svg>"


def _draw_map(panel: Map, width: float, margin: float) -> Iterator[str]:
    """Yield the cells of a map, and the names of the sources in its left margin. Cells before a source's write are blank."""
    wide, high = width / len(panel.shares), panel.height / len(panel.sources)
    cells: dict[float, list[str]] = {}
    texts: list[str] = []
    room = int((margin - 7) / CHAR)
    is_labelled = max(len(panel.shares), len(panel.sources)) <= LABELLED and wide > 5 * CHAR
    for row, (source, numbers) in enumerate(zip(panel.sources, panel.cells, strict=True), 1):
        y = panel.height - high * row  # the first source is the lowest
        for k, share in enumerate(numbers):
            if math.isfinite(share):
                strength = _strength(share / (panel.most or 1.0))
                step = f"M{_number(wide * k)} {_number(y)}h{wide:.2f}v{high:.2f}h-{wide:.2f}z"
                cells.setdefault(round(LEVELS * strength) / LEVELS, []).append(step)
                if is_labelled:
                    classes = "mid dark" if abs(share) > DARK * panel.most else "mid"
                    texts.append(_text(wide * (k + 0.5), y + high / 2 + 4, f"{share:.2f}", classes))
        text = source if len(source) <= room else f"…{source[1 - room :]}"
        texts.append(_text(-7, y + high / 2 + 4, text, "end"))
    yield from (_cell(steps, strength) for strength, steps in cells.items())
    yield from texts


def _strength(part: float) -> float:
    """Return the strength of the colour of a share, given as a part of the largest share.

    It is the square root of the part's magnitude, with the part's sign. The root keeps small shares visible: in a deep stream all
    shares but that of x_0 are small.
    """
    return math.copysign(math.sqrt(min(abs(part), 1.0)), part)


def _cell(steps: Iterable[str], strength: float) -> str:
    """Return the SVG path of all cells that have the same strength."""
    opacity = 0.04 + 0.96 * abs(strength)
    return f'<path class="cell s{2 if strength < 0 else 1}" fill-opacity="{opacity:.2f}" d="{"".join(steps)}"/>'
