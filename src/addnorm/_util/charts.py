"""Charts as data: panels of series, or of cells. A `Chart` has all that is drawn, and `tabulate` has all its numbers.

`addnorm.report.svg` draws a chart with the colours of the page. `COLOURS`, `DASHES` and `MARKERS` tell series apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from addnorm._util.numbers import format_number

__all__ = ["Axis", "Chart", "Map", "Panel", "Points", "Scale", "Series", "depth_axis", "tabulate"]

Points = Sequence[tuple[float, float]]
LOG_RATIO = 10.0  # a larger ratio of largest to smallest value needs a logarithmic axis
GAP = 2  # sublayers between two streams on an axis of depth


class Axis(NamedTuple):
    """The x axis that the panels of a chart share.

    Attributes:
        label: the quantity.
        log: whether the axis is logarithmic.
        ticks: texts by place; None for round numbers. Texts that are no numbers stay where the others do not fit.
        groups: first and last place of each group, by its name, which is written below the ticks.
    """

    label: str
    log: bool = False
    ticks: Mapping[float, str] | None = None
    groups: Mapping[str, tuple[float, float]] = {}


class Series(NamedTuple):
    """Series of points.

    Attributes:
        label: name in the legend and the table. Series of one name share a line of the legend.
        points: x and y of each point. NaN and infinity are marked at the top of the panel.
        kinds: what each point is: the kind of its sublayer, which selects the marker. Without kinds there are no markers.
        form: a line with its markers, dots alone, or bars.
        colour, dash: numbers of the colour and of the dash; None is the number of the series.
    """

    label: str
    points: Points
    kinds: Sequence[str] = ()
    form: Literal["line", "dots", "bars"] = "line"
    colour: int | None = None
    dash: int | None = None


class Panel(NamedTuple):
    """Axes with one quantity.

    Attributes:
        label: the quantity.
        series: the series.
        limits: range of the axis, beyond which lines are cut off; None if the values decide.
        least: range that a linear axis covers at least.
        log: whether the axis is logarithmic; None if the values decide: where none is negative and they are far apart.
        lines: horizontal lines by their labels, where they are in range.
        height: height in pixels.
    """

    label: str
    series: Sequence[Series]
    limits: tuple[float, float] | None = None
    least: tuple[float, float] | None = None
    log: bool | None = None
    lines: Mapping[str, float] = {}
    height: int = 200

    @property
    def scale(self) -> Scale:
        """The y axis. A linear axis without limits has 0: otherwise noise would look large."""
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
    """Panel of cells: a row for each source, a column for each depth.

    Attributes:
        label: what the panel shows.
        sources: names of the rows.
        shares: for each column the numbers of the rows.
        most: magnitude with the strongest colour, shared by the maps of a chart.
    """

    label: str
    sources: Sequence[str]
    shares: Sequence[Sequence[float]]
    most: float = 1.0


@dataclass(frozen=True)
class Chart:
    """Drawing as data.

    Attributes:
        panels: the panels, which share the x axis.
        x: the x axis.
        columns: panels side by side on a wide page. On a narrow page all panels are below one another.
    """

    panels: Sequence[Panel] | Sequence[Map]
    x: Axis
    columns: int = 1


class Scale(NamedTuple):
    """Range of an axis, linear or logarithmic.

    Example:
        >>> from addnorm._util.charts import Scale
        >>> Scale(0.0, 4.5).ticks(), Scale(0.5, 2000.0, True).ticks(4), Scale(1.0, 100.0, True).place(10.0)
        ([0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 10.0, 100.0, 1000.0], 0.5)
    """

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies: 0 at the lower end, 1 at the upper one."""
        low, high, at = (math.log(number) if self.log else number for number in (self.low, self.high, value))
        return (at - low) / ((high - low) or 1.0)

    def ticks(self, most: int = 5) -> list[float]:
        """Return round numbers in the range, about `most` of them."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            parts = (1, 2, 5) if len(decades) <= 3 else (1,)
            numbers = [part * 10.0**power for power in decades[:: 1 + len(decades) // (most + 2)] for part in parts]
        else:
            size = (self.high - self.low) / most
            step = 10.0 ** math.floor(math.log10(size)) if size > 0 else 1.0
            step *= next((factor for factor in (1, 2, 5) if factor * step >= size), 10)
            numbers = [round(k * step, 12) for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [number for number in numbers if self.low <= number <= self.high]


def format_tick(value: float) -> str:
    """Return a tick's label with at most four digits.

    Example:
        >>> from addnorm._util.charts import format_tick
        >>> format_tick(0.25), format_tick(1e-6), format_tick(12000000.0)
        ('0.25', '1e−6', '1.2e7')
    """
    return format_number(float(value), trim=True).replace("-", "\N{MINUS SIGN}")


def depth_axis(sites: Sequence[Any]) -> tuple[Axis, dict[str, float]]:
    """Return an axis of depth, and the place of each site by its id: sublayers from 1, one stream after the other."""
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


def tabulate(chart: Chart) -> Iterator[tuple[str, dict[float, float]]]:
    """Yield the heading and the numbers by x of each column of a chart's table: of each series in each panel."""
    panels = [panel for panel in chart.panels if isinstance(panel, Panel)]
    several = len({series.label for panel in panels for series in panel.series}) > 1
    for panel in panels:
        columns: dict[str, dict[float, float]] = {}
        for series in panel.series:
            columns.setdefault(series.label, {}).update(series.points)
        for label, numbers in columns.items():
            yield ": ".join([label] * several + [panel.label] * (len(panels) > 1 or not several)), numbers
