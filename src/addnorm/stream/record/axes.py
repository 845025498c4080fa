"""How the drawings look: depth on the x axis, series told apart by colour, dash and filling, kinds of sublayers by marker.

Each call adds one series to an Axes and puts scale, ticks, title and legend right for all that it has by then: so that two
recordings can be drawn on one Axes. Nothing is left out in silence: NaN and inf are crosses at the top, zeros of a logarithmic
axis triangles at the bottom, and the legend says so.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from addnorm.stream.record.optional import need
from addnorm.stream.record.schema import RecordedSite

if TYPE_CHECKING:  # matplotlib is imported where it is used
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

__all__ = ["Depths", "Line", "add", "below", "finish", "legend_above", "new_axes", "panel_of", "short", "x_axis"]

# Okabe and Ito's colours that have a contrast of 3:1 and more on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.6, 1.2, 1.6)))
FILLINGS = ("full", "none", "top", "left")
MARKERS = {"start": ">", "attention": "o", "cross-attention": "D", "feed-forward": "s", "other": "^", "final": "*"}
NAMES = {"other": "other sublayer"}
GREY, ALARM = "#6B6B6B", "#B00020"
WIDE = 10.0  # a larger ratio of largest to smallest is drawn on a logarithmic axis
GAP = 2  # sublayers between two streams


class Line(NamedTuple):
    """A series: what it is called, its values by site, and how matplotlib shall draw it."""

    label: str
    values: Sequence[tuple[RecordedSite, float]]
    style: Mapping[str, Any]
    named: bool = True  # by the user: alone on its Axes, another needs no legend


@dataclass
class Depths:
    """Where the sites stand on the x axis: sublayers counted from 1, each stream after the one before."""

    sites: Sequence[RecordedSite]
    at: dict[str, int] = field(default_factory=dict)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)  # the sublayer 0 of a stream, and its last site

    def __post_init__(self) -> None:
        begin = 0
        for stream in dict.fromkeys(site.stream for site in self.sites):
            members = [site for site in self.sites if site.stream == stream]
            first = 0 if members[0].kind == "start" else 1
            self.at |= {site.id: begin + place for place, site in enumerate(members, first)}
            self.spans[stream] = (begin, begin + first + len(members) - 1)
            begin = self.spans[stream][1] + GAP

    @property
    def end(self) -> int:
        """The last place."""
        return max((end for _, end in self.spans.values()), default=0)


@dataclass
class Panel:
    """What has been drawn on an Axes."""

    depths: Depths
    handles: dict[str, Line2D] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # and the marker
    values: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    titles: list[tuple[str, ...]] = field(default_factory=list)
    tells_kinds: bool = True  # in its legend
    named: bool = False
    below: dict[str, weakref.ref[Axes]] = field(default_factory=dict)
    marks: list[Any] = field(default_factory=list)


PANELS: weakref.WeakKeyDictionary[Axes, Panel] = weakref.WeakKeyDictionary()


def new_axes(ax: Axes | None, height: float) -> Axes:
    """The Axes given, or those of a new figure of pyplot's, which a notebook shows."""
    if ax is not None:
        return ax
    figure = need("matplotlib.pyplot", "draw").figure(figsize=(7.4, height), layout="constrained")
    axes: Axes = figure.add_subplot()
    return axes


def panel_of(ax: Axes, depths: Depths) -> Panel:
    """What is on an Axes: nothing, if it was cleared."""
    panel = PANELS.get(ax)
    if panel is None or (panel.handles and not ax.lines):
        panel = PANELS[ax] = Panel(depths)
    if depths.end > panel.depths.end:
        panel.depths = depths
    return panel


def below(ax: Axes, name: str, depths: Depths, *, share: bool = True, height: float = 0.7) -> Axes:
    """The Axes of that name under this one, which gives it room the first time; with the same depths on its x axis.

    Args:
        ax: the upper Axes.
        name: of the lower.
        depths: where the sites stand.
        share: whether panning one moves the other.
        height: of the lower, the upper's being 1.
    """
    from matplotlib.gridspec import GridSpecFromSubplotSpec

    panel = panel_of(ax, depths)
    known = panel.below.get(name, lambda: None)()
    if known is not None and known.figure is not None:
        return known
    figure, spec = ax.figure, ax.get_subplotspec()
    sharex = ax if share else None
    if spec is not None:
        rows = GridSpecFromSubplotSpec(2, 1, spec, height_ratios=[1, height])
        ax.set_subplotspec(rows[0])
        lower = figure.add_subplot(rows[1], sharex=sharex)
    else:  # an Axes that stands where it was put, on no grid
        box, part = ax.get_position(), height / (1 + height)
        ax.set_position((box.x0, box.y0 + box.height * (part + 0.08), box.width, box.height * (0.92 - part)))
        lower = figure.add_axes((box.x0, box.y0, box.width, box.height * (part - 0.08)), sharex=sharex)
    if share:
        ax.tick_params(which="both", labelbottom=False)
        ax.set_xlabel("")
        panel_of(lower, depths).tells_kinds = False
    panel.below[name] = weakref.ref(lower)
    return lower


