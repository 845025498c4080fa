"""The figures of models that were trained: learning curves, rates, by depth, memory, ablation. Each has its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from addnorm.lab import plot
from addnorm.lab.comparison import Comparison
from addnorm.lab.plot import Chosen
from addnorm.report.blocks import Cell, Figure, Table
from addnorm.report.figure import drawn
from addnorm.stream.record.recording import Recording

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["ablation", "by_depth", "learning", "memory", "rates", "training"]

BESIDE = 6.0  # inches from which drawings stand side by side
EVERY = 10  # steps between two rows of a learning curve's table
NAMES = {
    "stream": "stream, rms", "ratio": "write / stream", "similarity": "similarity of tokens",
    "gradient": "gradient at the stream", "parameters": "gradient of the parameters",
}  # fmt: skip


def learning(found: Comparison, n: int) -> Figure:
    """The loss while training."""
    curves = {one.label: dict(plot.learning(one.group)) for one in plot.chosen(found, n)}
    steps = sorted({step for curve in curves.values() for step in curve if step == 1 or step % EVERY == 0})
    rows: list[list[Cell]] = [[int(step), *(curve.get(step) for curve in curves.values())] for step in steps]
    return drawn(
        f"learning-{n}", lambda figure: plot.curves(found, n, figure.add_subplot()), title=f"Learning, {n} layers",
        caption=f"The loss of each batch before it was learned from, as the mean of {plot.WINDOW} steps. Each curve is a wiring "
        "at its best learning rate. The dotted line is what knowing only how often each character occurs gives.",
        table=Table(["step", *curves], rows, f"Training loss, the mean of {plot.WINDOW} steps"), height=4.2,
    )  # fmt: skip


def training(found: Comparison, n: int) -> Figure | None:
    """What training does to the step, the gradient and the tokens."""
    shown = [one for one in plot.chosen(found, n) if any(run["recorded"]["steps"] for run in one.group.runs)]
    if not shown:
        return None
    columns = {
        f"{one.label}: {ylabel}": dict(plot.while_training(one.group, name))
        for one in shown for name, (ylabel, _) in plot.WHILE.items()
    }  # fmt: skip
    steps = sorted({step for column in columns.values() for step in column})
    rows: list[list[Cell]] = [[int(step), *(column.get(step) for column in columns.values())] for step in steps]
    return drawn(
        f"training-{n}", lambda figure: plot.over_steps(shown, figure), title=f"While training, {n} layers",
        caption="At the steps that are recorded, from above: how far the step moves the logits, relative to their length; the "
        "gradient at x_0 over that at x_L; how alike the tokens are after the last sublayer.",
        table=Table(["step", *columns], rows, "While training"), height=7.4,
    )  # fmt: skip


def rates(found: Comparison, n: int) -> Figure:
    """The loss against the learning rate."""
    groups = [group for group in found.groups if group.n_layers == n]
    rows: list[list[Cell]] = [
        [group.wiring, "yes" if group.warm_up else "no", group.lr, group.loss(), group.diverged, len(group.runs)]
        for group in groups
    ]
    return drawn(
        f"rates-{n}", lambda figure: plot.rates(found, n, figure.add_subplot()), title=f"Each wiring at each rate, {n} layers",
        caption="The test loss after training: a dot for each seed, a line through the means. A cross is a rate at which a seed "
        "diverged.",
        table=Table(["wiring", "warm-up", "rate", "test loss", "diverged", "seeds"], rows, "Test loss, the mean of the seeds"),
        height=4.2,
    )  # fmt: skip


def by_depth(name: str, shown: Sequence[Chosen], *, after: bool) -> Figure:
    """Forward and backward on one axis of depth, at the first step or after training."""
    panels = (*plot.FORWARD, *plot.BACKWARD)
    sites = next(plot.sites_of(group.runs[0]) for _, group, _ in shown if group.runs[0]["sites"])
    columns = {
        f"{label}: {NAMES[what]}": plot.mean_by_depth(group, what, after)
        for label, group, _ in shown
        for what, *_ in panels
    }
    rows: list[list[Cell]] = [
        [site.id, site.kind, *(column[k] if k < len(column) else None for column in columns.values())]
        for k, site in enumerate(sites)
    ]
    when = "after training" if after else "before training"
    on = "text that was not learned from" if after else "sequences of the first batch"
    return drawn(
        name, lambda figure: plot.by_depth(shown, panels, figure, after=after),
        title=f"Forward and backward by depth, {when}",
        caption=f"On {on}, from above: the size of the stream after each sublayer; how long each write is beside it; how alike "
        "the tokens are; the gradient of the loss at the stream, mean length of a token's; and of each sublayer's parameters.",
        table=Table(["sublayer", "kind", *columns], rows, f"By depth, {when}"), height=10.5,
    )  # fmt: skip


def memory(name: str, shown: Sequence[Chosen]) -> Figure | None:
    """Of what the streams of trained models are made, beside one another with the same colours."""
    maps = [(label, group.runs[0]) for label, group, _ in shown if (group.runs[0].get("after") or {}).get("map")]
    if not maps:
        return None

    def draw(figure: Canvas) -> None:
        from matplotlib.colors import PowerNorm

        beside = figure.get_figwidth() > BESIDE
        places = figure.subplots(*((1, len(maps)) if beside else (len(maps), 1)), squeeze=False).flat
        for ax, (label, run) in zip(places, maps, strict=True):
            found = run["after"]["map"]
            rec = Recording(plot.sites_of(run), {}, {"stream": (found["sources"], found["shares"])})
            rec.plot.memory_map(ax=ax, norm=PowerNorm(0.5, 0.0, 1.0))
            if not beside:  # no room for every name
                names = [label.get_text() for label in ax.get_yticklabels()]
                ax.set_yticks(ax.get_yticks()[:: 1 + (len(names) > 13)], labels=names[:: 1 + (len(names) > 13)])
            ax.set_title("", loc="left")
            ax.set_title(label, fontsize="medium")

    first = maps[0][1]["after"]["map"]
    sources = [*dict.fromkeys(source for _, run in maps for source in run["after"]["map"]["sources"])]
    depth = len(first["shares"])
    rows: list[list[Cell]] = []
    for label, run in maps:
        found = run["after"]["map"]
        for k, source in enumerate(found["sources"]):
            rows.append([label, source, *(at[k] for at in found["shares"])])
    head = ["wiring", "source", *("x_0" if not k else f"depth {k}" for k in range(depth))]
    return drawn(
        name, draw, title="Of what the stream is made, after training",
        caption="Each row is a source, each column the stream at a depth; a column sums to one (colours by its root). What "
        "a source wrote is followed through the norms after it, exactly.",
        table=Table(head, rows, "Share of each source in the stream"), height=min(max(1.5 + 0.2 * len(sources), 3.2), 8.5),
    )  # fmt: skip


def ablation(name: str, shown: Sequence[Chosen]) -> Figure:
    """What the loss rises by without each sublayer."""
    with_any = {label: [run for run in group.runs if run.get("ablation")] for label, group, _ in shown}
    with_any = {label: runs for label, runs in with_any.items() if runs}
    first = next(iter(with_any.values()))[0]["ablation"]
    rows: list[list[Cell]] = [
        [
            one["site"],
            one["kind"],
            *(sum(run["ablation"][k]["rise"] for run in runs) / len(runs) for runs in with_any.values()),
        ]
        for k, one in enumerate(first)
    ]
    return drawn(
        name, lambda figure: plot.ablation(shown, figure.add_subplot()), title="Without each sublayer",
        caption="Each sublayer's write was left out in turn: by how much the loss rises, on text that was not learned from. Each "
        "wiring at its best setting.",
        table=Table(["without", "kind", *with_any], rows, "Rise of the loss, nats a character"), height=3.6,
    )  # fmt: skip
