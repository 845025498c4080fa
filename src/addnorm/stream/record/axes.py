"""Panels of charts on the Axes of matplotlib: colour, dash and fill by series; markers by kind of sublayer.

`draw_panel` adds the series of a panel to an Axes, and sets scale, ticks, title and legend for all series drawn there so far. So
two recordings can share one Axes. Every value is drawn: NaN and infinity as crosses at the top, zeros of a logarithmic axis as
triangles at the bottom, both named in the legend.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from addnorm._util.charts import STRIDES, Axis, Panel, Series, format_tick
from addnorm._util.optional import require
from addnorm.stream.record.schema import ENDS

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

# Four colours of Okabe and Ito, then three more; each has a contrast of at least 3:1 on white. Seven series have seven colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#6A3D9A", "#8C510A", "#3B3B3B")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.6, 1.2, 1.6)))
FILLS = ("full", "none", "top", "left")
MARKERS = {"start": ">", "attention": "o", "cross-attention": "D", "feed-forward": "s", "other": "^", "final": "*"}
NAMES = {"other": "other sublayer"}
GREY, ALARM = "#6B6B6B", "#B00020"


@dataclass
class Content:
    """What earlier calls drew on an `Axes`, so that a later call continues its legend, titles and marks.

    Attributes:
        x: the longest axis of depth.
        handles: a line of the legend for each series, by its label.
        kinds: markers by kind of sublayer.
        series: the series.
        titles: the parts of each drawing's title.
        marks: marks of values without a position on the y axis.
        lower: the Axes below, by name.
        has_label: whether the caller labelled a series, so that the legend names even a single one.
    """

    x: Axis | None = None
    handles: dict[str, Line2D] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    series: list[Series] = field(default_factory=list)
    titles: list[Sequence[str]] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)
    lower: dict[str, weakref.ref[Axes]] = field(default_factory=dict)
    has_label: bool = False


CONTENTS: weakref.WeakKeyDictionary[Axes, Content] = weakref.WeakKeyDictionary()


def new_axes(ax: Axes | None, height: float) -> Axes:
    """Return `ax`, or if it is None the Axes of a new pyplot figure, which a notebook shows."""
    if ax is not None:
        return ax
    figure = require("matplotlib.pyplot", "draw").figure(figsize=(7.4, height), layout="constrained")
    axes: Axes = figure.add_subplot()
    return axes


def find_content(ax: Axes) -> Content:
    """Return the `Content` of an Axes: an empty one if nothing was drawn on it, or if it was cleared."""
    content = CONTENTS.get(ax)
    if content is None or (content.handles and not ax.lines):
        content = CONTENTS[ax] = Content()
    return content


def add_lower_axes(ax: Axes, name: str, *, share: bool = True, height: float = 0.7) -> Axes:
    """Return the Axes of that name below another one; the first call adds it and makes the upper one smaller.

    Args:
        ax: the upper Axes.
        name: name of the lower Axes.
        share: share the x axis.
        height: height of the lower Axes relative to the upper one.
    """
    from matplotlib.gridspec import GridSpecFromSubplotSpec

    content = find_content(ax)
    existing = content.lower.get(name, lambda: None)()
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
    content.lower[name] = weakref.ref(lower)
    return lower


def draw_panel(
    ax: Axes, panel: Panel, x: Axis, title: Sequence[str], style: Mapping[str, Any], *, labelled: bool, has_series: bool,
    has_kinds: bool,
) -> None:  # fmt: skip
    """Draw a panel on an Axes, and set scale, ticks, title and legend for all series that were drawn on it so far.

    Args:
        ax: the Axes.
        panel: the panel. Series with the same label are parts of one line, a part for each stream.
        x: the axis of depth.
        title: parts of the title. A part in which the drawings on the Axes differ is left out.
        style: keywords of matplotlib's lines.
        labelled: whether the labels are the caller's.
        has_series: list the series in the legend.
        has_kinds: list the kinds of sublayers in the legend. The ends of the stream are named on the x axis instead.
    """
    content = find_content(ax)
    content.has_label |= labelled
    if content.x is None or max(x.ticks or {}) > max(content.x.ticks or {}):
        content.x = x
    for label in dict.fromkeys(series.label for series in panel.series):
        _add_line(ax, content, label, [series for series in panel.series if series.label == label], style)
    for mark in content.marks:
        mark.remove()
    content.marks = []
    _set_y_axis(ax, content, panel)
    drawn = panel._replace(series=content.series)
    names = " or ".join(dict.fromkeys("NaN" if math.isnan(y) else "infinite" for _, y in drawn.lost))
    entries = []
    for at, height, marker, colour, name in (
        (drawn.zeros, 0.025, "v", GREY, "0, off the log axis"),
        (drawn.lost, 0.97, "x", ALARM, names),
    ):
        if at:
            content.marks += ax.plot(
                [x for x, _ in at], [height] * len(at), linestyle="none", marker=marker, clip_on=False, color=colour,
                transform=ax.get_xaxis_transform(), markersize=6.5, markeredgewidth=1.8, zorder=4,
            )  # fmt: skip
            entries.append(_legend_mark(marker, colour, name))
    _set_x_axis(ax, content.x)
    ax.set_ylabel(panel.label, fontsize="small")
    ax.tick_params(labelsize="small")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    ax.set_axisbelow(True)
    handles = [*content.handles.values()] if has_series and (content.has_label or len(content.handles) > 1) else []
    kinds = [kind for kind in MARKERS if has_kinds and kind in content.kinds and kind not in ENDS]
    handles += [_legend_mark(content.kinds[kind], GREY, NAMES.get(kind, kind)) for kind in kinds]
    rows = _set_legend(ax, [*handles, *entries])
    content.titles.append(title)
    common = [part for part, *others in zip(*content.titles, strict=False) if {part} >= {*others} and part]
    ax.set_title(", ".join(common), loc="left", fontsize="medium", fontweight="bold", pad=6 + 13.5 * rows)


def _add_line(ax: Axes, content: Content, label: str, parts: Sequence[Series], style: Mapping[str, Any]) -> None:
    """Draw the series of one label in one colour, each with markers by kind, and add the label to the legend's handles."""
    from matplotlib.cbook import normalize_kwargs
    from matplotlib.lines import Line2D

    number, name, times = len(content.handles), label, 1
    while name in content.handles:
        name, times = f"{label} ({times + 1})", times + 1
    again = number // len(COLOURS)  # after the last colour the first one follows with another dash and fill
    keywords = normalize_kwargs(dict(style), Line2D)
    last = max(x for part in parts for x, _ in part.points)
    line = {
        "color": COLOURS[number % len(COLOURS)], "linewidth": 1.6, "markersize": 5.5 if last <= 64 else 3.5,
        "markeredgewidth": 1.2, "fillstyle": FILLS[(number + again) % 4], "linestyle": DASHES[(number + again) % 4], **keywords,
    }  # fmt: skip
    hollow, background = line["fillstyle"] == "none", ax.get_facecolor()
    # A hollow marker is filled with the background: otherwise the line would show through.
    if hollow and "markerfacecolor" not in keywords:
        line |= {"fillstyle": "full", "markerfacecolor": background}
    line.setdefault("markerfacecoloralt", background)
    dash, marker = line.pop("linestyle"), line.pop("marker", None)
    for part in parts:
        points = [(x, y if math.isfinite(y) else math.nan) for x, y in part.points]
        ax.plot(*zip(*points, strict=True), **{**line, "linestyle": dash, "marker": "none"})
        for kind in dict.fromkeys(part.kinds):
            shape = content.kinds[kind] = marker or MARKERS.get(kind, "^")
            larger = {"markersize": line["markersize"] * 1.9} if shape == "*" else {}
            own = [point for point, of in zip(points, part.kinds, strict=True) if of == kind]
            ax.plot(*zip(*own, strict=True), **{**line, "linestyle": "none", "marker": shape, "zorder": 3, **larger})
    content.series += parts
    content.handles[name] = Line2D([], [], **{**line, "linestyle": dash, "marker": marker or "o", "label": name})


