"""Charts of a comparison: trained models (learning curves, rates, by depth, memory, ablation), and untrained stacks.

The colour of a series stands for a wiring and its dash for warm-up. Each chart has a table of all its numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from addnorm._util.blocks import Cell, Table
from addnorm._util.charts import (
    NUM_LOOKS,
    Axis,
    Chart,
    Map,
    Panel,
    Points,
    Series,
    choose_looks,
    list_places,
    number_axis,
)
from addnorm._util.numbers import format_count, format_number
from addnorm.lab.comparison import Comparison
from addnorm.lab.results import Arm, Group
from addnorm.lab.streams import Numbers
from addnorm.lab.verdict import gradient_ratio

Values = Iterable[tuple[float, float | None]]  # x and y of points; y is None where a run has no number
WINDOW = 10  # steps over which a learning curve is smoothed
ROWS = 100  # approximate maximum of rows in a learning curve's table
EXPLODING = ("no_norm",)  # wirings that may leave the axes' limits
DRAWN = 7  # series in a drawing of untrained stacks; the table has all
BY_DEPTH = {
    "stream": "stream, rms", "ratio": "‖write‖ / ‖stream‖", "similarity": "cos(token, token)",
    "gradient": "‖∂loss / ∂stream‖", "parameters": "‖∂loss / ∂parameters‖",
}  # fmt: skip
"""Labels of the statistics by depth."""


class Shown(NamedTuple):
    """Runs of one setting, one per seed, with the label and the style of their series in the charts."""

    label: str
    group: Group
    colour: int
    dash: int | None = None

    def series(self, points: Points, kinds: Sequence[str] = ()) -> Series:
        """Return a series with the style of these runs."""
        return Series(self.label, points, kinds, colour=self.colour, dash=self.dash)

    def mean(
        self,
        points: Callable[[Numbers], Values],
        sites: Sequence[Numbers] | None,
        first: int = 0,
    ) -> Series:
        """Return the series of the mean over the runs.

        Args:
            points: function that returns the points of one run; y is None where the run has no number.
            sites: the sublayers from x = `first` on, whose kinds select the markers; None draws no markers.
            first: see `sites`.
        """
        numbers: dict[float, list[float]] = {}
        for run in self.group.runs:
            for x, number in points(run):
                if number is not None:
                    numbers.setdefault(float(x), []).append(number)
        means = [(x, statistics.fmean(values)) for x, values in sorted(numbers.items())]
        kinds = {float(k): site["kind"] for k, site in enumerate(sites or (), first)}
        return self.series(means, [] if sites is None else [kinds.get(x, "") for x, _ in means])

    def where(self, condition: Callable[[Numbers], Any]) -> Shown:
        """Return a copy with only the runs for which `condition` is true. Label and style stay the same."""
        return self._replace(group=replace(self.group, runs=tuple(filter(condition, self.group.runs))))


def _looks(comparison: Comparison, n: int) -> list[tuple[int, Arm]]:
    """Return the arms of n layers, each with the index of its wiring's colour (`choose_looks`)."""
    arms = comparison.by_depth.get(n, ())
    return [*zip(choose_looks([arm.wiring for arm in arms]), arms, strict=True)]


def groups_by_warm_up(comparison: Comparison, n: int) -> list[Shown]:
    """Return for each wiring of n layers its best setting without and its best setting with warm-up."""
    shown = []
    for number, arm in _looks(comparison, n):
        groups = [group for warm_up in (False, True) if (group := arm.best_with(warm_up)) is not None]
        if len(groups) == 1:
            shown.append(Shown(arm.wiring, groups[0], number))
        else:
            shown += [_with_warm_up(arm, group, number) for group in groups]
    return shown


