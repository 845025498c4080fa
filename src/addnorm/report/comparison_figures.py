"""Figures of a comparison report: trained models (learning curves, rates, by depth, memory, ablation) and untrained stacks.

Each figure has a table of all its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from addnorm._util.numbers import format_number
from addnorm.lab import plot
from addnorm.lab.comparison import Comparison
from addnorm.lab.plot import Curve, PlotGroup, Points
from addnorm.lab.published import PublishedCheck
from addnorm.report.figure import draw_figure
from addnorm.report.page import Block, Cell, Figure, Table
from addnorm.stream.record import axes
from addnorm.stream.record.recording import Recording

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = [
    "ablation_figures", "check_tables", "depth_figure", "format_losses", "init_depth_figure", "init_layer_figure",
    "learning_figure", "memory_figure", "rate_figure", "training_figure",
]  # fmt: skip

Row = dict[str, Any]
Panel = tuple[str, Callable[[Row], Any]]  # label of the y axis, and the function that returns the number of a row

WIDE = 6.0  # inches: wider figures have several maps per row
ROWS = 100  # of a learning curve's table
MAPS_PER_ROW, FEW_SOURCES = 3, 13  # maps with more sources are one fewer per row
NARROW_HEIGHT = 4.8  # inches: maximum height of a map on a narrow page
CELL = 0.52  # inches: minimum width of a map's column with numbers in its cells
EXPLODING = ("no_norm",)  # wirings that may leave the axes' limits
DRAWN = 7  # series in a drawing of untrained stacks; the table has all
NAMES = {
    "stream": "stream, rms", "ratio": "write / stream", "similarity": "similarity of tokens",
    "gradient": "gradient at the stream", "parameters": "gradient of the parameters",
}  # fmt: skip


def learning_figure(comparison: Comparison, n: int, name: str = "", title_suffix: str = "") -> Figure:
    """Return a figure of the training losses.

    Args:
        comparison: the comparison.
        n: number of layers.
        name: end of the drawing's name.
        title_suffix: end of the title: the drawn wirings.
    """
    curves = {line.label: dict(plot.learning_curve(line.group)) for line in plot.groups_by_warm_up(comparison, n)}
    every = sorted({step for curve in curves.values() for step in curve})
    stride = -(-len(every) // ROWS)
    steps = [step for step in every if step == every[0] or step % stride == 0 or step == every[-1]]
    rows: list[list[Cell]] = [[int(step), *(curve.get(step) for curve in curves.values())] for step in steps]
    of_steps = f"Training loss, mean of {plot.WINDOW} steps"
    more = f", every {stride} steps" if stride > 1 else ""
    return draw_figure(
        f"learning-{n}{name}", lambda figure: plot.plot_learning(comparison, n, figure.add_subplot()),
        title=f"Learning, {n} layers{title_suffix}",
        caption=f"Loss of each batch before its step, mean of {plot.WINDOW} steps, in nats a character. "
        f"{_describe_curves(comparison)} A model that knows only how often each character occurs has "
        f"{format_number(comparison.text['entropy'])} (dotted, where it is in range).",
        table=Table(["step", *curves], rows, f"{of_steps}{more}"), height=4.2,
    )  # fmt: skip


def _describe_curves(comparison: Comparison) -> str:
    """Return a sentence about the learning rates and the seeds of the curves."""
    rates, seeds = comparison.protocol.rates, comparison.protocol.seeds
    rate = f"at the learning rate {rates[0]:g}" if len(rates) == 1 else f"at its best of {len(rates)} learning rates"
    seed = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of {len(seeds)} seeds"
    return f"Each curve is a wiring {rate}, {seed}."


def training_figure(comparison: Comparison, n: int, name: str = "", title_suffix: str = "") -> Figure | None:
    """Return a figure of step size, gradient ratio and similarity over the steps. Arguments as in `learning_figure`."""
    shown = [
        line
        for line in plot.groups_by_warm_up(comparison, n)
        if any(run["recorded"]["steps"] for run in line.group.runs)
    ]
    if not shown:
        return None
    columns = {
        f"{line.label}: {ylabel}": dict(plot.series_by_step(line.group, what))
        for line in shown for what, (ylabel, _) in plot.BY_STEP.items()
    }  # fmt: skip
    steps = sorted({step for column in columns.values() for step in column})
    if len(steps) < 2:
        return None  # the figures by depth have the first step
    rows: list[list[Cell]] = [[int(step), *(column.get(step) for column in columns.values())] for step in steps]
    return draw_figure(
        f"training-{n}{name}", lambda figure: plot.plot_by_step(shown, figure),
        title=f"During training, {n} layers{title_suffix}",
        caption="At the recorded steps, from top to bottom: the change of the logits by the step, relative to their norm; the "
        "gradient at x_0 divided by the gradient at x_L; the mean cosine of two tokens after the last sublayer.",
        table=Table(["step", *columns], rows, "During training"), height=7.4,
    )  # fmt: skip


def rate_figure(comparison: Comparison, n: int, name: str = "", title_suffix: str = "") -> Figure:
    """Return a figure of the loss over the learning rate. Arguments as in `learning_figure`."""
    groups = [group for group in comparison.groups if group.num_layers == n]
    rows: list[list[Cell]] = [
        [
            group.wiring,
            "yes" if group.warm_up else "no",
            group.lr,
            group.loss(),
            format_losses(group.losses()),
            group.diverged,
        ]
        for group in groups
    ]
    return draw_figure(
        f"rates-{n}{name}", lambda figure: plot.plot_rates(comparison, n, figure.add_subplot()),
        title=f"Test loss by learning rate, {n} layers{title_suffix}",
        caption="Test loss after training: a dot for each seed, and a line through the means. A cross marks a rate at which a "
        "seed diverged; the table names the wiring.",
        table=Table(["wiring", "warm-up", "rate", "test loss", "by seed", "diverged"], rows, "Test loss, mean of the seeds"),
        height=4.2,
    )  # fmt: skip


def format_losses(losses: Sequence[float]) -> str:
    """Return losses, separated by commas."""
    return ", ".join(format_number(loss, 4) for loss in losses)


def depth_figure(name: str, groups: Sequence[PlotGroup], *, after: bool, title_suffix: str = "") -> Figure | None:
    """Return a figure of forward and backward statistics by depth, at the first step or after training; None without them."""
    shown = _align_sites(groups, after)
    if not shown:
        return None
    panels = (*plot.FORWARD, *plot.BACKWARD)
    columns = {
        f"{label}: {NAMES[what]}": plot.mean_by_depth(group, what, after)
        for label, group, _ in shown
        for what, *_ in panels
    }
    places = [line.group.runs[0]["sites"] for line in groups if line.group.runs[0]["sites"]]
    rows: list[list[Cell]] = [
        [
            *(
                " / ".join(dict.fromkeys(sites[k][what] for sites in places if k < len(sites)))
                for what in ("id", "kind")
            ),
            *(column[k] if k < len(column) else None for column in columns.values()),
        ]
        for k in range(max(map(len, places)))
    ]
    when = "after training" if after else "before training"
    on = "held-out text" if after else "sequences of the first batch"
    missing = [line.label for line in groups if line.label not in {line.label for line in shown}]
    without = f" No numbers exist for {'; '.join(missing)}." if missing else ""
    return draw_figure(
        name, lambda figure: plot.plot_by_depth(shown, panels, figure, after=after),
        title=f"Forward and backward by depth, {when}{title_suffix}",
        caption=f"On {on}, from top to bottom: the root mean square of the stream after each sublayer; the norm of each write "
        "relative to the stream; the mean cosine of two tokens; the mean norm of a token's gradient at the stream; the norm of "
        f"the gradient of each sublayer's parameters.{without}",
        table=Table(["sublayer", "kind", *columns], rows, f"By depth, {when}"), height=10.5,
    )  # fmt: skip


def _align_sites(groups: Sequence[PlotGroup], after: bool) -> list[PlotGroup]:
    """Return the groups with recorded runs, with sites named by their index: wirings may have different sublayers."""
    recorded = []
    for line in groups:
        first = len(line.group.runs[0]["sites"])
        runs = [
            run for run in line.group.runs
            if run["sites"] and len(run["sites"]) == first and (run.get("after") if after else run["recorded"]["steps"])
        ]  # fmt: skip
        if runs:
            recorded.append((line, runs))
    longest: list[dict[str, Any]] = max((runs[0]["sites"] for _, runs in recorded), key=len, default=[])

    def renamed(run: dict[str, Any]) -> dict[str, Any]:
        sites = [*run["sites"], *longest[len(run["sites"]) :]]
        return {**run, "sites": [{**site, "id": str(k)} for k, site in enumerate(sites)]}

    return [line._replace(group=replace(line.group, runs=tuple(map(renamed, runs)))) for line, runs in recorded]


def memory_figure(name: str, shown: Sequence[PlotGroup], title_suffix: str = "") -> Figure | None:
    """Return a figure of the memory maps of trained models, with one colour scale; None without maps."""
    with_any = [(label, [run for run in group.runs if _has_map(run)]) for label, group, _ in shown]
    maps = [(label, runs[0]) for label, runs in with_any if runs]
    if not maps:
        return None
    most = max(len(run["after"]["map"]["sources"]) for _, run in maps)
    shares_of_all = [
        share for _, run in maps for at in run["after"]["map"]["shares"] for share in at if math.isfinite(share)
    ]
    lowest = min([*shares_of_all, 0.0])
    height = min(max(1.5 + 0.2 * most, 3.2), 8.5)

    def n_rows(wide: bool) -> int:
        return -(-len(maps) // (MAPS_PER_ROW - (most > FEW_SOURCES) if wide else 1))

    def draw(figure: Canvas) -> None:
        wide = figure.get_figwidth() > WIDE
        columns = -(-len(maps) // n_rows(wide))
        places = [*figure.subplots(n_rows(wide), columns, squeeze=False).flat]
        for ax, (label, run) in zip(places, maps, strict=False):
            memory_map = run["after"]["map"]
            sites = plot.recorded_sites(run)
            unique = [
                replace(site, id=name)
                for site, name in zip(sites, _number_duplicates([site.id for site in sites]), strict=True)
            ]
            rec = Recording(unique, {}, {"stream": (_number_duplicates(memory_map["sources"]), memory_map["shares"])})
            rec.plot.memory_map(ax=ax, vmin=lowest, vmax=1.0)
            mesh = next(mesh for mesh in ax.collections if mesh.colorbar is not None)
            mesh.colorbar.remove()  # one colour bar serves all maps
            if figure.get_figwidth() / columns < CELL * len(memory_map["shares"]):
                for text in [*ax.texts]:
                    text.remove()
            if not wide:  # no room for all labels
                names = [label.get_text() for label in ax.get_yticklabels()]
                ax.set_yticks(ax.get_yticks()[:: 1 + (len(names) > 13)], labels=names[:: 1 + (len(names) > 13)])
                depths = [label.get_text() for label in ax.get_xticklabels()]
                ax.set_xticks(ax.get_xticks()[:: 1 + (len(depths) > 9)], labels=depths[:: 1 + (len(depths) > 9)])
            ax.set_title("", loc="left")
            ax.set_title(label, fontsize="medium")
        for ax in places[len(maps) :]:
            ax.remove()
        bar = figure.colorbar(
            mesh, ax=places[: len(maps)], label="share of the stream", aspect=30 * n_rows(wide), fraction=0.05
        )
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize="small")
        bar.ax.yaxis.label.set_fontsize("small")

    depth = max(len(run["after"]["map"]["shares"]) for _, run in maps)
    rows: list[list[Cell]] = []
    for label, run in maps:
        memory_map = run["after"]["map"]
        for k, source in enumerate(memory_map["sources"]):
            shares = [at[k] for at in memory_map["shares"]]
            rows.append([label, source, *shares, *[None] * (depth - len(shares))])
    head = ["wiring", "source", *("x_0" if not k else f"depth {k}" for k in range(depth))]
    missing = [label for label, runs in with_any if not runs]
    without = f" No map exists for {'; '.join(missing)}." if missing else ""
    seeds = {run["settings"]["seed"] for _, run in maps}
    seed = f" Seed {seeds.pop()}." if len(seeds) == 1 and any(len(runs) > 1 for _, runs in with_any) else ""
    return draw_figure(
        name, draw, title=f"Sources of the stream, after training{title_suffix}",
        caption="Each row is a source, each column the stream at a depth; a column sums to one. The opacity is the square "
        "root of the share; negative shares are orange. Each source is carried exactly through the norms after it."
        f"{seed}{without}",
        table=Table(head, rows, "Share of each source in the stream"),
        height=lambda wide: (height if wide else min(height, NARROW_HEIGHT)) * n_rows(wide),
    )  # fmt: skip


def _has_map(run: dict[str, Any]) -> bool:
    """Return whether a run has a map with a number."""
    memory_map = (run.get("after") or {}).get("map") or {"shares": []}
    return any(share and math.isfinite(share) for at in memory_map["shares"] for share in at)


def _number_duplicates(names: Sequence[str]) -> list[str]:
    """Return the names with a number appended to repeated ones."""
    times = [names[: k + 1].count(name) for k, name in enumerate(names)]
    return [name if count == 1 else f"{name}#{count}" for name, count in zip(names, times, strict=True)]


def ablation_figures(name: str, groups: Sequence[PlotGroup], title_suffix: str = "") -> list[Figure]:
    """Return figures of the rise of the loss without each sublayer, one for each number of sublayers of the wirings."""
    figures: list[Figure] = []
    with_any = [
        line._replace(group=replace(line.group, runs=tuple(run for run in line.group.runs if run.get("ablation"))))
        for line in groups
    ]
    lengths = dict.fromkeys(len(line.group.runs[0]["ablation"]) for line in with_any if line.group.runs)
    for length in lengths:
        shown = [line for line in with_any if line.group.runs and len(line.group.runs[0]["ablation"]) == length]
        figures.append(
            _ablation_figure(
                f"{name}-{length}", shown, title_suffix if len(lengths) == 1 else f"{title_suffix}, {length} sublayers"
            )
        )
    return figures


def _ablation_figure(name: str, shown: Sequence[PlotGroup], title_suffix: str) -> Figure:
    firsts = [line.group.runs[0]["ablation"] for line in shown]
    rows: list[list[Cell]] = [
        [
            *(" / ".join(dict.fromkeys(first[k][what] for first in firsts)) for what in ("site", "kind")),
            *(sum(run["ablation"][k]["rise"] for run in group.runs) / len(group.runs) for _, group, _ in shown),
        ]
        for k in range(len(firsts[0]))
    ]

    def renamed(run: dict[str, Any]) -> dict[str, Any]:
        return {**run, "ablation": [{**entry, "site": str(k)} for k, entry in enumerate(run["ablation"])]}

    placed = [line._replace(group=replace(line.group, runs=tuple(map(renamed, line.group.runs)))) for line in shown]
    return draw_figure(
        name, lambda figure: plot.plot_ablation(placed, figure.add_subplot()), title=f"Without each sublayer{title_suffix}",
        caption="The write of each sublayer was removed in turn: rise of the loss on held-out text, each wiring at its best "
        "setting of those that were run.",
        table=Table(["without", "kind", *(line.label for line in shown)], rows, "Rise of the loss, nats a character"), height=3.6,
    )  # fmt: skip


# Untrained stacks.


def init_depth_figure(
    comparison: Comparison, names: Sequence[str], name: str, title: str, caption: str, panels: Sequence[Panel]
) -> Figure:
    """Return a figure of numbers of whole stacks over the number of layers."""
    rows = {(row["wiring"], row["num_layers"]): row for row in comparison.at_init}
    depths = sorted({n for _, n in rows})

    def draw(figure: Canvas) -> None:
        places = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for place, (ax, (ylabel, value)) in enumerate(zip(places, panels, strict=True)):
            curves = [
                Curve(wiring, [(n, value(rows[wiring, n])) for n in depths if (wiring, n) in rows])
                for wiring in names[:DRAWN]
            ]
            plot.plot_lines(ax, curves, "layers" if ax is places[-1] else "", ylabel, log_x=True, log_y=True)
            _set_limits(ax, curves)
            ax.set_xticks(depths, labels=[str(n) for n in depths])
            ax.minorticks_off()
            if place:
                ax.get_legend().remove()

    body: list[list[Cell]] = [
        [wiring, n, *(value(rows[wiring, n]) for _, value in panels)]
        for wiring in names
        for n in depths
        if (wiring, n) in rows
    ]
    caption += _undrawn(names)
    table = Table(["wiring", "layers", *(ylabel for ylabel, _ in panels)], body, title)
    return draw_figure(name, draw, title=title, caption=caption, table=table, height=6.6)


def init_layer_figure(
    comparison: Comparison, names: Sequence[str], n: int, name: str, title: str, caption: str, panels: Sequence[Panel]
) -> Figure:
    """Return a figure of numbers at every depth of stacks with n layers."""
    rows = {row["wiring"]: row for row in comparison.at_init if row["num_layers"] == n}
    measured = [wiring for wiring in names if wiring in rows]

    def points(values: Sequence[float]) -> Points:
        return [(k / 2, value) for k, value in enumerate(values)]

    def draw(figure: Canvas) -> None:
        places = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for place, (ax, (ylabel, value)) in enumerate(zip(places, panels, strict=True)):
            curves = [Curve(wiring, points(value(rows[wiring]))) for wiring in measured[:DRAWN]]
            finite = [y for curve in curves for _, y in curve.points if math.isfinite(y) and y > 0]
            log = bool(finite) and max(finite) > axes.LOG_RATIO * min(finite) and "cos" not in ylabel
            plot.plot_lines(ax, curves, "layer" if ax is places[-1] else "", ylabel, log_y=log, marked=False)
            if log:
                _set_limits(ax, curves)
            if place:
                ax.get_legend().remove()

    body: list[list[Cell]] = [
        [f"{k / 2:g}", *(value(rows[wiring])[k] for wiring in measured for _, value in panels)]
        for k in range(2 * n + 1)
    ]
    caption += _undrawn(measured)
    head = ["layer", *(f"{wiring}: {ylabel}" for wiring in measured for ylabel, _ in panels)]
    return draw_figure(name, draw, title=title, caption=caption, table=Table(head, body, title), height=8.6)


def _undrawn(names: Sequence[str]) -> str:
    """Return a sentence that names the wirings that only the table has."""
    more = names[DRAWN:]
    return f" Only in the table: {', '.join(more)}." if more else ""


def _set_limits(ax: Axes, curves: Sequence[Curve]) -> None:
    """Fit a logarithmic axis to all wirings except exploding ones, beside which the others would look equal."""
    finite = [
        y for curve in curves if curve.label not in EXPLODING for _, y in curve.points if math.isfinite(y) and y > 0
    ]
    if finite:
        ax.set_ylim(min(finite) / 1.5, max(finite) * 3)


def check_tables(checks: Sequence[PublishedCheck]) -> list[Block]:
    """Return tables of the published results: verdicts, all numbers, sources."""
    rows: list[list[Cell]] = []
    every: list[list[Cell]] = []
    for check in checks:
        values = [*check.measured.values()]
        measured = "" if not values else format_number(min(values), 3)
        if len(values) > 1:
            measured = f"{measured} to {format_number(max(values), 3)}"
        rows.append([check.name, check.verdict, measured, check.criterion])
        every += [[check.name, what, value] for what, value in check.measured.items()]
    failed = [k for k, check in enumerate(checks) if check.holds is False]
    sources: list[list[Cell]] = [[check.name, check.source, check.why] for check in checks]
    return [
        Table(["published result", "verdict", "measured", "criterion"], rows, "", False, failed),
        Table(["published result", "number", "measured"], every, "All numbers", True),
        Table(
            ["published result", "source", "width of the band"],
            sources,
            "Sources, and reasons for the width of each band",
            True,
        ),
    ]
