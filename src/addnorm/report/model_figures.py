"""Figures of a model report: statistics by depth of a recording, memory maps, ablations.

Each figure has a table of all its numbers. A function returns None if its numbers were not recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from addnorm.report.figure import draw_figure
from addnorm.report.page import Cell, Figure, Table
from addnorm.stream.ablate import Ablation
from addnorm.stream.record import axes
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import MemoryMap, RecordedSite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["ablation_figure", "depth_figure", "memory_figure", "similarity_figure", "write_figure"]

Values = Sequence[tuple[RecordedSite, float]]
STREAM = {"stream rms": ("out", "rms"), "stream max": ("out", "max")}
GRADIENTS = {"gradient at the stream": ("grad", "l2"), "gradient of the parameters": ("params", "grad_l2")}
WRITES = {"write / stream": ("write", "ratio"), "cosine with the stream": ("write", "cosine")}
SIMILARITY = {"similarity of tokens": ("out", "similarity")} | {
    f"σ of {name}": (name, "sigma") for name in ("norm_in", "norm_branch", "norm_out", "norm_final")
}
NARROW_COLUMNS = 7  # more columns have no room for numbers in their cells in a narrow figure
NARROW = 6.0  # inches: narrower figures have shorter labels
FILLED, STRIPED = {"facecolor": axes.COLOURS[0]}, {"facecolor": axes.COLOURS[1], "hatch": "////"}
DOTTED = {"facecolor": axes.COLOURS[2], "hatch": "...."}
BARS = {"attention": FILLED, "feed-forward": STRIPED, "cross-attention": DOTTED}
OTHER_BARS = {"facecolor": axes.COLOURS[3], "hatch": "xxxx"}


def _depth_table(columns: Mapping[str, Values], sites: Sequence[RecordedSite]) -> Table:
    """Return a table of numbers by site, without sites that have none."""
    columns_by_site = {name: {site.id: value for site, value in values} for name, values in columns.items() if values}
    rows: list[list[Cell]] = [
        [
            site.id,
            None if site.layer is None else site.layer + 1,
            site.kind,
            *(values.get(site.id) for values in columns_by_site.values()),
        ]
        for site in sites
        if any(site.id in values for values in columns_by_site.values())
    ]
    return Table(["sublayer", "layer", "kind", *columns_by_site], rows, "By depth")


def depth_figure(rec: Recording, caption: str) -> Figure | None:
    """Return a figure of the stream and the gradients over depth."""
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
    return draw_figure(
        "depth", draw, title=f"{what[0].upper()}{what[1:]}, by depth", caption=caption,
        table=_depth_table(_columns(rec, STREAM) | _columns(rec, GRADIENTS), rec.sites), height=2.9 * forward + 4.4 * backward,
    )  # fmt: skip


def write_figure(rec: Recording, caption: str) -> Figure | None:
    """Return a figure of each sublayer's write, relative to the stream."""
    columns = _columns(rec, WRITES)
    if not any(columns.values()):
        return None
    return draw_figure(
        "writes", lambda figure: rec.plot.writes(ax=figure.add_subplot()), title="Writes relative to the stream",
        caption=caption, table=_depth_table(columns, rec.sites), height=4.8,
    )  # fmt: skip


def similarity_figure(rec: Recording, caption: str) -> Figure | None:
    """Return a figure of the tokens' similarity and the norms' denominators."""
    columns = _columns(rec, SIMILARITY)
    if not any(columns.values()):
        return None

    def draw(figure: Canvas) -> None:
        rec.plot.similarity(ax=figure.add_subplot())
        _shorter_title(figure.axes[-1])

    return draw_figure(
        "similarity", draw,
        title="Similarity of the tokens, and denominators of the norms", caption=caption,
        table=_depth_table(columns, rec.sites), height=4.8,
    )  # fmt: skip


