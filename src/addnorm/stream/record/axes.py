"""Style of the drawings: depth on the x axis; colour, dash and fill by series; markers by kind of sublayer.

`add_line` adds one series to an Axes; `finish` sets scale, ticks, title and legend for all series added so far. So two
recordings can share one Axes. Every value is drawn: NaN and infinity as crosses at the top, zeros of a logarithmic axis as
triangles at the bottom, both named in the legend.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from addnorm._util.numbers import format_number
from addnorm._util.optional import require
from addnorm.stream.record.schema import ENDS, RecordedSite

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

__all__ = [
    "Depths", "Line", "add_line", "add_lower_axes", "finish", "format_tick", "legend_above", "new_axes", "panel_of", "x_axis",
]  # fmt: skip

# Four colours of Okabe and Ito, then three more; each has a contrast of at least 3:1 on white. Seven series have seven colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#6A3D9A", "#8C510A", "#3B3B3B")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.6, 1.2, 1.6)))
FILLS = ("full", "none", "top", "left")
MARKERS = {"start": ">", "attention": "o", "cross-attention": "D", "feed-forward": "s", "other": "^", "final": "*"}
NAMES = {"other": "other sublayer"}
GREY, ALARM = "#6B6B6B", "#B00020"
LOG_RATIO = 10.0  # a larger ratio of largest to smallest value needs a logarithmic axis
GAP = 2  # sublayers between two streams


class Line(NamedTuple):
    """Series to draw: its label, its values by site, and keywords of matplotlib's lines."""

    label: str
    values: Sequence[tuple[RecordedSite, float]]
    style: Mapping[str, Any]
    has_user_label: bool = True  # a line without one needs no legend where it is alone on its Axes


@dataclass
class Depths:
    """Positions of the sites on the x axis: sublayers counted from 1, one stream after the other."""

    sites: Sequence[RecordedSite]
    x: dict[str, int] = field(default_factory=dict)  # by the site's id
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)  # by stream: its sublayer 0 and its last site

    def __post_init__(self) -> None:
        begin = 0
        for stream in dict.fromkeys(site.stream for site in self.sites):
            members = [site for site in self.sites if site.stream == stream]
            first = 0 if members[0].kind == "start" else 1
            self.x |= {site.id: begin + place for place, site in enumerate(members, first)}
            self.spans[stream] = (begin, begin + first + len(members) - 1)
            begin = self.spans[stream][1] + GAP

    @property
    def end(self) -> int:
        """Last position."""
        return max((end for _, end in self.spans.values()), default=0)


@dataclass
class Panel:
    """Content of an Axes."""

    depths: Depths
    handles: dict[str, Line2D] = field(default_factory=dict)  # by label
    kinds: dict[str, str] = field(default_factory=dict)  # markers by kind of sublayer
    values: list[float] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    titles: list[tuple[str, ...]] = field(default_factory=list)
    legend_has_kinds: bool = True
    has_user_label: bool = False
    lower: dict[str, weakref.ref[Axes]] = field(default_factory=dict)  # the Axes below, by name
    marks: list[Any] = field(default_factory=list)  # marks of values without a position on the y axis


PANELS: weakref.WeakKeyDictionary[Axes, Panel] = weakref.WeakKeyDictionary()


def new_axes(ax: Axes | None, height: float) -> Axes:
    """Return the Axes, or for None those of a new figure of pyplot, which a notebook shows."""
    if ax is not None:
        return ax
    figure = require("matplotlib.pyplot", "draw").figure(figsize=(7.4, height), layout="constrained")
    axes: Axes = figure.add_subplot()
    return axes


def panel_of(ax: Axes, depths: Depths) -> Panel:
    """Return the content of an Axes; a new one if the Axes was cleared."""
    panel = PANELS.get(ax)
    if panel is None or (panel.handles and not ax.lines):
        panel = PANELS[ax] = Panel(depths)
    if depths.end > panel.depths.end:
        panel.depths = depths
    return panel


