"""Charts as data: panels of series, or of cells. A `Chart` has all that is drawn, and a table of its numbers.

`addnorm._util.svg` draws a chart with the colours of the page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from addnorm._util.blocks import Cell, Table
from addnorm._util.numbers import format_number

Points = Sequence[tuple[float, float]]
# The look of a wiring in every chart: number of its colour and marker. The explorer has the same (chart/looks.js).
LOOKS = {
    "post_ln": 0, "pre_ln": 1, "sandwich": 2, "reordered": 3, "deepnorm": 4, "no_norm": 5, "no_residual": 6,
    "hyper_connections": 3, "mhc": 2, "attention_residuals": 4, "rezero": 2, "peri_ln": 3,
}  # fmt: skip
NUM_LOOKS = 7
STRIDES = (1, 2, 4, 6, 12, 24, 48, 96, 192, 384, 768)  # between two numbers on an axis of depth
LOG_RATIO = 10.0  # a larger ratio of largest to smallest value needs a logarithmic axis
ROW = 18  # pixels: height of a map's row
GAP = 2  # distance between two streams on an axis of depth, in sublayers


def choose_looks(wirings: Sequence[str]) -> list[int]:
    """Return the index of the colour and marker of each wiring.

    It is that of `LOOKS`, or a free index if that is taken or missing. From index 7 on the colours repeat, with another dash.

    Example:
        >>> from addnorm._util.charts import choose_looks
        >>> choose_looks(["pre_ln", "post_ln"]), choose_looks(["mine", "pre_ln", "pre_ln"])
        ([1, 0], [0, 1, 2])
    """
    looks: list[int] = []
    own = {name: LOOKS[name] for name in wirings if name in LOOKS}
    for name in wirings:
        look = own.get(name)
        if look is None or look in looks:
            taken = {*looks, *own.values()}
            look = next(n for n in itertools.count() if n not in taken)
        looks.append(look)
    return looks


class Axis(NamedTuple):
    """The x axis that the panels of a chart share.

    Attributes:
        label: the quantity.
        log: whether the axis is logarithmic.
        ticks: labels by their place on the axis; None means round numbers. Numbers are left out if there is no room.
        groups: first and last place of each group, by the group's name. The names are written below the ticks.
    """

    label: str
    log: bool = False
    ticks: Mapping[float, str] | None = None
    groups: Mapping[str, tuple[float, float]] = {}


class Series(NamedTuple):
    """Points with one label and one style in a panel.

    Attributes:
        label: name in the legend and the table. Series of one name share a line of the legend.
        points: x and y of each point. NaN and infinity are marked at the top of the panel.
        kinds: the kind of sublayer of each point, which selects the marker. Without kinds there are no markers.
        form: a line with its markers, dots alone, or bars.
        colour, dash: indices of the colour and of the dash. If the colour is None, it is the index of the series' label in the
            chart. If the dash is None, it follows from the colour and changes each time that the colours repeat.
    """

    label: str
    points: Points
    kinds: Sequence[str] = ()
    form: Literal["line", "dots", "bars"] = "line"
    colour: int | None = None
    dash: int | None = None


class Panel(NamedTuple):
    """Drawing area of one quantity, with its y axis.

    Attributes:
        label: the quantity.
        series: the series.
        limits: range of the axis, beyond which lines are cut off; None if the values decide.
        least: range that a linear axis covers at least.
        log: whether the axis is logarithmic. None means: if no value is negative, the positive values span more than a factor of
            `LOG_RATIO`, and neither `limits` nor `least` is set.
        lines: y of horizontal lines by their labels. Lines out of range are not drawn.
        height: height in pixels.
        x: the panel's own x axis; None is the x axis of the chart.
    """

    label: str
    series: Sequence[Series]
    limits: tuple[float, float] | None = None
    least: tuple[float, float] | None = None
    log: bool | None = None
    lines: Mapping[str, float] = {}
    height: int = 200
    x: Axis | None = None

    @property
    def lost(self) -> Points:
        """The points whose values are NaN or infinite."""
        return [(x, y) for series in self.series for x, y in series.points if not math.isfinite(y)]

    @property
    def zeros(self) -> Points:
        """The points of value 0, which have no place on a logarithmic y axis."""
        return [(x, y) for series in self.series for x, y in series.points if y == 0 and self.scale.log]

    @property
    def scale(self) -> Scale:
        """The y axis. A linear axis without `limits` and `least` includes 0: otherwise small differences look large."""
        values = [y for series in self.series for _, y in series.points if math.isfinite(y)]
        positive = [y for y in values if y > 0]
        low, high = min(values, default=0.0), max(values, default=1.0)
        log = self.log
        if log is None:
            log = not (self.limits or self.least or low < 0 or not positive) and high > LOG_RATIO * min(positive)
        if self.limits is not None:
            return Scale(*self.limits, log)
        if log and positive:
            room = (high / min(positive)) ** 0.06
            return Scale(min(positive) / room, high * room, True)
        least = self.least or (0.0, 0.0)
        low, high = min(low, least[0]), max(high, least[1])
        room = 0.06 * ((high - low) or 1.0)
        return Scale(low - room * (low < 0), high + room)


class Map(NamedTuple):
    """Panel of coloured cells: the vertical axis has the sources, the horizontal axis the depths.

    Attributes:
        label: what the panel shows.
        sources: names of the sources.
        shares: the numbers of all sources at each depth.
        most: magnitude that has the strongest colour, the same in all maps of a chart.
    """

    label: str
    sources: Sequence[str]
    shares: Sequence[Sequence[float]]
    most: float = 1.0

    @property
    def series(self) -> Sequence[Series]:
        """Empty, since a map has cells in place of series."""
        return ()

    @property
    def cells(self) -> list[list[float]]:
        """The numbers of each source by depth. Leading zeros are NaN: the source is not written yet."""
        rows = [*zip(*self.shares, strict=True)]
        begins = [next((k for k, share in enumerate(row) if share), 0) for row in rows]
        return [[*[math.nan] * begin, *row[begin:]] for row, begin in zip(rows, begins, strict=True)]

    @property
    def height(self) -> int:
        """Height in pixels."""
        return ROW * max(len(self.sources), 3)


@dataclass(frozen=True)
class Chart:
    """Chart as data: panels below one another with a common x axis, and the table of their numbers.

    Attributes:
        title: what the chart shows.
        caption: how to read it, in a sentence or two.
        panels: the panels, which share the x axis.
        x: the x axis.
        columns: panels side by side on a wide page. On a narrow page all panels are below one another.
        table: the numbers.
    """

    title: str
    caption: str
    panels: Sequence[Panel | Map]
    x: Axis
    columns: int = 1
    table: Table = field(default_factory=lambda: Table([], []))

    def with_table(self, head: Sequence[str], names: Mapping[float, Sequence[Cell]], caption: str) -> Chart:
        """Return the chart with a table. Each x in `names` has a row: these cells, then the numbers of all series."""
        labels = {series.label for panel in self.panels for series in panel.series}
        columns: dict[str, dict[float, float]] = {}
        for panel in self.panels:
            for series in panel.series:
                parts = [series.label] * (len(labels) > 1) + [panel.label] * (len(self.panels) > 1 or len(labels) == 1)
                columns.setdefault(": ".join(parts), {}).update(series.points)
        rows = [[*cells, *(numbers.get(x) for numbers in columns.values())] for x, cells in names.items()]
        return replace(self, table=Table([*head, *columns], rows, caption))


class Scale(NamedTuple):
    """Range of an axis, linear or logarithmic.

    Example:
        >>> from addnorm._util.charts import Scale
        >>> Scale(0.0, 4.5).ticks(), Scale(0.5, 2000.0, True).ticks(), Scale(1.0, 100.0, True).place(10.0)
        ([0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 10.0, 100.0, 1000.0], 0.5)
        >>> Scale(0.5, 40.0, True).ticks(), Scale(1e-7, 3e-7).ticks()[0]
        ([0.5, 1.0, 2.0, 5.0, 10.0, 20.0], 1e-07)
    """

    low: float
    high: float
    log: bool = False

    def has(self, value: float) -> bool:
        """Return whether a value is in the range."""
        return self.low <= value <= self.high

    def place(self, value: float) -> float:
        """Return the position of a value on the axis: 0 at the lower end, 1 at the upper end."""
        low, high, at = (math.log(number) if self.log else number for number in (self.low, self.high, value))
        return (at - low) / ((high - low) or 1.0)

    def ticks(self, most: int = 5) -> list[float]:
        """Return round numbers in the range, about `most` of them."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            parts = (1, 2, 5) if self.high < 200 * self.low else (1,)
            numbers = [part * 10.0**power for power in decades[:: 1 + len(decades) // (most + 2)] for part in parts]
        else:
            size = (self.high - self.low) / most
            step = 10.0 ** math.floor(math.log10(size)) if size > 0 else 1.0
            step *= next((factor for factor in (1, 2, 5) if factor * step >= size), 10)
            numbers = [round(k * step, 12) for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [number for number in numbers if self.has(number)]


def format_tick(value: float) -> str:
    """Return a tick's label with at most four digits.

    Example:
        >>> from addnorm._util.charts import format_tick
        >>> format_tick(0.25), format_tick(1e-6), format_tick(12000000.0)
        ('0.25', '1e−6', '1.2e7')
    """
    return format_number(float(value), trim=True).replace("-", "\N{MINUS SIGN}")


def list_places(panels: Iterable[Panel]) -> list[float]:
    """Return the places on the x axis where a series of the panels has a point."""
    return sorted({x for panel in panels for series in panel.series for x, _ in series.points})


def number_axis(places: Iterable[float]) -> Axis:
    """Return an axis of depth whose ticks are x_0 and the numbers of the sublayers."""
    return Axis("depth in sublayers", ticks={k: f"{k:g}" if k else "x_0" for k in places})


def depth_axis(sites: Sequence[Any]) -> tuple[Axis, dict[str, float]]:
    """Return an axis of depth, and each site's place on it by the site's id.

    Each stream's sublayers are numbered from 1. Several streams are placed one after the other.
    """
    places: dict[str, float] = {}
    ticks: dict[float, str] = {}
    groups: dict[str, tuple[float, float]] = {}
    begin = 0.0
    for stream in dict.fromkeys(site.stream for site in sites):
        members = [site for site in sites if site.stream == stream]
        first = 0 if members[0].kind == "start" else 1
        for number, site in enumerate(members, first):
            places[site.id] = begin + number
            ticks[begin + number] = {"start": "x_0", "final": "final"}.get(site.kind, str(number))
        groups[stream] = begin, begin + first + len(members) - 1
        begin = groups[stream][1] + GAP
    return Axis("depth in sublayers", ticks=ticks, groups=groups if len(groups) > 1 else {}), places


def depth_series(label: str, values: Sequence[tuple[Any, float]], places: Mapping[str, float]) -> list[Series]:
    """Return `values`, pairs of a site and a number, as one series per stream, so that no line connects two streams."""
    by_stream: dict[str, list[tuple[Any, float]]] = {}
    for site, value in values:
        by_stream.setdefault(site.stream, []).append((site, value))
    return [
        Series(label, [(places[site.id], value) for site, value in own], [site.kind for site, _ in own])
        for own in by_stream.values()
    ]