def memory_figure(rec: Recording, stream: str, name: str, caption: str) -> Figure | None:
    """Return a figure of a stream's memory map: source by depth."""
    memory_map: MemoryMap | None = rec.memory_maps.get(stream)
    if memory_map is None or not memory_map[0] or not memory_map[1]:
        return None
    sources, shares = memory_map
    if not any(share and math.isfinite(share) for row in shares for share in row):
        return None  # all cells would be empty
    head = ["source", *("x_0" if not k else f"depth {k}" for k in range(len(shares)))]
    rows: list[list[Cell]] = [[source, *(row[k] for row in shares)] for k, source in enumerate(sources)]
    table = Table(head, rows, "Share of each source in the stream; each column sums to one")
    sites = {site.id: site for site in rec.sites}
    stream_name = f"stream of the {stream}" if len(rec.memory_maps) > 1 else "stream"

    def draw(figure: Canvas) -> None:
        ax = rec.plot.memory_map(ax=figure.add_subplot(), stream=stream)
        rows = [int(place) for place in ax.get_yticks()]
        ax.set_yticks(rows, labels=[_source_label(sources[place], sites.get(sources[place])) for place in rows])
        ax.set_ylabel("layer and sublayer of the source", fontsize="small")
        if figure.get_figwidth() < NARROW:
            columns = [*range(0, len(shares), -(-len(shares) // 6))]
            ax.set_xticks(columns, labels=["x_0" if not place else str(place) for place in columns])
            figure.axes[-1].set_ylabel("share of the stream")
            if len(shares) > NARROW_COLUMNS:
                for text in [*ax.texts]:
                    text.remove()

    return draw_figure(
        name, draw,
        title=f"Sources of the {stream_name}, by depth", caption=caption, table=table,
        height=min(max(1.5 + 0.27 * len(sources), 3.2), 8.5),
    )  # fmt: skip


def ablation_figure(ablations: Sequence[Ablation], caption: str) -> Figure | None:
    """Return a figure of the changes of the output, and of the loss if there is one, without each sublayer."""
    if not ablations:
        return None
    loss = all(ablation.loss_change is not None for ablation in ablations)
    sites = [
        RecordedSite(
            ablation.site.id, ablation.site.path, ablation.site.kind, ablation.site.layer, ablation.site.stream
        )
        for ablation in ablations
    ]
    below = [(ablation.loss_change if loss else ablation.kl) or 0.0 for ablation in ablations]

    def draw(figure: Canvas) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True)
        depths, columns = axes.Depths(sites), 2 if figure.get_figwidth() < NARROW else 5
        _bars(upper, depths, [ablation.output_change for ablation in ablations], "‖change‖ / ‖output‖", legend=columns)
        _bars(lower, depths, below, "change of the loss" if loss else "KL divergence, nats")
        axes.x_axis(lower, depths)
        upper.tick_params(which="both", labelbottom=False)

    rows: list[list[Cell]] = []
    for ablation in ablations:
        rows.append(
            [ablation.site.id, ablation.site.layer + 1, ablation.site.kind, ablation.output_change, ablation.kl]
        )
        rows[-1] += [ablation.loss, ablation.loss_change] if loss else []
    head = ["without", "layer", "kind", "change of the output", "KL divergence"] + ["loss", "change of the loss"] * loss
    title = "The model without each sublayer"
    return draw_figure("ablation", draw, title=title, caption=caption, table=Table(head, rows, title), height=4.4)


def _bars(ax: Axes, depths: axes.Depths, values: Sequence[float], ylabel: str, *, legend: int = 0) -> None:
    """Draw a bar for each sublayer. Kinds differ by colour and hatching; NaN and infinity are crosses.

    Args:
        ax: the Axes.
        depths: positions of the sublayers.
        values: a value for each sublayer.
        ylabel: label of the y axis.
        legend: number of the legend's columns; 0 shows no legend.
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


def _source_label(source: str, site: RecordedSite | None) -> str:
    """Return a short label of a source: its layer and kind."""
    if source == "x_0" or (site is not None and site.kind == "start"):
        return "x_0"
    if site is not None and site.kind != "other" and site.layer is not None:
        return f"{site.layer + 1} {site.kind}"
    return source if len(source) <= 22 else f"…{source[-21:]}"


def _columns(rec: Recording, statistics: Mapping[str, tuple[str, str]]) -> dict[str, Values]:
    """Return the series of the last step that has any of the statistics."""
    step = rec.last_step(*statistics.values())
    return {name: rec.series(*pair, step) for name, pair in statistics.items()}


def _shorter_title(ax: Axes) -> None:
    """Remove the model and the step from the title: the page names them."""
    from matplotlib.text import Text

    title = ax.get_title(loc="left")
    for text in ax.findobj(Text):
        if title and isinstance(text, Text) and text.get_text() == title:
            text.set_text(title.split(",")[0])
