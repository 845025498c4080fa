"""The part of a report about stacks before training: stream and gradient by depth, the first step, and what papers say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from addnorm._util.numbers import format_number
from addnorm.lab import plot
from addnorm.lab.comparison import Comparison
from addnorm.lab.plot import Curve, Points
from addnorm.lab.published import PublishedCheck
from addnorm.report.blocks import Block, Cell, Figure, Section, Table
from addnorm.report.figure import drawn
from addnorm.stream.record import axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["sections"]

Row = dict[str, Any]
Panel = tuple[str, Callable[[Row], Any]]  # what stands on the y axis, and the number of a row

EXPLODING = ("no_norm",)  # leaves its drawings at the top, or at the bottom
MOST = 8  # series in a drawing; all are in its table
LEAD = (
    "The toy transformer for which the papers prove what they say: attention that takes the mean of all tokens, a feed-forward "
    "block as wide as the stream, weights N(0, 1/d), a random target for each token. The weights of DeepNorm are drawn by its "
    "own rule. Means over the seeds, geometric ones of norms and ratios. What lies far above all others, as no_norm does in deep "
    "stacks, leaves its drawing at the top; its numbers are in the table. A cross is infinite."
)


def sections(found: Comparison) -> list[Section]:
    """Figures at init, and the published figures beside what was measured."""
    if not found.at_init:
        return []
    names = _shown(found)
    deepest = max(row["num_layers"] for row in found.at_init)
    drawings: list[Block] = [
        _against_depth(
            found, names, "init-gradients", "Gradients against depth",
            "How the gradient of the last feed-forward block, and that at x_0, depend on how deep the stack is. What papers say "
            "of it stands below, beside the slopes that were measured.",
            [("last layer's ‖∂loss / ∂W₂‖", lambda row: row["weight_gradient"][-1]),
             ("‖∂loss / ∂x₀‖", lambda row: row["gradient"][0])],
        ),
        _against_depth(
            found, names, "init-step", "How far the first step moves the logits",
            "Relative change of the logits by one step of SGD (rate 0.1) and of Adam (rate 1e-3), without mixing of tokens.",
            [("after SGD", lambda row: row["step_sgd"]), ("after Adam", lambda row: row["step_adam"])],
        ),
        _by_layer(
            found, names, deepest, "init-depth", f"Forward and backward by depth, {deepest} layers",
            "From above: the mean square of the stream's elements, how alike two tokens are, and the gradient at the stream.",
            [("E‖x‖² / d", lambda row: row["variance"]), ("cos(token, token)", lambda row: row["likeness"]),
             ("‖∂loss / ∂x‖", lambda row: row["gradient"])],
        ),
    ]  # fmt: skip
    return [
        Section("Before training", LEAD, drawings),
        Section("Published figures", "What papers say of wirings before training, each with the band that it must lie in.",
                _checked(found.checks)),
    ]  # fmt: skip


def _shown(found: Comparison) -> list[str]:
    """What is compared first, then the others."""
    there = dict.fromkeys(row["wiring"] for row in found.at_init)
    return [
        *(name for name in found.compared if name in there),
        *(name for name in there if name not in found.compared),
    ]


def _against_depth(
    found: Comparison, names: Sequence[str], name: str, title: str, caption: str, panels: Sequence[Panel]
) -> Figure:
    """Numbers of whole stacks over the number of layers."""
    rows = {(row["wiring"], row["num_layers"]): row for row in found.at_init}
    depths = sorted({n for _, n in rows})

    def draw(figure: Canvas) -> None:
        places = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for place, (ax, (ylabel, value)) in enumerate(zip(places, panels, strict=True)):
            curves = [
                Curve(wiring, [(n, value(rows[wiring, n])) for n in depths if (wiring, n) in rows])
                for wiring in names[:MOST]
            ]
            plot.plot_lines(ax, curves, "layers" if ax is places[-1] else "", ylabel, log_x=True, log_y=True)
            _within(ax, curves)
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
    caption += _left_out(names)
    table = Table(["wiring", "layers", *(ylabel for ylabel, _ in panels)], body, title)
    return drawn(name, draw, title=title, caption=caption, table=table, height=6.6)


def _by_layer(
    found: Comparison, names: Sequence[str], n: int, name: str, title: str, caption: str, panels: Sequence[Panel]
) -> Figure:
    """Numbers at every depth of stacks of n layers."""
    rows = {row["wiring"]: row for row in found.at_init if row["num_layers"] == n}
    there = [wiring for wiring in names if wiring in rows]

    def points(values: Sequence[float]) -> Points:
        return [(k / 2, value) for k, value in enumerate(values)]

    def draw(figure: Canvas) -> None:
        places = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for place, (ax, (ylabel, value)) in enumerate(zip(places, panels, strict=True)):
            curves = [Curve(wiring, points(value(rows[wiring]))) for wiring in there[:MOST]]
            finite = [y for curve in curves for _, y in curve.points if math.isfinite(y) and y > 0]
            log = bool(finite) and max(finite) > axes.LOG_RATIO * min(finite) and "cos" not in ylabel
            plot.plot_lines(ax, curves, "layer" if ax is places[-1] else "", ylabel, log_y=log, marked=False)
            if log:
                _within(ax, curves)
            if place:
                ax.get_legend().remove()

    body: list[list[Cell]] = [
        [f"{k / 2:g}", *(value(rows[wiring])[k] for wiring in there for _, value in panels)] for k in range(2 * n + 1)
    ]
    caption += _left_out(there)
    head = ["layer", *(f"{wiring}: {ylabel}" for wiring in there for ylabel, _ in panels)]
    return drawn(name, draw, title=title, caption=caption, table=Table(head, body, title), height=8.6)


def _left_out(names: Sequence[str]) -> str:
    """What is in the table alone."""
    more = names[MOST:]
    return f" Not drawn, and in the data: {', '.join(more)}." if more else ""


def _within(ax: Axes, curves: Sequence[Curve]) -> None:
    """Room on a logarithmic axis for all but what explodes: without norms that would leave the others one line."""
    finite = [
        y for curve in curves if curve.label not in EXPLODING for _, y in curve.points if math.isfinite(y) and y > 0
    ]
    if finite:
        ax.set_ylim(min(finite) / 1.5, max(finite) * 3)


def _checked(judged: Sequence[PublishedCheck]) -> list[Block]:
    """Each published figure beside what was measured; and every number."""
    rows: list[list[Cell]] = []
    every: list[list[Cell]] = []
    for check in judged:
        values = [*check.measured.values()]
        found = "" if not values else format_number(min(values), 3)
        if len(values) > 1:
            found = f"{found} to {format_number(max(values), 3)}"
        rows.append([check.name, check.verdict, found, check.criterion])
        every += [[check.name, what, value] for what, value in check.measured.items()]
    wrong = [k for k, check in enumerate(judged) if check.holds is False]
    sources: list[list[Cell]] = [[check.name, check.source, check.why] for check in judged]
    return [
        Table(["what is said", "verdict", "measured", "criterion"], rows, "", False, wrong),
        Table(["what is said", "of", "measured"], every, "Every number", True),
        Table(
            ["what is said", "by", "why the band is so wide"], sources, "Sources, and why each band is so wide", True
        ),
    ]
