"""The figures of a model: by depth, of a recording and of ablations. Each has the numbers that it draws, all of them.

A figure for which nothing was recorded is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from addnorm.report.blocks import Cell, Figure, Table
from addnorm.report.figure import drawn
from addnorm.stream.ablate import Ablation
from addnorm.stream.record import axes
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import MemoryMap, RecordedSite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["Values", "ablation", "by_depth", "forward_and_backward", "made_of", "similarity", "writes"]

Values = Sequence[tuple[RecordedSite, float]]
STREAM = {"stream rms": ("out", "rms"), "stream max": ("out", "max")}
GRADIENTS = {"gradient at the stream": ("grad", "l2"), "gradient of the parameters": ("params", "grad_l2")}
WRITES = {"write / stream": ("write", "ratio"), "cosine with the stream": ("write", "cosine")}
SIMILARITY = {"similarity of tokens": ("out", "similarity")} | {
    f"σ of {name}": (name, "sigma") for name in ("norm_in", "norm_branch", "norm_out", "norm_final")
}
NARROW = 6.0  # inches: there is less room for words
FILLED, STRIPED = {"facecolor": axes.COLOURS[0]}, {"facecolor": axes.COLOURS[1], "hatch": "////"}
DOTTED = {"facecolor": axes.COLOURS[2], "hatch": "...."}
BARS = {"attention": FILLED, "feed-forward": STRIPED, "cross-attention": DOTTED}
OTHER_BARS = {"facecolor": axes.COLOURS[3], "hatch": "xxxx"}


def by_depth(columns: Mapping[str, Values], sites: Sequence[RecordedSite]) -> Table:
    """Numbers by site, in the order of depth; sites of which there is none are left out."""
    of = {name: {site.id: value for site, value in values} for name, values in columns.items() if values}
    rows: list[list[Cell]] = [
        [
            site.id,
            None if site.layer is None else site.layer + 1,
            site.kind,
            *(found.get(site.id) for found in of.values()),
        ]
        for site in sites
        if any(site.id in found for found in of.values())
    ]
    return Table(["sublayer", "layer", "kind", *of], rows, "By depth")


def forward_and_backward(rec: Recording, caption: str) -> Figure | None:
    """The stream, and below it the gradients, on one axis of depth."""
    forward = bool(rec.series("out", "rms"))
    backward = any(_columns(rec, GRADIENTS).values())
    if not (forward or backward):
        return None

    def draw(figure: Canvas) -> None:
        heights = [1.0] * forward + [1.6] * backward
        places: list[Axes] = [*figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]]
        if forward:
            rec.plot.stream(ax=places[0])
        if backward:
            rec.plot.gradients(ax=places[-1])
            _shorter_title(places[-1])
        limits = [ax.get_xlim() for ax in figure.axes]
        for ax in figure.axes:
            ax.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))

    what = " and ".join(["the stream"] * forward + ["the gradient of the loss"] * backward)
    return drawn(
        "depth", draw, title=f"{what[0].upper()}{what[1:]}, by depth", caption=caption,
        table=by_depth(_columns(rec, STREAM) | _columns(rec, GRADIENTS), rec.sites), height=2.9 * forward + 4.4 * backward,
    )  # fmt: skip


def writes(rec: Recording, caption: str) -> Figure | None:
    """What each sublayer adds, against the stream."""
    columns = _columns(rec, WRITES)
    if not any(columns.values()):
        return None
    return drawn(
        "writes", lambda figure: rec.plot.writes(ax=figure.add_subplot()), title="What each sublayer writes, against the stream",
        caption=caption, table=by_depth(columns, rec.sites), height=4.8,
    )  # fmt: skip


def similarity(rec: Recording, caption: str) -> Figure | None:
    """How alike the tokens are, and the denominators of the norms."""
    columns = _columns(rec, SIMILARITY)
    if not any(columns.values()):
        return None

    def draw(figure: Canvas) -> None:
        rec.plot.similarity(ax=figure.add_subplot())
        _shorter_title(figure.axes[-1])

    return drawn(
        "similarity", draw,
        title="How alike the tokens are, and what the norms divide by", caption=caption,
        table=by_depth(columns, rec.sites), height=4.8,
    )  # fmt: skip


def made_of(rec: Recording, stream: str, name: str, caption: str) -> Figure | None:
    """The memory map of a stream: source by depth."""
    found: MemoryMap | None = rec.memory_maps.get(stream)
    if found is None or not found[0] or not found[1]:
        return None
    sources, shares = found
    if not any(share and math.isfinite(share) for row in shares for share in row):
        return None  # every cell would be empty
    head = ["source", *("x_0" if not k else f"depth {k}" for k in range(len(shares)))]
    rows: list[list[Cell]] = [[source, *(row[k] for row in shares)] for k, source in enumerate(sources)]
    table = Table(head, rows, "Share of each source in the stream; a column sums to one")
    sites = {site.id: site for site in rec.sites}
    of = f"stream of the {stream}" if len(rec.memory_maps) > 1 else "stream"

    def draw(figure: Canvas) -> None:
        ax = rec.plot.memory_map(ax=figure.add_subplot(), stream=stream)
        rows = [int(place) for place in ax.get_yticks()]
        ax.set_yticks(rows, labels=[_writer(sources[place], sites.get(sources[place])) for place in rows])
        ax.set_ylabel("layer and sublayer that wrote it", fontsize="small")
        if figure.get_figwidth() < NARROW:
            columns = [*range(0, len(shares), -(-len(shares) // 6))]
            ax.set_xticks(columns, labels=["x₀" if not place else str(place) for place in columns])
            figure.axes[-1].set_ylabel("share of the stream")

    return drawn(
        name, draw,
        title=f"Of what the {of} is made, by depth", caption=caption, table=table,
        height=min(max(1.5 + 0.27 * len(sources), 3.2), 8.5),
    )  # fmt: skip


def ablation(done: Sequence[Ablation], caption: str) -> Figure | None:
    """What the model loses without each sublayer: its output, and its loss where it has one."""
    if not done:
        return None
    loss = all(one.loss_change is not None for one in done)
    sites = [RecordedSite(one.site.id, one.site.path, one.site.kind, one.site.layer, one.site.stream) for one in done]
    below = [one.loss_change or 0.0 for one in done] if loss else [one.kl for one in done]

    def draw(figure: Canvas) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True)
        depths, columns = axes.Depths(sites), 2 if figure.get_figwidth() < NARROW else 5
        _bars(upper, depths, [one.output_change for one in done], "‖change‖ / ‖output‖", legend=columns)
        _bars(lower, depths, below, "change of the loss" if loss else "KL divergence, nats")
        axes.x_axis(lower, depths)
        upper.tick_params(which="both", labelbottom=False)

    rows: list[list[Cell]] = []
    for one in done:
        rows.append([one.site.id, one.site.layer + 1, one.site.kind, one.output_change, one.kl])
        rows[-1] += [one.loss, one.loss_change] if loss else []
    head = ["without", "layer", "kind", "change of the output", "KL divergence"] + ["loss", "change of the loss"] * loss
    title = "The model without each of its sublayers"
    return drawn("ablation", draw, title=title, caption=caption, table=Table(head, rows, title), height=4.4)


def _bars(ax: Axes, depths: axes.Depths, values: Sequence[float], ylabel: str, *, legend: int = 0) -> None:
    """A bar for each sublayer; kinds differ by colour and by stripes, and what is no number is a cross.

    Args:
        ax: where.
        depths: of the sublayers.
        values: one for each.
        ylabel: what they are.
        legend: how many columns it has; 0 is none.
    """
    from matplotlib.patches import Patch

    kinds = dict.fromkeys(site.kind for site in depths.sites)
    paper = ax.get_facecolor()
    styles: dict[str, dict[str, Any]] = {
        kind: {**BARS.get(kind, OTHER_BARS), "edgecolor": paper, "linewidth": 0.0} for kind in kinds
    }
    for kind, style in styles.items():
        own = [
            (depths.x[s.id], v)
            for s, v in zip(depths.sites, values, strict=True)
            if s.kind == kind and math.isfinite(v)
        ]
        ax.bar([x for x, _ in own], [y for _, y in own], width=0.72, **style)
    lost = [depths.x[site.id] for site, value in zip(depths.sites, values, strict=True) if not math.isfinite(value)]
    crosses = ax.plot(
        lost, [0.9] * len(lost), "x", color=axes.ALARM, markersize=6.5, markeredgewidth=1.8, transform=ax.get_xaxis_transform(),
        label="NaN or infinite",
    )  # fmt: skip
    ax.set_ylabel(ylabel, fontsize="small")
    ax.tick_params(labelsize="small")
    ax.spines[["top", "right"]].set_visible(False)
    ax.axhline(0, color=axes.GREY, linewidth=0.8)
    ax.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    ax.set_axisbelow(True)
    if legend:
        handles = [Patch(label=axes.NAMES.get(kind, kind), **style) for kind, style in styles.items()]
        ax.legend(
            handles=[*handles, *(crosses if lost else [])], loc="lower left", bbox_to_anchor=(0, 1.0), ncols=legend,
            frameon=False, fontsize="small", borderaxespad=0.15, handlelength=1.6, columnspacing=1.4,
        )  # fmt: skip


def _writer(source: str, site: RecordedSite | None) -> str:
    """A source in the few letters that a map has room for: its layer and kind."""
    if source == "x_0" or (site is not None and site.kind == "start"):
        return "x₀"
    if site is not None and site.kind != "other" and site.layer is not None:
        return f"{site.layer + 1} {site.kind}"
    return source if len(source) <= 22 else f"…{source[-21:]}"


def _columns(rec: Recording, statistics: Mapping[str, tuple[str, str]]) -> dict[str, Values]:
    """Of the step that is drawn: the last that has any of those that are drawn together."""
    step = rec.last_step(*statistics.values())
    return {name: rec.series(*one, step) for name, one in statistics.items()}


def _shorter_title(ax: Axes) -> None:
    """Without the model and the step, which the page tells."""
    from matplotlib.text import Text

    title = ax.get_title(loc="left")
    for one in ax.findobj(Text):
        if title and isinstance(one, Text) and one.get_text() == title:
            one.set_text(title.split(",")[0])