def add_lower_axes(ax: Axes, name: str, depths: Depths, *, share: bool = True, height: float = 0.7) -> Axes:
    """Return the Axes of that name below another one; the first call adds it and makes the upper one smaller.

    Args:
        ax: the upper Axes.
        name: name of the lower Axes.
        depths: positions of the sites.
        share: share the x axis.
        height: height of the lower Axes relative to the upper one.
    """
    from matplotlib.gridspec import GridSpecFromSubplotSpec

    panel = panel_of(ax, depths)
    existing = panel.lower.get(name, lambda: None)()
    if existing is not None and existing.figure is not None:
        return existing
    figure, spec = ax.figure, ax.get_subplotspec()
    sharex = ax if share else None
    if spec is not None:
        rows = GridSpecFromSubplotSpec(2, 1, spec, height_ratios=[1, height])
        ax.set_subplotspec(rows[0])
        lower = figure.add_subplot(rows[1], sharex=sharex)
    else:  # an Axes without a grid
        box, part = ax.get_position(), height / (1 + height)
        ax.set_position((box.x0, box.y0 + box.height * (part + 0.08), box.width, box.height * (0.92 - part)))
        lower = figure.add_axes((box.x0, box.y0, box.width, box.height * (part - 0.08)), sharex=sharex)
    if share:
        ax.tick_params(which="both", labelbottom=False)
        ax.set_xlabel("")
        panel_of(lower, depths).legend_has_kinds = False
    panel.lower[name] = weakref.ref(lower)
    return lower


def add_line(ax: Axes, depths: Depths, line: Line) -> None:
    """Add a series to an Axes."""
    from matplotlib.cbook import normalize_kwargs
    from matplotlib.lines import Line2D

    panel = panel_of(ax, depths)
    number = len(panel.handles)
    label, times, panel.has_user_label = line.label, 1, panel.has_user_label or line.has_user_label
    while label in panel.handles:
        label, times = f"{line.label} ({times + 1})", times + 1
    again = number // len(COLOURS)  # after the last colour the first one follows with another dash and fill
    keywords = normalize_kwargs(dict(line.style), Line2D)
    style = {
        "color": COLOURS[number % len(COLOURS)], "linewidth": 1.6, "markersize": 5.5 if depths.end <= 64 else 3.5,
        "markeredgewidth": 1.2, "fillstyle": FILLS[(number + again) % 4], "linestyle": DASHES[(number + again) % 4], **keywords,
    }  # fmt: skip
    hollow, background = style["fillstyle"] == "none", ax.get_facecolor()
    # A hollow marker is filled with the background: otherwise the line would show through.
    if hollow and "markerfacecolor" not in keywords:
        style |= {"fillstyle": "full", "markerfacecolor": background}
    style.setdefault("markerfacecoloralt", background)
    dash, marker = style.pop("linestyle"), style.pop("marker", None)
    for stream in depths.spans:
        own = [(depths.x[site.id], site.kind, value) for site, value in line.values if site.stream == stream]
        path = [x for x, _, _ in own], [_finite_or_nan(y) for _, _, y in own]
        ax.plot(*path, **{**style, "linestyle": dash, "marker": "none"})
        for kind in dict.fromkeys(kind for _, kind, _ in own):
            shape = marker or MARKERS.get(kind, "^")
            panel.kinds[kind] = shape
            points = [(x, _finite_or_nan(y)) for x, of, y in own if of == kind]
            larger = {"markersize": style["markersize"] * 1.9} if shape == "*" else {}
            x, y = zip(*points, strict=True)
            ax.plot(x, y, **{**style, "linestyle": "none", "marker": shape, "zorder": 3, **larger})
        panel.positions += [x for x, _, _ in own]
        panel.values += [y for _, _, y in own]
    panel.handles[label] = Line2D([], [], **{**style, "linestyle": dash, "marker": marker or "o", "label": label})