def add(ax: Axes, depths: Depths, line: Line) -> None:
    """One more series."""
    from matplotlib.cbook import normalize_kwargs
    from matplotlib.lines import Line2D

    panel = panel_of(ax, depths)
    number = len(panel.handles)
    label, times, panel.named = line.label, 1, panel.named or line.named
    while label in panel.handles:
        label, times = f"{line.label} ({times + 1})", times + 1
    again = number // len(COLOURS)  # a second round has the colours with other dashes and fillings
    given = normalize_kwargs(dict(line.style), Line2D)
    style = {
        "color": COLOURS[number % 4], "linewidth": 1.6, "markersize": 5.5 if depths.end <= 64 else 3.5, "markeredgewidth": 1.2,
        "fillstyle": FILLINGS[(number + again) % 4], "linestyle": DASHES[(number + again) % 4], **given,
    }  # fmt: skip
    hollow, paper = style["fillstyle"] == "none", ax.get_facecolor()
    # Painted with the background rather than left open: the line would be seen through.
    style |= {"fillstyle": "full", "markerfacecolor": paper} if hollow and "markerfacecolor" not in given else {}
    style.setdefault("markerfacecoloralt", paper)
    dash, marker = style.pop("linestyle"), style.pop("marker", None)
    for stream in depths.spans:
        own = [(depths.at[site.id], site.kind, value) for site, value in line.values if site.stream == stream]
        ax.plot(
            [x for x, _, _ in own], [_drawn(y) for _, _, y in own], **{**style, "linestyle": dash, "marker": "none"}
        )
        for kind in dict.fromkeys(kind for _, kind, _ in own):
            shape = marker or MARKERS.get(kind, "^")
            panel.kinds[kind] = shape
            points = [(x, _drawn(y)) for x, of, y in own if of == kind]
            larger = {"markersize": style["markersize"] * 1.9} if shape == "*" else {}
            x, y = zip(*points, strict=True)
            ax.plot(x, y, **{**style, "linestyle": "none", "marker": shape, "zorder": 3, **larger})
        panel.places += [x for x, _, _ in own]
        panel.values += [y for _, _, y in own]
    panel.handles[label] = Line2D([], [], **{**style, "linestyle": dash, "marker": marker or "o", "label": label})


