"""Drawings of a comparison. Each takes and returns its Axes, and none calls `show`; they look as those of a recording do.

Series are told apart by colour, dash and filling. Nothing is left out in silence: a run that diverged is a cross at the top.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from addnorm.lab.comparison import Comparison
from addnorm.lab.measure import Numbers
from addnorm.lab.results import Group
from addnorm.stream.record import axes
from addnorm.stream.record.axes import Depths, Line
from addnorm.stream.record.schema import RecordedSite

if TYPE_CHECKING:  # matplotlib is imported where it is used
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BACKWARD",
    "FORWARD",
    "WHILE",
    "Chosen",
    "Curve",
    "ablation",
    "best",
    "by_depth",
    "chosen",
    "curves",
    "lines",
    "over_steps",
    "rates",
    "sites_of",
    "smoothed",
    "style_of",
    "while_training",
]

Points = Sequence[tuple[float, float]]
Panel = tuple[str, str, tuple[float, float] | None]  # a number by depth, its name on the axis, limits

FORWARD: tuple[Panel, ...] = (
    ("stream", "stream, rms", None),
    ("ratio", "‖write‖ / ‖stream‖", None),
    ("similarity", "cos(token, token)", (0.0, 1.0)),
)
BACKWARD: tuple[Panel, ...] = (
    ("gradient", "‖∂loss / ∂stream‖", None),
    ("parameters", "‖∂loss / ∂parameters‖", None),
)
WINDOW = 10  # steps over which a learning curve is smoothed


class Curve(NamedTuple):
    """A series: what it is called, its points, and what of its style is not by its place."""

    label: str
    points: Points
    style: Mapping[str, Any] = {}


class Chosen(NamedTuple):
    """Runs that are drawn: what they are called, and their style, in which a colour is a wiring and a dash is warm-up."""

    label: str
    group: Group
    style: dict[str, Any]


def chosen(of: Comparison, num_layers: int) -> list[Chosen]:
    """What a figure of trained models shows of a depth: each wiring with and without warm-up, at its best rate."""
    found = []
    for number, arm in enumerate(arm for arm in of.arms if arm.num_layers == num_layers):
        both = [arm.best_where(lambda g: not g.warm_up), arm.best_where(lambda g: g.warm_up > 0)]
        groups = [group for group in both if group is not None]
        for group in groups:
            warm = bool(group.warm_up)
            label = f"{arm.wiring}, {'warm-up' if warm else 'no warm-up'}" if len(groups) > 1 else arm.wiring
            found.append(Chosen(label, group, style_of(number, warm if len(groups) > 1 else number % 2 == 1)))
    return found


def best(of: Comparison, num_layers: int) -> list[Chosen]:
    """Each wiring of a depth at its best setting."""
    arms = (arm for arm in of.arms if arm.num_layers == num_layers)
    return [Chosen(arm.wiring, arm.best, style_of(number, number % 2 == 1)) for number, arm in enumerate(arms)]


def style_of(number: int, dashed: bool) -> dict[str, Any]:
    """The colour of a wiring, by its place; dashed and hollow, or solid and filled."""
    again = number // len(
        axes.COLOURS
    )  # a second round of colours has other dashes, the third those of the first exchanged
    which = (2 * again + (dashed != (again % 4 > 1))) % 4
    return {
        "color": axes.COLOURS[number % len(axes.COLOURS)], "linestyle": axes.DASHES[which],
        "fillstyle": axes.FILLS[which],
    }  # fmt: skip


def smoothed(losses: Sequence[float], window: int = WINDOW) -> list[float]:
    """The mean of each value and the few before it."""
    return [statistics.fmean(losses[max(0, k - window + 1) : k + 1]) for k in range(len(losses))]


def learning(group: Group) -> Points:
    """The smoothed loss by step, the mean over the seeds that were still numbers."""
    every = [smoothed(run["losses"]) for run in group.runs]
    longest = max(map(len, every))
    return [
        (float(step + 1), statistics.fmean(loss[step] for loss in every if step < len(loss))) for step in range(longest)
    ]


def curves(of: Comparison, num_layers: int, ax: Axes) -> Axes:
    """The loss while training, smoothed; beside what knowing only how often each character occurs gives."""
    found = [Curve(one.label, learning(one.group), one.style) for one in chosen(of, num_layers)]
    lines(ax, found, "step", "training loss, nats a character", marked=False)
    last = [y for curve in found for _, y in curve.points if math.isfinite(y)]
    if last:
        ax.set_ylim(min(last) - 0.1, min(max(last), of.text["uniform"] + 0.6) + 0.1)
    entropy = of.text["entropy"]
    if ax.get_ylim()[0] < entropy < ax.get_ylim()[1]:
        ax.axhline(entropy, color=axes.GREY, linewidth=0.9, linestyle=(0, (1, 2)))
        ax.annotate("frequencies alone", (0.005, entropy), xycoords=("axes fraction", "data"), ha="left", va="top",
                    fontsize="x-small", color=axes.GREY)  # fmt: skip
    return ax


def rates(of: Comparison, num_layers: int, ax: Axes) -> Axes:
    """The test loss against the learning rate, a point for each seed; the line is the mean."""
    found: list[Curve] = []
    seeds: list[Points] = []
    for number, arm in enumerate(arm for arm in of.arms if arm.num_layers == num_layers):
        for warm_up in sorted({group.warm_up for group in arm.groups}):
            groups = sorted((g for g in arm.groups if g.warm_up == warm_up), key=lambda g: g.lr)
            label = f"{arm.wiring}, {'warm-up' if warm_up else 'no warm-up'}"
            found.append(Curve(label, [(group.lr, group.loss()) for group in groups], style_of(number, warm_up > 0)))
            seeds.append([(group.lr, loss) for group in groups for loss in group.losses()])
    lines(ax, found, "learning rate", "test loss, nats a character", log_x=True)
    for curve, points in zip(found, seeds, strict=True):
        finite = [(x, y) for x, y in points if math.isfinite(y)]
        ax.plot(
            [x for x, _ in finite], [y for _, y in finite], ".", color=curve.style["color"], markersize=4, alpha=0.7
        )
    ticks = sorted({x for curve in found for x, _ in curve.points})
    ax.set_xticks(ticks, labels=[f"{x:g}" for x in ticks])
    ax.minorticks_off()
    return ax


def lines(
    ax: Axes,
    found: Iterable[Curve],
    xlabel: str,
    ylabel: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    marked: bool = True,
) -> Axes:
    """Series over numbers; a value that is no number, or infinite, is a cross at the top."""
    for number, curve in enumerate(found):
        style: dict[str, Any] = {
            **style_of(number, number % 2 == 1),
            **curve.style,
            "linewidth": 1.7,
            "label": curve.label,
        }
        hollow = style.pop("fillstyle") == "none"
        if marked:
            style |= {"marker": "o", "markersize": 5.0, "markeredgewidth": 1.2}
            style |= {"markerfacecolor": ax.get_facecolor()} if hollow else {}
        finite = [(x, y) for x, y in curve.points if math.isfinite(y) and (y > 0 or not log_y)]
        lost = [x for x, y in curve.points if not math.isfinite(y)]
        ax.plot([x for x, _ in finite], [y for _, y in finite], **style)
        if lost:  # an empty line that is not clipped has its corner at the origin, to which the layout would make room
            ax.plot(lost, [0.97] * len(lost), "x", color=axes.ALARM, markersize=6.5, markeredgewidth=1.8, clip_on=False,
                    transform=ax.get_xaxis_transform())  # fmt: skip
    if log_x:
        ax.set_xscale("log")
    if log_y:
        ax.set_yscale("log")
    ax.set_xlabel(xlabel, fontsize="small")
    ax.set_ylabel(ylabel, fontsize="small")
    dress(ax)
    return ax


def dress(ax: Axes) -> None:
    """As the drawings of a recording: a grid across, no frame, the legend above."""
    ax.tick_params(labelsize="small")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    ax.set_axisbelow(True)
    handles, _ = ax.get_legend_handles_labels()
    if handles:
        axes.legend_above(ax, handles)


WHILE: dict[str, tuple[str, Callable[[Numbers, int], float | None]]] = {
    "moved": ("logits moved by a step", lambda recorded, k: recorded["moved"][k]),
    "gradient": ("gradient at x₀ over x_L", lambda recorded, k: ends(recorded["gradient"][k])),
    "similarity": ("cos(token, token) at x_L", lambda recorded, k: last_of(recorded["similarity"][k])),
}
"""What is drawn over the steps: the name on the axis, and the number of a recorded step."""


def ends(values: Sequence[float | None]) -> float | None:
    """The first over the last."""
    there = [value for value in values if value is not None]
    return there[0] / there[-1] if len(there) > 1 and there[-1] else None


def last_of(values: Sequence[float | None]) -> float | None:
    """The last that is there."""
    return next((value for value in reversed(values) if value is not None), None)


def while_training(group: Group, name: str) -> Points:
    """A number at the recorded steps, the mean over the seeds that have it."""
    found: dict[int, list[float]] = {}
    for run in group.runs:
        recorded = run["recorded"]
        for k, step in enumerate(recorded["steps"]):
            value = WHILE[name][1](recorded, k)
            if value is not None:
                found.setdefault(step, []).append(value)
    return [(float(step), statistics.fmean(values)) for step, values in sorted(found.items())]


def over_steps(shown: Sequence[Chosen], figure: Figure) -> Figure:
    """What training does to the step, the gradient and the tokens, over the steps. Takes a figure, and returns it."""
    places = figure.subplots(len(WHILE), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, (ylabel, _)) in zip(places, WHILE.items(), strict=True):
        found = [Curve(one.label, while_training(one.group, name), one.style) for one in shown]
        finite = [y for curve in found for _, y in curve.points if math.isfinite(y) and y > 0]
        log = bool(finite) and max(finite) > axes.LOG_RATIO * min(finite) and name != "similarity"
        lines(ax, found, "step" if ax is places[-1] else "", ylabel, log_y=log)
        if ax is not places[0] and ax.get_legend() is not None:
            ax.get_legend().remove()
    return figure


# By depth.


def sites_of(run: Numbers) -> list[RecordedSite]:
    """The places by depth, as a recording has them."""
    return [RecordedSite(one["id"], one["id"], one["kind"], one["layer"]) for one in run["sites"]]


def mean_by_depth(group: Group, name: str, after: bool) -> list[float | None]:
    """A number at each place, the mean over the seeds: at the first step, or after training."""
    found = []
    for run in group.runs:
        if after and "after" in run:
            found.append(run["after"][name])
        elif not after and run["recorded"]["steps"]:
            found.append(run["recorded"][name][0])
    return [
        statistics.fmean(value for value in at) if all(value is not None for value in at) else None
        for at in zip(*found, strict=True)
    ]


def by_depth(shown: Sequence[Chosen], panels: Sequence[Panel], figure: Figure, *, after: bool) -> Figure:
    """Panels above one another with the same depths: the first step of training, or after it. Takes a figure, and returns it."""
    with_sites = [one.group for one in shown if one.group.runs[0]["sites"]]
    if not with_sites:
        raise ValueError("nothing was recorded by depth, expected runs with every > 0.")
    depths = Depths(sites_of(with_sites[0].runs[0]))
    places = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, ylabel, limits) in zip(places, panels, strict=True):
        first = ax is places[0]
        axes.panel_of(ax, depths).legend_has_kinds = first
        ax.tick_params(labelbottom=ax is places[-1])
        for label, group, style in shown:
            values = mean_by_depth(group, name, after) if group.runs[0]["sites"] else []
            sites = sites_of(group.runs[0])
            points = [(site, value) for site, value in zip(sites, values, strict=False) if value is not None]
            axes.add_line(ax, depths, Line(label, points, style))
        axes.finish(ax, [], ylabel, limits, legend=first)
    return figure


def ablation(shown: Sequence[Chosen], ax: Axes) -> Axes:
    """How much the loss rises without each sublayer, the mean over the seeds."""
    depths = None
    for label, group, style in shown:
        runs = [run for run in group.runs if run.get("ablation")]
        if not runs:
            continue
        sites = [RecordedSite(one["site"], one["site"], one["kind"], None) for one in runs[0]["ablation"]]
        depths = depths or Depths(sites)
        rises = [statistics.fmean(run["ablation"][k]["rise"] for run in runs) for k in range(len(sites))]
        axes.add_line(ax, depths, Line(label, [*zip(sites, rises, strict=True)], style))
    if depths is None:
        raise ValueError("nothing was ablated, expected a run that did not diverge.")
    axes.finish(ax, [], "rise of the loss, nats", None, legend=True)
    return ax
