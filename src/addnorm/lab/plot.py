"""Plots of a comparison. Each function draws on the given Axes or Figure, returns it, and never calls `show`.

The style is that of a recording's plots. Series differ by colour, dash and filling. A run that diverged is a cross at the top.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from addnorm.lab.measure import Numbers
from addnorm.lab.results import Group, Results
from addnorm.stream.record import axes
from addnorm.stream.record.axes import Depths, Line
from addnorm.stream.record.schema import RecordedSite

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BACKWARD",
    "BY_STEP",
    "FORWARD",
    "Curve",
    "PlotGroup",
    "best_groups",
    "groups_by_warm_up",
    "learning_curve",
    "line_style",
    "mean_by_depth",
    "plot_ablation",
    "plot_by_depth",
    "plot_by_step",
    "plot_learning",
    "plot_lines",
    "plot_rates",
    "recorded_sites",
    "series_by_step",
    "smooth",
]

Points = Sequence[tuple[float, float]]
Panel = tuple[str, str, tuple[float, float] | None]  # statistic by depth, label of the axis, limits

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
    """Series of points with its label, and the parts of its style that do not follow from its position."""

    label: str
    points: Points
    style: Mapping[str, Any] = {}


class PlotGroup(NamedTuple):
    """Runs to draw: label, runs, and line style. The colour stands for a wiring and the dash for warm-up."""

    label: str
    group: Group
    style: dict[str, Any]


def groups_by_warm_up(results: Results, num_layers: int) -> list[PlotGroup]:
    """Return for each wiring of a depth its best setting without and its best setting with warm-up."""
    chosen = []
    for number, arm in enumerate(arm for arm in results.arms if arm.num_layers == num_layers):
        both = [arm.best_where(lambda g: not g.warm_up), arm.best_where(lambda g: g.warm_up > 0)]
        groups = [group for group in both if group is not None]
        for group in groups:
            warm = bool(group.warm_up)
            label = f"{arm.wiring}, {'warm-up' if warm else 'no warm-up'}" if len(groups) > 1 else arm.wiring
            chosen.append(PlotGroup(label, group, line_style(number, warm if len(groups) > 1 else number % 2 == 1)))
    return chosen


def best_groups(results: Results, num_layers: int) -> list[PlotGroup]:
    """Return for each wiring of a depth its best setting."""
    arms = (arm for arm in results.arms if arm.num_layers == num_layers)
    return [PlotGroup(arm.wiring, arm.best, line_style(number, number % 2 == 1)) for number, arm in enumerate(arms)]


def line_style(number: int, dashed: bool) -> dict[str, Any]:
    """Return the colour of series `number`, with dashes and hollow markers or with a solid line and filled ones."""
    rounds = number // len(axes.COLOURS)  # further rounds of colours have other dashes
    which = (2 * rounds + (dashed != (rounds % 4 > 1))) % 4
    return {
        "color": axes.COLOURS[number % len(axes.COLOURS)], "linestyle": axes.DASHES[which],
        "fillstyle": axes.FILLS[which],
    }  # fmt: skip


def smooth(losses: Sequence[float], window: int = WINDOW) -> list[float]:
    """Return the mean of each value and up to `window` - 1 values before it."""
    return [statistics.fmean(losses[max(0, k - window + 1) : k + 1]) for k in range(len(losses))]


def learning_curve(group: Group) -> Points:
    """Return the smoothed loss by step, mean over the seeds that have not diverged."""
    curves = [smooth(run["losses"]) for run in group.runs]
    longest = max(map(len, curves))
    return [
        (float(step + 1), statistics.fmean(loss[step] for loss in curves if step < len(loss)))
        for step in range(longest)
    ]


def plot_learning(results: Results, num_layers: int, ax: Axes) -> Axes:
    """Draw the smoothed training loss, with a line at the entropy of single characters."""
    curves = [
        Curve(line.label, learning_curve(line.group), line.style) for line in groups_by_warm_up(results, num_layers)
    ]
    plot_lines(ax, curves, "step", "training loss, nats a character", marked=False)
    values = [y for curve in curves for _, y in curve.points if math.isfinite(y)]
    if values:
        ax.set_ylim(min(values) - 0.1, min(max(values), results.text["uniform"] + 0.6) + 0.1)
    entropy = results.text["entropy"]
    if ax.get_ylim()[0] < entropy < ax.get_ylim()[1]:
        ax.axhline(entropy, color=axes.GREY, linewidth=1.1, linestyle=(0, (1, 2)), label="frequencies alone")
        axes.legend_above(ax, ax.get_legend_handles_labels()[0])
    return ax


def plot_rates(results: Results, num_layers: int, ax: Axes) -> Axes:
    """Draw the test loss against the learning rate: a dot per seed, and a line through the means."""
    curves: list[Curve] = []
    seeds: list[Points] = []
    for number, arm in enumerate(arm for arm in results.arms if arm.num_layers == num_layers):
        for warm_up in sorted({group.warm_up for group in arm.groups}):
            groups = sorted((g for g in arm.groups if g.warm_up == warm_up), key=lambda g: g.lr)
            label = f"{arm.wiring}, {'warm-up' if warm_up else 'no warm-up'}"
            curves.append(Curve(label, [(group.lr, group.loss()) for group in groups], line_style(number, warm_up > 0)))
            seeds.append([(group.lr, loss) for group in groups for loss in group.losses()])
    plot_lines(ax, curves, "learning rate", "test loss, nats a character", log_x=True)
    for curve, points in zip(curves, seeds, strict=True):
        finite = [(x, y) for x, y in points if math.isfinite(y)]
        ax.plot(
            [x for x, _ in finite], [y for _, y in finite], ".", color=curve.style["color"], markersize=4, alpha=0.7
        )
    ticks = sorted({x for curve in curves for x, _ in curve.points})
    ax.set_xticks(ticks, labels=[f"{x:g}" for x in ticks])
    ax.minorticks_off()
    return ax


def plot_lines(
    ax: Axes,
    curves: Iterable[Curve],
    xlabel: str,
    ylabel: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    marked: bool = True,
) -> Axes:
    """Draw series over numbers. NaN and infinity are crosses at the top."""
    for number, curve in enumerate(curves):
        style: dict[str, Any] = {
            **line_style(number, number % 2 == 1),
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
        if lost:  # an empty unclipped line has its corner at the origin, and the layout would make room for it
            ax.plot(lost, [0.97] * len(lost), "x", color=axes.ALARM, markersize=6.5, markeredgewidth=1.8, clip_on=False,
                    transform=ax.get_xaxis_transform())  # fmt: skip
    if log_x:
        ax.set_xscale("log")
    if log_y:
        ax.set_yscale("log")
    ax.set_xlabel(xlabel, fontsize="small")
    ax.set_ylabel(ylabel, fontsize="small")
    _style_axes(ax)
    return ax


def _style_axes(ax: Axes) -> None:
    """Apply the style of a recording's plots: a horizontal grid, no frame, the legend above."""
    ax.tick_params(labelsize="small")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    ax.set_axisbelow(True)
    handles, _ = ax.get_legend_handles_labels()
    if handles:
        axes.legend_above(ax, handles)