def _drawn(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def finish(
    ax: Axes, title: Sequence[str], ylabel: str, limits: tuple[float, float] | None = None, *, legend: bool
) -> None:
    """Scale, ticks, labels, title and legend for all that was added.

    Args:
        ax: where.
        title: what is shown, and of what: a part in which the series differ is not said.
        ylabel: the quantity.
        limits: of the y axis, which is then linear; it is extended where values lie outside.
        legend: whether the series are in it.
    """
    panel = PANELS[ax]
    for mark in panel.marks:
        mark.remove()
    panel.marks = []
    said = _y_axis(ax, panel, limits) + _missing(ax, panel)
    x_axis(ax, panel.depths)
    ax.set_ylabel(ylabel, fontsize="small")
    ax.tick_params(labelsize="small")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    ax.set_axisbelow(True)
    rows = _legend(ax, panel, said, series=legend)
    panel.titles.append(tuple(title))
    common = [part for part, *others in zip(*panel.titles, strict=False) if {part} >= {*others} and part]
    ax.set_title(", ".join(common), loc="left", fontsize="medium", fontweight="bold", pad=6 + 13.5 * rows)


def _y_axis(ax: Axes, panel: Panel, limits: tuple[float, float] | None) -> list[tuple[str, str, str]]:
    """Logarithmic where nothing is negative and the values are far apart; else linear from 0: noise shall not look like much."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    finite = [value for value in panel.values if math.isfinite(value)]
    positive = [value for value in finite if value > 0]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if limits is None and low >= 0 and positive and high > WIDE * min(positive):
        ax.set_yscale("log", nonpositive="mask")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * min(positive) else (1,)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _log_label(value)))
        ax.yaxis.set_minor_formatter(NullFormatter())
        least = min(positive)
        room = (high / least) ** 0.06
        ax.set_ylim(least / room, high * room)
        zeros = [x for x, value in zip(panel.places, panel.values, strict=True) if value == 0]
        return _at_edge(ax, panel, zeros, 0.025, "v", GREY, "0, off the log axis")
    ax.set_yscale("linear")
    ax.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: short(value))
    )  # a factor beside the axis lies over the legend
    low, high = (min(low, 0.0), max(high, 0.0)) if limits is None else (min(low, limits[0]), max(high, limits[1]))
    room = 0.06 * ((high - low) or 1.0)
    ax.set_ylim(low - room * (low < 0), high + room)
    if low < 0 < high:
        panel.marks.append(ax.axhline(0, color=GREY, linewidth=0.8, zorder=0.5))
    return []


def short(value: float) -> str:
    """A tick's label: four digits at most.

    Example:
        >>> from addnorm.stream.record.axes import short
        >>> short(0.25), short(1e-6), short(12000000.0)
        ('0.25', '1e−6', '1.2e7')
    """
    return re.sub(r"e([+-])0", r"e\1", f"{value:.4g}").replace("e+", "e").replace("-", "\N{MINUS SIGN}")


def _log_label(value: float) -> str:
    exponent = math.log10(value) if value > 0 else 0.0
    power = round(exponent)
    return f"$10^{{{power}}}$" if abs(exponent - power) < 1e-9 and not -4 < power < 5 else f"{value:g}"


def _missing(ax: Axes, panel: Panel) -> list[tuple[str, str, str]]:
    found = [(x, value) for x, value in zip(panel.places, panel.values, strict=True) if not math.isfinite(value)]
    names = " or ".join(dict.fromkeys("NaN" if math.isnan(value) else "infinite" for _, value in found))
    return _at_edge(ax, panel, [x for x, _ in found], 0.97, "x", ALARM, names)


def _at_edge(
    ax: Axes, panel: Panel, x: Sequence[int], y: float, marker: str, colour: str, name: str
) -> list[tuple[str, str, str]]:
    """Marks at a height of the Axes for values that have no place on its scale."""
    if not x:
        return []
    style: dict[str, Any] = {"color": colour, "markersize": 6.5, "markeredgewidth": 1.8, "zorder": 4}
    heights, scale = [y] * len(x), ax.get_xaxis_transform()
    panel.marks += ax.plot(x, heights, linestyle="none", marker=marker, transform=scale, clip_on=False, **style)
    return [(marker, colour, name)]


def x_axis(ax: Axes, depths: Depths) -> None:
    """Sublayers counted from 1 in each stream, and the stream's name if there are several."""
    count = sum(end - begin for begin, end in depths.spans.values())
    room = max(2, int(2 * _width(ax) / 72))
    stride = next((step for step in (1, 2, 4, 6, 12, 24, 48, 96, 192, 384) if count / step <= room), 768)
    ends = {"start": "$x_0$", "final": "final"}
    ticks = {depths.at[site.id]: ends[site.kind] for site in depths.sites if site.kind in ends}
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
        ax.xaxis.remove_overlapping_locs = False  # a name stands below a number
        ax.set_xticks(middles, labels=[*depths.spans], minor=True)
        ax.tick_params(axis="x", which="minor", length=0, pad=18, labelsize="small", labelbottom=labelled)
    ax.set_xlabel("depth in sublayers" if labelled else "", fontsize="small")


def _width(ax: Axes) -> float:
    """In points; before the figure is laid out, nearly."""
    return float(ax.get_window_extent().width) / ax.figure.dpi * 72


def _legend(ax: Axes, panel: Panel, said: Sequence[tuple[str, str, str]], *, series: bool) -> int:
    """Above the Axes, where no value can be; its rows. The ends of the stream have their names on the x axis."""
    from matplotlib.lines import Line2D

    def mark(marker: str, colour: str, name: str) -> Line2D:
        edge = 1.8 if marker == "x" else 1.0
        style: dict[str, Any] = {"linestyle": "none", "color": colour, "markersize": 6, "markeredgewidth": edge}
        return Line2D([], [], marker=marker, label=name, **style)

    kinds = [kind for kind in MARKERS if kind in panel.kinds and kind not in ("start", "final")]
    handles = [*panel.handles.values()] if series and (panel.named or len(panel.handles) > 1) else []
    handles += [mark(panel.kinds[kind], GREY, NAMES.get(kind, kind)) for kind in kinds] if panel.tells_kinds else []
    handles += [mark(*one) for one in said]
    if (old := ax.get_legend()) is not None:
        old.remove()
    if not handles:
        return 0
    return legend_above(ax, handles)


def legend_above(ax: Axes, handles: Sequence[Any]) -> int:
    """A legend above the Axes, with as many columns as fit; its rows."""
    widths = [len(str(handle.get_label())) * 4.5 + 40 for handle in handles]
    columns = next((n for n in range(len(widths), 1, -1) if _row_width(widths, n) <= _width(ax)), 1)
    ax.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, fontsize="small",
        borderaxespad=0.15, borderpad=0.2, handlelength=2.6, columnspacing=1.4, handletextpad=0.5, labelspacing=0.3,
    )  # fmt: skip
    return -(-len(handles) // columns)


def _row_width(widths: Sequence[float], columns: int) -> float:
    """Of a legend with so many columns, which is filled column by column."""
    short, longer = divmod(len(widths), columns)
    sizes = [short + 1] * longer + [short] * (columns - longer)
    ends = [sum(sizes[: k + 1]) for k in range(columns)]
    return sum(max(widths[end - size : end]) for size, end in zip(sizes, ends, strict=True))
