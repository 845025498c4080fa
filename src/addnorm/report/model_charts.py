"""Charts of a model report: statistics by depth of a recording, memory maps, ablations, each with a table of all its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any

from addnorm._util.blocks import Cell, Table
from addnorm._util.charts import Chart, Map, Panel, Series, depth_axis, depth_series, list_places, number_axis
from addnorm.stream.ablate import Ablation
from addnorm.stream.program.result import Program
from addnorm.stream.program.statistics import measure_streams
from addnorm.stream.record.plot import DRAWINGS, read_drawing
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import RecordedSite

MAX_LINES = 8  # streams that are drawn
EACH_STREAM = (
    "The size of each stream's elements before each sublayer, and below the share of B W in the sum A X + B W: "
    "⟨B W, s⟩ / |s|², mean over the tokens."
)
MATRICES = (
    "How far a row of A (what a stream receives) and a column of A (what it passes on, and its gradient receives) are from a sum "
    "of 1; whether C reads one stream (1) or all alike (1/n); how much the entries of C and B differ between tokens."
)
SUBLAYER_KINDS = ("attention", "feed-forward", "cross-attention", "other")


def depth_charts(rec: Recording) -> Iterator[Chart]:
    """Yield the charts by depth: the stream and the gradients, the writes, and the similarity of the tokens with the norms."""
    forward, backward = _panels(rec, "stream"), _panels(rec, "gradients")
    what = " and ".join(["the stream"] * bool(forward) + ["the gradient of the loss"] * bool(backward))
    gradients = (
        " Below: the gradient of the loss at the stream and at the parameters of each sublayer." if backward else ""
    )
    yield from _by_depth(
        rec.sites, f"{what[:1].upper()}{what[1:]}, by depth",
        f"The size of the stream's elements after each sublayer.{gradients}", [*forward, *backward],
    )  # fmt: skip
    yield from _by_depth(
        rec.sites, "Writes relative to the stream",
        "The norm of each write divided by that of the stream it is added to, and the cosine of the two: 1 is along the "
        "stream, 0 orthogonal, -1 against it.",
        _panels(rec, "writes"),
    )  # fmt: skip
    yield from _by_depth(
        rec.sites, "Similarity of the tokens, and denominators of the norms",
        "The mean cosine of two tokens (1 if all tokens are equal), and the standard deviation or root mean square that each "
        "norm divides by.",
        _panels(rec, "similarity"),
    )  # fmt: skip


def _panels(rec: Recording, name: str) -> list[Panel]:
    """Return the panels of one of the `DRAWINGS`, at the last recorded step that has any of its numbers."""
    places = depth_axis(rec.sites)[1]
    panels = []
    for quantity, lines in read_drawing(rec, DRAWINGS[name])[0]:
        label = quantity.title or quantity.label
        series = [one for line, values in lines.items() for one in depth_series(line or label, values, places)]
        if len(lines) == 1:
            series = [one._replace(colour=0, dash=0) for one in series]
        panels.append(Panel(label, series, least=quantity.least))
    return panels


def _by_depth(
    sites: Sequence[Any], title: str, caption: str, panels: Sequence[Panel], heading: str = "By depth"
) -> Iterator[Chart]:
    """Yield one chart of the `panels`, or nothing without panels. Its table has a line for each sublayer with a number."""
    drawn = list_places(panels)
    axis, places = depth_axis(sites)
    names: dict[float, list[Cell]] = {
        x: [site.id, None if site.layer is None else site.layer + 1, site.kind]
        for site in sites
        if (x := places[site.id]) in drawn
    }
    if panels:
        ticks = {x: text for x, text in (axis.ticks or {}).items() if text != "final" or x in drawn}
        chart = Chart(title, caption, panels, axis._replace(ticks=ticks))
        yield chart.with_table(["sublayer", "layer", "kind"], names, heading)


def program_charts(program: Program) -> Iterator[Chart]:
    """Yield a chart of the streams of a program by depth, and one of the matrices if they are computed."""
    rows = measure_streams(program)
    places = depth_axis(program.sites)[1]

    def draw(label: str, values: Iterable[float | None]) -> list[Series]:
        pairs = zip(program.sites, values, strict=True)
        return depth_series(label, [(site, value) for site, value in pairs if value is not None], places)

    def draw_streams(name: str) -> list[Series]:
        by_stream = zip_longest(*(getattr(row, name) or () for row in rows))
        return [one for j, values in enumerate(islice(by_stream, MAX_LINES), 1) for one in draw(f"stream {j}", values)]

    def draw_matrices(**names: str) -> list[Series]:
        return [one for label, name in names.items() for one in draw(label, [getattr(row, name) for row in rows])]

    streams = {"rms": draw_streams("rms"), "share of the write": draw_streams("write_share")}
    matrices = {
        "|sum of A - 1|": draw_matrices(row="forward", column="backward"),
        "concentration of C": draw_matrices(C="concentration"),
        "spread over tokens": draw_matrices(C="spread_C", B="spread_B"),
    }
    for title, caption, drawn in (("The streams", EACH_STREAM, streams), ("The matrices", MATRICES, matrices)):
        panels = [Panel(label, series) for label, series in drawn.items() if series]
        yield from _by_depth(program.sites, title, caption, panels, title)


def memory_charts(rec: Recording) -> Iterator[Chart]:
    """Yield a chart of each stream's memory map: the share of each source in the stream at each depth."""
    sites = {site.id: site for site in rec.sites}
    for name, (sources, shares) in rec.memory_maps.items():
        finite = [share for row in shares for share in row if math.isfinite(share)]
        if any(finite):
            stream = f"stream of the {name}" if len(rec.memory_maps) > 1 else "stream"
            depths = range(len(shares))
            rows: list[list[Cell]] = [[source, *(row[k] for row in shares)] for k, source in enumerate(sources)]
            head = ["source", *(f"depth {k}" if k else "x_0" for k in depths)]
            labels = [_source_label(source, sites.get(source)) for source in sources]
            yield Chart(
                f"Sources of the {stream}, by depth",
                f"Each row is a source, each column the {stream} at a depth; a column sums to one. Each source is carried "
                "exactly through the norms and matrices after it, as they were in the run.",
                [Map("layer and sublayer of the source", labels, shares, max(1.0, *map(abs, finite)))],
                number_axis(depths),
                table=Table(head, rows, f"Share of each source in the {stream}; each column sums to one"),
            )