BY_STEP: dict[str, tuple[str, Callable[[Numbers, int], float | None]]] = {
    "logit_change": ("relative change of the logits in a step", lambda recorded, k: recorded["logit_change"][k]),
    "gradient": ("gradient at x_0 over x_L", lambda recorded, k: _first_over_last(recorded["gradient"][k])),
    "similarity": ("cos(token, token) at x_L", lambda recorded, k: _last(recorded["similarity"][k])),
}
"""Statistics over the steps: the label of the axis, and the function that returns the number of a recorded step."""


def _first_over_last(values: Sequence[float | None]) -> float | None:
    """Return the first number divided by the last."""
    numbers = [value for value in values if value is not None]
    return numbers[0] / numbers[-1] if len(numbers) > 1 and numbers[-1] else None


def _last(values: Sequence[float | None]) -> float | None:
    """Return the last number."""
    return next((value for value in reversed(values) if value is not None), None)


def series_by_step(group: Group, name: str) -> Points:
    """Return a statistic at the recorded steps, mean over the seeds that have it."""
    by_step: dict[int, list[float]] = {}
    for run in group.runs:
        recorded = run["recorded"]
        for k, step in enumerate(recorded["steps"]):
            value = BY_STEP[name][1](recorded, k)
            if value is not None:
                by_step.setdefault(step, []).append(value)
    return [(float(step), statistics.fmean(values)) for step, values in sorted(by_step.items())]