def _set_y_axis(ax: Axes, content: Content, panel: Panel) -> None:
    """Set the scale that all series of an Axes need."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    scale = panel._replace(series=content.series).scale
    if scale.log:
        ax.set_yscale("log", nonpositive="mask")
    else:
        ax.set_yscale("linear")
    ax.set_ylim(scale.low, scale.high)
    # Own labels: matplotlib would write a common factor of the ticks over the legend.
    label = _log_label if scale.log else format_tick
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
    if scale.log:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if scale.high < 200 * scale.low else (1,)))
        ax.yaxis.set_minor_formatter(NullFormatter())
    elif scale.low < 0 < scale.high:
        content.marks.append(ax.axhline(0, color=GREY, linewidth=0.8, zorder=0.5))


def _log_label(value: float) -> str:
    exponent = math.log10(value) if value > 0 else 0.0
    power = round(exponent)
    return f"$10^{{{power}}}$" if abs(exponent - power) < 1e-9 and not -4 < power < 5 else f"{value:g}"


def _set_x_axis(ax: Axes, x: Axis) -> None:
    """Set the ticks of the x axis, as many as fit, and the names of the streams if there are several."""
    ticks = x.ticks or {}
    named = {place: text for place, text in ticks.items() if not text.isdigit()}
    room = max(2, int(2 * ax.get_window_extent().width / ax.figure.dpi))  # two an inch
    stride = next((stride for stride in STRIDES if len(ticks) / stride <= room), STRIDES[-1])
    for place, text in ticks.items():
        if text.isdigit() and not int(text) % stride and all(abs(place - other) > 0.75 * stride for other in named):
            named[place] = text
    ax.set_xticks([*named], labels=[*named.values()])
    ax.set_xlim(min(ticks) - 0.6, max(ticks) + 0.6)
    labelled = bool(ax.xaxis.get_tick_params().get("labelbottom", True))
    if x.groups:
        ax.xaxis.remove_overlapping_locs = False  # a name is below a number
        ax.set_xticks([sum(ends) / 2 for ends in x.groups.values()], labels=[*x.groups], minor=True)
        ax.tick_params(axis="x", which="minor", length=0, pad=18, labelsize="small", labelbottom=labelled)
    ax.set_xlabel(x.label if labelled else "", fontsize="small")


def _legend_mark(marker: str, colour: str, name: str) -> Line2D:
    from matplotlib.lines import Line2D

    width = 1.8 if marker == "x" else 1.0
    return Line2D(
        [], [], linestyle="none", marker=marker, label=name, color=colour, markersize=6, markeredgewidth=width
    )


def _set_legend(ax: Axes, handles: Sequence[Line2D]) -> int:
    """Draw the legend above the Axes, where it hides no value, with as many columns as fit; return its number of rows."""
    columns = len(handles)
    while columns:
        legend = ax.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, fontsize="small",
            borderaxespad=0.15, borderpad=0.2, handlelength=2.6, columnspacing=1.4, handletextpad=0.5, labelspacing=0.3,
        )  # fmt: skip
        if columns == 1 or legend.get_window_extent().width <= ax.get_window_extent().width:
            return -(-len(handles) // columns)
        columns -= 1
    return 0
