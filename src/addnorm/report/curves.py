"""The figures of models that were trained: learning curves, rates, by depth, memory, ablation. Each has its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from addnorm._util.numbers import format_number
from addnorm.lab import plot
from addnorm.lab.comparison import Comparison
from addnorm.lab.plot import PlotGroup
from addnorm.report.blocks import Cell, Figure, Table
from addnorm.report.figure import drawn
from addnorm.stream.record.recording import Recording

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["ablation", "by_depth", "learning", "memory", "rates", "training"]

BESIDE = 6.0  # inches from which drawings stand side by side
ROWS = 100  # of a learning curve's table
ABREAST, SMALL = 3, 13  # maps side by side; and of how many sources at most: of more, one less
LOW = 4.8  # inches: the most of a map on a narrow page
CELL = 0.52  # inches of a map's whole width for a column that has a number in it
NAMES = {
    "stream": "stream, rms", "ratio": "write / stream", "similarity": "similarity of tokens",
    "gradient": "gradient at the stream", "parameters": "gradient of the parameters",
}  # fmt: skip


def learning(found: Comparison, n: int, name: str = "", of: str = "") -> Figure:
    """The loss while training.

    Args:
        found: the comparison.
        n: the depth.
        name: what the drawing's name ends in, where there are several.
        of: which wirings it shows, for the title.
    """
    curves = {one.label: dict(plot.learning_curve(one.group)) for one in plot.groups_by_warm_up(found, n)}
    every = sorted({step for curve in curves.values() for step in curve})
    stride = -(-len(every) // ROWS)
    steps = [step for step in every if step == every[0] or step % stride == 0 or step == every[-1]]
    rows: list[list[Cell]] = [[int(step), *(curve.get(step) for curve in curves.values())] for step in steps]
    of_steps = f"Training loss, the mean of {plot.WINDOW} steps"
    more = f"; a row for every {stride} steps" if stride > 1 else ""
    return drawn(
        f"learning-{n}{name}", lambda figure: plot.plot_learning(found, n, figure.add_subplot()),
        title=f"Learning, {n} layers{of}",
        caption=f"The loss of each batch before it was learned from, as the mean of {plot.WINDOW} steps. Each curve is a wiring "
        "at its best learning rate. Where losses come near it, a dotted line is what knowing only how often each character "
        f"occurs gives: {format_number(found.text['entropy'])}.",
        table=Table(["step", *curves], rows, f"{of_steps}{more}"), height=4.2,
    )  # fmt: skip


def training(found: Comparison, n: int, name: str = "", of: str = "") -> Figure | None:
    """What training does to the step, the gradient and the tokens; `name` and `of` as in `learning`."""
    shown = [one for one in plot.groups_by_warm_up(found, n) if any(run["recorded"]["steps"] for run in one.group.runs)]
    if not shown:
        return None
    columns = {
        f"{one.label}: {ylabel}": dict(plot.series_by_step(one.group, what))
        for one in shown for what, (ylabel, _) in plot.BY_STEP.items()
    }  # fmt: skip
    steps = sorted({step for column in columns.values() for step in column})
    if len(steps) < 2:
        return None  # the first step stands in the figures by depth
    rows: list[list[Cell]] = [[int(step), *(column.get(step) for column in columns.values())] for step in steps]
    return drawn(
        f"training-{n}{name}", lambda figure: plot.plot_by_step(shown, figure), title=f"While training, {n} layers{of}",
        caption="At the steps that are recorded, from above: how far the step moves the logits, relative to their length; the "
        "gradient at x_0 over that at x_L; how alike the tokens are after the last sublayer.",
        table=Table(["step", *columns], rows, "While training"), height=7.4,
    )  # fmt: skip


def rates(found: Comparison, n: int, name: str = "", of: str = "") -> Figure:
    """The loss against the learning rate; `name` and `of` as in `learning`."""
    groups = [group for group in found.groups if group.num_layers == n]
    rows: list[list[Cell]] = [
        [group.wiring, "yes" if group.warm_up else "no", group.lr, group.loss(), listed(group.losses()), group.diverged]
        for group in groups
    ]
    return drawn(
        f"rates-{n}{name}", lambda figure: plot.plot_rates(found, n, figure.add_subplot()),
        title=f"Each wiring at each rate, {n} layers{of}",
        caption="The test loss after training: a dot for each seed, a line through the means. A cross is a rate at which a seed "
        "of some wiring diverged; the data have which.",
        table=Table(["wiring", "warm-up", "rate", "test loss", "by seed", "diverged"], rows, "Test loss, the mean of the seeds"),
        height=4.2,
    )  # fmt: skip


def listed(losses: Sequence[float]) -> str:
    """Losses by seed."""
    return ", ".join(format_number(loss, 4) for loss in losses)


def by_depth(name: str, chosen: Sequence[PlotGroup], *, after: bool, of: str = "") -> Figure | None:
    """Forward and backward on one axis of depth, at the first step or after training; None where nothing was recorded."""
    shown = _by_place(chosen, after)
    if not shown:
        return None
    panels = (*plot.FORWARD, *plot.BACKWARD)
    columns = {
        f"{label}: {NAMES[what]}": plot.mean_by_depth(group, what, after)
        for label, group, _ in shown
        for what, *_ in panels
    }
    places = [one.group.runs[0]["sites"] for one in chosen if one.group.runs[0]["sites"]]
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
    on = "text that was not learned from" if after else "sequences of the first batch"
    missing = [one.label for one in chosen if one.label not in {there.label for there in shown}]
    without = f" There are no numbers of {'; '.join(missing)}." if missing else ""
    return drawn(
        name, lambda figure: plot.plot_by_depth(shown, panels, figure, after=after),
        title=f"Forward and backward by depth, {when}{of}",
        caption=f"On {on}, from above: the size of the stream after each sublayer; how long each write is beside it; how alike "
        "the tokens are; the gradient of the loss at the stream, mean length of a token's; and of each sublayer's parameters."
        f"{without}",
        table=Table(["sublayer", "kind", *columns], rows, f"By depth, {when}"), height=10.5,
    )  # fmt: skip


def _by_place(chosen: Sequence[PlotGroup], after: bool) -> list[PlotGroup]:
    """Those of which something was recorded, the places of all named alike: wirings may have others at the same depth."""
    kept = []
    for one in chosen:
        first = len(one.group.runs[0]["sites"])
        runs = [
            run for run in one.group.runs
            if run["sites"] and len(run["sites"]) == first and (run.get("after") if after else run["recorded"]["steps"])
        ]  # fmt: skip
        if runs:
            kept.append((one, runs))
    longest: list[dict[str, Any]] = max((runs[0]["sites"] for _, runs in kept), key=len, default=[])

    def named(run: dict[str, Any]) -> dict[str, Any]:
        sites = [*run["sites"], *longest[len(run["sites"]) :]]
        return {**run, "sites": [{**site, "id": str(k)} for k, site in enumerate(sites)]}

    return [one._replace(group=replace(one.group, runs=tuple(map(named, runs)))) for one, runs in kept]


def memory(name: str, shown: Sequence[PlotGroup], of: str = "") -> Figure | None:
    """Of what the streams of trained models are made, beside one another with the same colours."""
    with_any = [(label, [run for run in group.runs if _has_map(run)]) for label, group, _ in shown]
    maps = [(label, runs[0]) for label, runs in with_any if runs]
    if not maps:
        return None
    most = max(len(run["after"]["map"]["sources"]) for _, run in maps)
    height = min(max(1.5 + 0.2 * most, 3.2), 8.5)

    def lines(wide: bool) -> int:
        """Of maps."""
        return -(-len(maps) // (ABREAST - (most > SMALL) if wide else 1))

    def draw(figure: Canvas) -> None:
        from matplotlib.colors import PowerNorm

        wide = figure.get_figwidth() > BESIDE
        abreast = -(-len(maps) // lines(wide))
        places = [*figure.subplots(lines(wide), abreast, squeeze=False).flat]
        for ax, (label, run) in zip(places, maps, strict=False):
            found = run["after"]["map"]
            sites = plot.recorded_sites(run)
            unique = [
                replace(site, id=name)
                for site, name in zip(sites, _told_apart([site.id for site in sites]), strict=True)
            ]
            rec = Recording(unique, {}, {"stream": (_told_apart(found["sources"]), found["shares"])})
            rec.plot.memory_map(ax=ax, norm=PowerNorm(0.5, 0.0, 1.0))
            mesh = next(one for one in ax.collections if one.colorbar is not None)
            mesh.colorbar.remove()  # one is for all
            if figure.get_figwidth() / abreast < CELL * len(found["shares"]):
                for text in [*ax.texts]:
                    text.remove()
            if not wide:  # no room for every name
                names = [label.get_text() for label in ax.get_yticklabels()]
                ax.set_yticks(ax.get_yticks()[:: 1 + (len(names) > 13)], labels=names[:: 1 + (len(names) > 13)])
                depths = [label.get_text() for label in ax.get_xticklabels()]
                ax.set_xticks(ax.get_xticks()[:: 1 + (len(depths) > 9)], labels=depths[:: 1 + (len(depths) > 9)])
            ax.set_title("", loc="left")
            ax.set_title(label, fontsize="medium")
        for ax in places[len(maps) :]:
            ax.remove()
        bar = figure.colorbar(
            mesh, ax=places[: len(maps)], label="share of the stream", aspect=30 * lines(wide), fraction=0.05
        )
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize="small")
        bar.ax.yaxis.label.set_fontsize("small")

    depth = max(len(run["after"]["map"]["shares"]) for _, run in maps)
    rows: list[list[Cell]] = []
    for label, run in maps:
        found = run["after"]["map"]
        for k, source in enumerate(found["sources"]):
            shares = [at[k] for at in found["shares"]]
            rows.append([label, source, *shares, *[None] * (depth - len(shares))])
    head = ["wiring", "source", *("x_0" if not k else f"depth {k}" for k in range(depth))]
    missing = [label for label, runs in with_any if not runs]
    without = f" There is none of {'; '.join(missing)}." if missing else ""
    seeds = {run["settings"]["seed"] for _, run in maps}
    seed = f" Seed {seeds.pop()}." if len(seeds) == 1 and any(len(runs) > 1 for _, runs in with_any) else ""
    return drawn(
        name, draw, title=f"Of what the stream is made, after training{of}",
        caption="Each row is a source, each column the stream at a depth; a column sums to one (colours by its root). What "
        f"a source wrote is followed through the norms after it, exactly.{seed}{without}",
        table=Table(head, rows, "Share of each source in the stream"),
        height=lambda wide: (height if wide else min(height, LOW)) * lines(wide),
    )  # fmt: skip


def _has_map(run: dict[str, Any]) -> bool:
    """With a number in it."""
    found = (run.get("after") or {}).get("map") or {"shares": []}
    return any(share and math.isfinite(share) for at in found["shares"] for share in at)


def _told_apart(names: Sequence[str]) -> list[str]:
    """Where sublayers have one name, the second has a number too."""
    times = [names[: k + 1].count(name) for k, name in enumerate(names)]
    return [name if count == 1 else f"{name}#{count}" for name, count in zip(names, times, strict=True)]


def ablation(name: str, chosen: Sequence[PlotGroup], of: str = "") -> list[Figure]:
    """What the loss rises by without each sublayer; a figure for each number of sublayers that the wirings have."""
    made: list[Figure] = []
    with_any = [
        one._replace(group=replace(one.group, runs=tuple(run for run in one.group.runs if run.get("ablation"))))
        for one in chosen
    ]
    lengths = dict.fromkeys(len(one.group.runs[0]["ablation"]) for one in with_any if one.group.runs)
    for length in lengths:
        shown = [one for one in with_any if one.group.runs and len(one.group.runs[0]["ablation"]) == length]
        made.append(_ablation(f"{name}-{length}", shown, of if len(lengths) == 1 else f"{of}, {length} sublayers"))
    return made


def _ablation(name: str, shown: Sequence[PlotGroup], of: str) -> Figure:
    firsts = [one.group.runs[0]["ablation"] for one in shown]
    rows: list[list[Cell]] = [
        [
            *(" / ".join(dict.fromkeys(first[k][what] for first in firsts)) for what in ("site", "kind")),
            *(sum(run["ablation"][k]["rise"] for run in group.runs) / len(group.runs) for _, group, _ in shown),
        ]
        for k in range(len(firsts[0]))
    ]

    def named(run: dict[str, Any]) -> dict[str, Any]:
        return {**run, "ablation": [{**one, "site": str(k)} for k, one in enumerate(run["ablation"])]}

    placed = [one._replace(group=replace(one.group, runs=tuple(map(named, one.group.runs)))) for one in shown]
    return drawn(
        name, lambda figure: plot.plot_ablation(placed, figure.add_subplot()), title=f"Without each sublayer{of}",
        caption="Each sublayer's write was left out in turn: by how much the loss rises, on text that was not learned from. Each "
        "wiring at its best setting.",
        table=Table(["without", "kind", *(one.label for one in shown)], rows, "Rise of the loss, nats a character"), height=3.6,
    )  # fmt: skip