def plot_by_step(groups: Sequence[PlotGroup], figure: Figure) -> Figure:
    """Draw the statistics of `BY_STEP` over the training steps."""
    panels = figure.subplots(len(BY_STEP), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, (ylabel, _)) in zip(panels, BY_STEP.items(), strict=True):
        curves = [Curve(line.label, series_by_step(line.group, name), line.style) for line in groups]
        finite = [y for curve in curves for _, y in curve.points if math.isfinite(y) and y > 0]
        log = bool(finite) and max(finite) > axes.LOG_RATIO * min(finite) and name != "similarity"
        plot_lines(ax, curves, "step" if ax is panels[-1] else "", ylabel, log_y=log)
        if ax is not panels[0] and ax.get_legend() is not None:
            ax.get_legend().remove()
    return figure


def recorded_sites(run: Numbers) -> list[RecordedSite]:
    """Return the sites of a run as a recording has them."""
    return [RecordedSite(site["id"], site["id"], site["kind"], site["layer"]) for site in run["sites"]]


def mean_by_depth(group: Group, name: str, after: bool) -> list[float | None]:
    """Return a statistic at each site, mean over the seeds: at the first step, or after training."""
    runs = []
    for run in group.runs:
        if after and "after" in run:
            runs.append(run["after"][name])
        elif not after and run["recorded"]["steps"]:
            runs.append(run["recorded"][name][0])
    return [
        statistics.fmean(value for value in at) if all(value is not None for value in at) else None
        for at in zip(*runs, strict=True)
    ]


def plot_by_depth(groups: Sequence[PlotGroup], panels: Sequence[Panel], figure: Figure, *, after: bool) -> Figure:
    """Draw panels with one axis of depth: the first step of training, or after training.

    Raises:
        ValueError: nothing was recorded.
    """
    with_sites = [line.group for line in groups if line.group.runs[0]["sites"]]
    if not with_sites:
        raise ValueError("nothing was recorded by depth, expected runs with every > 0.")
    depths = Depths(recorded_sites(with_sites[0].runs[0]))
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, ylabel, limits) in zip(rows, panels, strict=True):
        first = ax is rows[0]
        axes.panel_of(ax, depths).legend_has_kinds = first
        ax.tick_params(labelbottom=ax is rows[-1])
        for label, group, style in groups:
            values = mean_by_depth(group, name, after) if group.runs[0]["sites"] else []
            sites = recorded_sites(group.runs[0])
            points = [(site, value) for site, value in zip(sites, values, strict=False) if value is not None]
            axes.add_line(ax, depths, Line(label, points, style))
        axes.finish(ax, [], ylabel, limits, legend=first)
    return figure


def plot_ablation(groups: Sequence[PlotGroup], ax: Axes) -> Axes:
    """Draw the rise of the loss without each sublayer, mean over the seeds.

    Raises:
        ValueError: no run has an ablation.
    """
    depths = None
    for label, group, style in groups:
        runs = [run for run in group.runs if run.get("ablation")]
        if not runs:
            continue
        sites = [
            RecordedSite(ablation["site"], ablation["site"], ablation["kind"], None) for ablation in runs[0]["ablation"]
        ]
        depths = depths or Depths(sites)
        rises = [statistics.fmean(run["ablation"][k]["rise"] for run in runs) for k in range(len(sites))]
        axes.add_line(ax, depths, Line(label, [*zip(sites, rises, strict=True)], style))
    if depths is None:
        raise ValueError("nothing was ablated, expected a run that did not diverge.")
    axes.finish(ax, [], "rise of the loss, nats", None, legend=True)
    return ax