def _source_label(source: str, site: RecordedSite | None) -> str:
    """Return a short label of a source: its layer and kind."""
    if site is None or site.kind == "other" or site.layer is None:
        return "x_0" if site is not None and site.kind == "start" else source
    return f"{site.kind} {site.layer + 1}"


def ablation_chart(ablations: Sequence[Ablation]) -> Chart:
    """Return a chart of the changes of the output, and of the loss if there is one, without each sublayer."""
    numbers = {"change of the output": "output_change", "KL divergence": "kl"}
    below, drawn, more = "KL divergence, nats", "kl", "the KL divergence of the softmax over its last dimension"
    if all(ablation.loss_change is not None for ablation in ablations):
        numbers |= {"loss": "loss", "change of the loss": "loss_change"}
        below, drawn, more = "change of the loss", "loss_change", "the change of the loss"
    axis, places = depth_axis([ablation.site for ablation in ablations])

    def panel(label: str, number: str) -> Panel:
        series = []
        for kind in dict.fromkeys(one.site.kind for one in ablations):
            points = [(places[one.site.id], getattr(one, number) or 0.0) for one in ablations if one.site.kind == kind]
            look = SUBLAYER_KINDS.index(kind)
            series.append(Series(kind, points, form="bars", colour=look, dash=look))
        return Panel(label, series, log=False, height=150)

    rows = [
        [one.site.id, one.site.layer + 1, one.site.kind, *(getattr(one, name) for name in numbers.values())]
        for one in ablations
    ]
    title = "The model without each sublayer"
    return Chart(
        title,
        f"The write of each sublayer was removed in turn. Bars show the change of the output relative to its norm, and {more}.",
        [panel("‖change‖ / ‖output‖", "output_change"), panel(below, drawn)],
        axis, table=Table(["without", "layer", "kind", *numbers], rows, title),
    )  # fmt: skip