def _finite_or_nan(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def finish(
    ax: Axes, title: Sequence[str], ylabel: str, limits: tuple[float, float] | None = None, *, legend: bool
) -> None:
    """Set scale, ticks, labels, title and legend for all series of an Axes.

    Args:
        ax: the Axes.
        title: parts of the title. A part in which the series differ is left out.
        ylabel: the quantity.
        limits: limits of a linear y axis, extended where values lie outside. By default the scale follows the values.
        legend: list the series in the legend.
    """
    panel = PANELS[ax]
    for mark in panel.marks:
        mark.remove()
    panel.marks = []
    entries = _y_axis(ax, panel, limits) + _mark_not_finite(ax, panel)
    x_axis(ax, panel.depths)
    ax.set_ylabel(ylabel, fontsize="small")
    ax.tick_params(labelsize="small")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    ax.set_axisbelow(True)
    rows = _legend(ax, panel, entries, series=legend)
    panel.titles.append(tuple(title))
    common = [part for part, *others in zip(*panel.titles, strict=False) if {part} >= {*others} and part]
    ax.set_title(", ".join(common), loc="left", fontsize="medium", fontweight="bold", pad=6 + 13.5 * rows)


def _y_axis(ax: Axes, panel: Panel, limits: tuple[float, float] | None) -> list[tuple[str, str, str]]:
    """Set the scale: logarithmic where no value is negative and they are far apart; else linear from 0.

    A linear axis that did not start at 0 would make noise look large. Returns entries for the legend.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    finite = [value for value in panel.values if math.isfinite(value)]
    positive = [value for value in finite if value > 0]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if limits is None and low >= 0 and positive and high > LOG_RATIO * min(positive):
        ax.set_yscale("log", nonpositive="mask")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * min(positive) else (1,)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _log_label(value)))
        ax.yaxis.set_minor_formatter(NullFormatter())
        least = min(positive)
        room = (high / least) ** 0.06
        ax.set_ylim(least / room, high * room)
        zeros = [x for x, value in zip(panel.positions, panel.values, strict=True) if value == 0]
        return _mark_at_edge(ax, panel, zeros, 0.025, "v", GREY, "0, off the log axis")
    ax.set_yscale("linear")
    # Own labels: matplotlib would write a common factor of the ticks over the legend.
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    low, high = (min(low, 0.0), max(high, 0.0)) if limits is None else (min(low, limits[0]), max(high, limits[1]))
    room = 0.06 * ((high - low) or 1.0)
    ax.set_ylim(low - room * (low < 0), high + room)
    if low < 0 < high:
        panel.marks.append(ax.axhline(0, color=GREY, linewidth=0.8, zorder=0.5))
    return []


def format_tick(value: float) -> str:
    """Return a tick's label with at most four digits.

    Example:
        >>> from addnorm.stream.record.axes import format_tick
        >>> format_tick(0.25), format_tick(1e-6), format_tick(12000000.0)
        ('0.25', '1e−6', '1.2e7')
    """
    return format_number(float(value), trim=True).replace("-", "\N{MINUS SIGN}")


def _log_label(value: float) -> str:
    exponent = math.log10(value) if value > 0 else 0.0
    power = round(exponent)
    return f"$10^{{{power}}}$" if abs(exponent - power) < 1e-9 and not -4 < power < 5 else f"{value:g}"


def _mark_not_finite(ax: Axes, panel: Panel) -> list[tuple[str, str, str]]:
    points = [(x, value) for x, value in zip(panel.positions, panel.values, strict=True) if not math.isfinite(value)]
    names = " or ".join(dict.fromkeys("NaN" if math.isnan(value) else "infinite" for _, value in points))
    return _mark_at_edge(ax, panel, [x for x, _ in points], 0.97, "x", ALARM, names)


def _mark_at_edge(
    ax: Axes, panel: Panel, x: Sequence[int], y: float, marker: str, colour: str, name: str
) -> list[tuple[str, str, str]]:
    """Draw marks at a height of the Axes for values without a position on its scale. Returns entries for the legend."""
    if not x:
        return []
    style: dict[str, Any] = {"color": colour, "markersize": 6.5, "markeredgewidth": 1.8, "zorder": 4}
    heights, scale = [y] * len(x), ax.get_xaxis_transform()
    panel.marks += ax.plot(x, heights, linestyle="none", marker=marker, transform=scale, clip_on=False, **style)
    return [(marker, colour, name)]


def x_axis(ax: Axes, depths: Depths) -> None:
    """Set the ticks of the x axis: sublayers counted from 1 in each stream, and the streams' names if there are several."""
    count = sum(end - begin for begin, end in depths.spans.values())
    room = max(2, int(2 * _width(ax) / 72))
    stride = next((step for step in (1, 2, 4, 6, 12, 24, 48, 96, 192, 384) if count / step <= room), 768)
    ends = {"start": "x_0", "final": "final"}
    ticks = {depths.x[site.id]: ends[site.kind] for site in depths.sites if site.kind in ends}
    for begin, end in depths.spans.values():
        taken = [place for place in ticks if begin < place <= end]
        for number in range(stride, end - begin + 1, stride):
            if all(abs(begin + number - place) > 0.75 * stride for place in taken):
                ticks.setdefault(begin + number, str(number))
    ax.set_xticks([*ticks], labels=[*ticks.values()])
    ax.set_xlim((0 if 0 in ticks else 1) - 0.6, depths.end + 0.6)
    labelled = bool(ax.xaxis.get_tick_params().get("labelbottom", True))
    if len(depths.spans) > 1:
        middles = [(begin + end) / 2 for begin, end in depths.spans.values()]
        ax.xaxis.remove_overlapping_locs = False  # a name is below a number
        ax.set_xticks(middles, labels=[*depths.spans], minor=True)
        ax.tick_params(axis="x", which="minor", length=0, pad=18, labelsize="small", labelbottom=labelled)
    ax.set_xlabel("depth in sublayers" if labelled else "", fontsize="small")


def _width(ax: Axes) -> float:
    """Return the width in points; an estimate before the figure is laid out."""
    return float(ax.get_window_extent().width) / ax.figure.dpi * 72


def _legend(ax: Axes, panel: Panel, entries: Sequence[tuple[str, str, str]], *, series: bool) -> int:
    """Draw the legend above the Axes, where it hides no value, and return its number of rows.

    The ends of the stream are named on the x axis instead.
    """
    from matplotlib.lines import Line2D

    def mark(marker: str, colour: str, name: str) -> Line2D:
        edge = 1.8 if marker == "x" else 1.0
        style: dict[str, Any] = {"linestyle": "none", "color": colour, "markersize": 6, "markeredgewidth": edge}
        return Line2D([], [], marker=marker, label=name, **style)

    kinds = [kind for kind in MARKERS if kind in panel.kinds and kind not in ENDS]
    handles = [*panel.handles.values()] if series and (panel.has_user_label or len(panel.handles) > 1) else []
    handles += (
        [mark(panel.kinds[kind], GREY, NAMES.get(kind, kind)) for kind in kinds] if panel.legend_has_kinds else []
    )
    handles += [mark(*entry) for entry in entries]
    if (old := ax.get_legend()) is not None:
        old.remove()
    if not handles:
        return 0
    return legend_above(ax, handles)


def legend_above(ax: Axes, handles: Sequence[Any]) -> int:
    """Draw a legend above the Axes with as many columns as fit, and return its number of rows."""
    widths = [len(str(handle.get_label())) * 4.5 + 40 for handle in handles]
    columns = next((n for n in range(len(widths), 1, -1) if _row_width(widths, n) <= _width(ax)), 1)
    ax.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, fontsize="small",
        borderaxespad=0.15, borderpad=0.2, handlelength=2.6, columnspacing=1.4, handletextpad=0.5, labelspacing=0.3,
    )  # fmt: skip
    return -(-len(handles) // columns)


def _row_width(widths: Sequence[float], columns: int) -> float:
    """Return the width of a legend with so many columns, filled column by column."""
    rows, longer = divmod(len(widths), columns)
    sizes = [rows + 1] * longer + [rows] * (columns - longer)
    ends = [sum(sizes[: k + 1]) for k in range(columns)]
    return sum(max(widths[end - size : end]) for size, end in zip(sizes, ends, strict=True))