def _with_warm_up(arm: Arm, group: Group, number: int) -> Shown:
    """Return the runs of a setting, with a label and a dash that tell whether it has warm-up."""
    label = f"{arm.wiring}, {'warm-up' if group.warm_up else 'no warm-up'}"
    return Shown(label, group, number, int(group.warm_up > 0) + 2 * (number // NUM_LOOKS))


def best_groups(comparison: Comparison, n: int) -> list[Shown]:
    """Return for each wiring of n layers its best setting."""
    return [Shown(arm.wiring, arm.best, k) for k, arm in _looks(comparison, n)]


def learning_chart(comparison: Comparison, n: int, title_suffix: str = "") -> Chart:
    """Return a chart of the training losses of models with n layers. `title_suffix` names the wirings."""
    series = [line.mean(_smoothed_losses, None) for line in groups_by_warm_up(comparison, n)]
    entropy, limits = comparison.text["entropy"], _loss_limits(series, comparison)
    panel = Panel(
        "training loss, nats a character", series, limits, lines={"character frequencies": entropy}, height=300
    )
    steps = list_places([panel])
    stride = -(-len(steps) // ROWS)
    kept = [step for step in steps if step in (steps[0], steps[-1]) or step % stride == 0]
    rates, seeds = comparison.protocol.rates, comparison.protocol.seeds
    rate = f"at the learning rate {rates[0]:g}" if len(rates) == 1 else f"at its best of {len(rates)} learning rates"
    seed = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of {len(seeds)} seeds"
    chart = Chart(
        f"Learning, {format_count(n, 'layer')}{title_suffix}",
        f"Loss of each batch before its step, mean of {WINDOW} steps, in nats a character. Each curve is a wiring {rate}, "
        f"{seed}. A model that knows only how often each character occurs has {format_number(entropy)} (dotted, where it is in "
        "range).",
        [panel], Axis("step"),
    )  # fmt: skip
    every = f", every {stride} steps" if stride > 1 else ""
    return chart.with_table(
        ["step"], {step: [int(step)] for step in kept}, f"Training loss, mean of {WINDOW} steps{every}"
    )


def _loss_limits(series: Sequence[Series], comparison: Comparison) -> tuple[float, float]:
    """Return the range of the losses, without those far above the loss of a uniform guess."""
    losses = [y for line in series for _, y in line.points if math.isfinite(y)] or [0.0]
    return min(losses) - 0.1, min(max(losses), comparison.text["uniform"] + 0.6) + 0.1


def _smoothed_losses(run: Numbers) -> Iterable[tuple[float, float]]:
    """Yield each step with the mean loss of the `WINDOW` steps up to it."""
    losses = run["losses"]
    return ((k, statistics.fmean(losses[max(0, k - WINDOW) : k])) for k in range(1, len(losses) + 1))


def training_chart(comparison: Comparison, n: int, title_suffix: str) -> Chart | None:
    """Return a chart of models with n layers over the training steps, or None with fewer than two recorded steps.

    It shows the logits' change by a step, the gradient at x_0 divided by that at x_L, and the tokens' similarity.
    """
    shown = groups_by_warm_up(comparison, n)

    def by_step(label: str, value: Callable[[Numbers, int], float | None], log: bool | None = None) -> Panel:
        def points(run: Numbers) -> Values:
            return ((step, value(run["recorded"], k)) for k, step in enumerate(run["recorded"]["steps"]))

        series = [line.mean(points, ()) for line in shown]
        return Panel(label, [line for line in series if line.points], log=log)

    panels = [
        by_step("relative change of the logits in a step", lambda recorded, k: recorded["logit_change"][k]),
        by_step("gradient at x_0 over x_L", lambda recorded, k: gradient_ratio(recorded["gradient"][k])),
        by_step("cos(token, token) at x_L", lambda recorded, k: _last(recorded["similarity"][k]), log=False),
    ]
    steps = list_places(panels)
    if len(steps) < 2:
        return None  # the charts by depth have the first step
    chart = Chart(
        f"During training, {format_count(n, 'layer')}{title_suffix}",
        "At the recorded steps, from top to bottom: the change of the logits by the step, relative to their norm; the "
        "gradient at x_0 divided by the gradient at x_L; the mean cosine of two tokens after the last sublayer.",
        panels, Axis("step"),
    )  # fmt: skip
    return chart.with_table(["step"], {step: [int(step)] for step in steps}, "During training")


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def rate_chart(comparison: Comparison, n: int, title_suffix: str) -> Chart:
    """Return a chart of the test loss of models with n layers over the learning rate."""
    means, seeds, at_n = [], [], [group for group in comparison.groups if group.num_layers == n]
    for number, arm in _looks(comparison, n):
        for warm_up in sorted({group.warm_up for group in arm.groups}):
            groups = sorted((g for g in arm.groups if g.warm_up == warm_up), key=lambda g: g.lr)
            line = _with_warm_up(arm, groups[0], number)
            means.append(line.series([(group.lr, group.loss()) for group in groups], [""] * len(groups)))
            finite = [(g.lr, loss) for g in groups for loss in g.losses() if math.isfinite(loss)]
            seeds.append(line.series(finite)._replace(form="dots"))
    ticks = {x: f"{x:g}" for x in sorted({group.lr for group in at_n})}
    return Chart(
        f"Test loss by learning rate, {format_count(n, 'layer')}{title_suffix}",
        "Test loss after training: a dot for each seed, and a line through the means. A cross marks a rate at which a seed "
        "diverged; the table names the wiring.",
        [Panel("test loss, nats a character", [*means, *seeds], _loss_limits([*means, *seeds], comparison), height=300)],
        Axis("learning rate", True, ticks),
        table=comparison.tabulate_settings(at_n),
    )  # fmt: skip


# By depth.


def _name_sites(sites: Sequence[Sequence[Numbers]], keys: Sequence[str]) -> dict[float, list[Cell]]:
    """Return for each depth the values of `keys` of the sublayer there: models of one depth have the same sublayers."""
    return {float(k): [site[key] for key in keys] for some in sites for k, site in enumerate(some)}


def depth_chart(shown: Sequence[Shown], title_suffix: str = "", *, after: bool) -> Chart | None:
    """Return a chart of forward and backward statistics by depth, at the first step or `after` training; None without numbers."""

    def with_numbers(line: Shown) -> Shown:
        """Return the runs with numbers, at as many sites as the first run has."""
        count = len(line.group.runs[0]["sites"])
        return line.where(
            lambda run: count == len(run["sites"]) > 0 and (run.get("after") if after else run["recorded"]["steps"])
        )

    recorded = [line for line in map(with_numbers, shown) if line.group.runs]
    if not recorded:
        return None

    def series(name: str) -> list[Series]:
        def points(run: Numbers) -> Values:
            return enumerate(run["after"][name] if after else run["recorded"][name][0])

        lines = [line.mean(points, line.group.runs[0]["sites"]) for line in recorded]
        return [line for line in lines if line.points]

    names = _name_sites([line.group.runs[0]["sites"] for line in shown], ("id", "kind"))
    panels = [
        Panel(label, series(name), least=(0.0, 1.0) if name == "similarity" else None, height=170)
        for name, label in BY_DEPTH.items()
    ]
    when, on = ("after", "held-out text") if after else ("before", "sequences of the first batch")
    missing = [line.label for line in shown if line.label not in [other.label for other in recorded]]
    without = f" No numbers exist for {'; '.join(missing)}." if missing else ""
    chart = Chart(
        f"Forward and backward by depth, {when} training{title_suffix}",
        f"On {on}, from top to bottom: the root mean square of the stream after each sublayer; the norm of each write "
        "relative to the stream; the mean cosine of two tokens; the mean norm of a token's gradient at the stream; the norm of "
        f"the gradient of each sublayer's parameters.{without}",
        [panel for panel in panels if panel.series], number_axis(names),
    )  # fmt: skip
    return chart.with_table(["sublayer", "kind"], names, f"By depth, {when} training")


def memory_chart(shown: Sequence[Shown], title_suffix: str) -> Chart | None:
    """Return heat maps of each source's share of the stream by depth, for trained models; None if there are none."""
    with_any = [(line.label, [run for run in line.group.runs if _has_map(run)]) for line in shown]
    maps = [(label, runs[0]["after"]["map"]) for label, runs in with_any if runs]
    if not maps:
        return None
    depth = max(len(memory["shares"]) for _, memory in maps)
    rows: list[list[Cell]] = [
        [label, source, *(at[k] for at in memory["shares"])]
        for label, memory in maps for k, source in enumerate(memory["sources"])
    ]  # fmt: skip
    head = ["wiring", "source", *("x_0" if not k else f"depth {k}" for k in range(depth))]
    missing = [label for label, runs in with_any if not runs]
    without = f" No map exists for {'; '.join(missing)}." if missing else ""
    seeds = {runs[0]["settings"]["seed"] for _, runs in with_any if runs}
    seed = f" Seed {seeds.pop()}." if len(seeds) == 1 and any(len(runs) > 1 for _, runs in with_any) else ""
    return Chart(
        f"Sources of the stream, after training{title_suffix}",
        "Each row is a source, each column the stream at a depth; a column sums to one. The opacity is the square root of "
        f"the share; negative shares are orange. Each source is carried exactly through the norms after it.{seed}{without}",
        [Map(label, memory["sources"], memory["shares"]) for label, memory in maps], number_axis(range(depth)), 3,
        Table(head, rows, "Share of each source in the stream"),
    )  # fmt: skip


def _has_map(run: Numbers) -> bool:
    """Return whether a run has a memory map with a number that is finite and not 0."""
    memory = (run.get("after") or {}).get("map") or {"shares": []}
    return any(share and math.isfinite(share) for at in memory["shares"] for share in at)


def ablation_chart(shown: Sequence[Shown], title_suffix: str) -> Chart | None:
    """Return a chart of the rise of the loss without each sublayer, or None if nothing was ablated."""
    ablated = [one for line in shown if (one := line.where(lambda run: run.get("ablation"))).group.runs]
    if not ablated:
        return None
    sites = [line.group.runs[0]["ablation"] for line in ablated]
    series = [
        line.mean(lambda run: enumerate((one["rise"] for one in run["ablation"]), 1), some, 1)
        for line, some in zip(ablated, sites, strict=True)
    ]
    names = {k + 1: cells for k, cells in _name_sites(sites, ("site", "kind")).items()}
    chart = Chart(
        f"Without each sublayer{title_suffix}",
        "The write of each sublayer was removed in turn: rise of the loss on held-out text, each wiring at its best setting "
        "of those that were run.",
        [Panel("rise of the loss, nats", series)], number_axis(names),
    )  # fmt: skip
    return chart.with_table(["without", "kind"], names, "Rise of the loss, nats a character")


# Untrained stacks.


def init_chart(title: str, caption: str, numbers: Mapping[str, Mapping[str, Points]], x: Axis) -> Chart:
    """Return a chart of untrained stacks. Its drawing has the first `DRAWN` wirings, its table has all.

    Args:
        title, caption: see `Chart`.
        numbers: the points of each wiring, for each quantity.
        x: the x axis, logarithmic for numbers of whole stacks and linear for numbers by depth.
    """
    panels = []
    for label, points in numbers.items():
        looks = zip(choose_looks([*points]), points.items(), strict=True)
        series = [Series(name, some, [""] * (x.log * len(some)), colour=k) for k, (name, some) in looks]
        panels.append(Panel(label, series, log=True if x.log else False if "cos" in label else None))
    names: dict[float, list[Cell]] = {place: [int(place) if x.log else f"{place:g}"] for place in list_places(panels)}
    chart = Chart(title, caption, panels, x).with_table([x.label], names, title)
    more = [series.label for series in panels[0].series[DRAWN:]]
    caption += f" Only in the table: {', '.join(more)}." if more else ""
    drawn = [
        panel._replace(series=panel.series[:DRAWN], limits=_limits(panel), log=panel.scale.log) for panel in panels
    ]
    return replace(chart, caption=caption, panels=drawn)


def _limits(panel: Panel) -> tuple[float, float] | None:
    """Return the range of a logarithmic axis for the drawn wirings, without those in `EXPLODING`, or None for a linear axis."""
    numbers = [
        y for series in panel.series[:DRAWN] if series.label not in EXPLODING for _, y in series.points if 0 < y < math.inf
    ]  # fmt: skip
    return (min(numbers) / 1.5, max(numbers) * 3) if panel.scale.log and numbers else None
