"""Charts of a model report: statistics by depth of a recording, memory maps, ablations, each with a table of all its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from addnorm._util.blocks import Cell, Table
from addnorm._util.charts import Axis, Chart, Map, Panel, Series, depth_axis, depth_series
from addnorm.stream.ablate import Ablation
from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import LIMITS, RecordedSite

Names = Mapping[str, tuple[str, str]]  # role and statistic of each series of a panel, by its label
STREAM: Names = {"stream rms": ("out", "rms"), "stream max": ("out", "max")}
GRADIENTS: Names = {"‖∂loss / ∂stream‖": ("grad", "l2"), "‖∂loss / ∂parameters‖": ("params", "grad_l2")}
WRITES: Names = {"‖write‖ / ‖stream‖": ("write", "ratio"), "cos(write, stream)": ("write", "cosine")}
SIMILARITY: Names = {"cos(token, token)": ("out", "similarity")}
SIGMA: Names = {f"σ of {name}": (name, "sigma") for name in ("norm_in", "norm_branch", "norm_out", "norm_final")}
SUBLAYER_KINDS = ("attention", "feed-forward", "cross-attention", "other")


def depth_charts(rec: Recording) -> Iterator[Chart]:
    """Yield the charts by depth: the stream and the gradients, the writes, and the similarity of the tokens with the norms."""
    forward, backward = _panels(rec, STREAM, "size of the stream's elements"), _panels(rec, GRADIENTS)
    what = " and ".join(["the stream"] * bool(forward) + ["the gradient of the loss"] * bool(backward))
    gradients = (
        " Below: the gradient of the loss at the stream and at the parameters of each sublayer." if backward else ""
    )
    yield from _by_depth(
        rec, f"{what[:1].upper()}{what[1:]}, by depth", f"The size of the stream's elements after each sublayer.{gradients}",
        [*forward, *backward],
    )  # fmt: skip
    yield from _by_depth(
        rec, "Writes relative to the stream",
        "The norm of each write divided by that of the stream it is added to, and the cosine of the two: 1 is along the "
        "stream, 0 orthogonal, -1 against it.",
        _panels(rec, WRITES),
    )  # fmt: skip
    yield from _by_depth(
        rec, "Similarity of the tokens, and denominators of the norms",
        "The mean cosine of two tokens (1 if all tokens are equal), and the standard deviation or root mean square that each "
        "norm divides by.",
        [*_panels(rec, SIMILARITY), *_panels(rec, SIGMA, "σ = √(variance + ε)")],
    )  # fmt: skip


def _panels(rec: Recording, names: Names, label: str = "") -> list[Panel]:
    """Return the panels of the statistics in `names`, at the last recorded step that has any of these statistics.

    Without `label` each statistic has a panel of its own. With `label` all statistics share one panel of that label.
    """
    step = rec.last_step(*names.values())
    places = depth_axis(rec.sites)[1]
    by_name = {name: depth_series(name, rec.series(*pair, step), places) for name, pair in names.items()}
    if label:
        together = [series for some in by_name.values() for series in some]
        return [Panel(label, together)] if together else []
    return [
        Panel(name, [series._replace(colour=0, dash=0) for series in some], least=LIMITS.get(names[name]))
        for name, some in by_name.items() if some
    ]  # fmt: skip


def _by_depth(rec: Recording, title: str, caption: str, panels: Sequence[Panel]) -> Iterator[Chart]:
    """Yield one chart of the `panels`, or nothing without panels. Its table has a line for each sublayer with a number."""
    drawn = {x for panel in panels for series in panel.series for x, _ in series.points}
    sites = {site.id: site for site in rec.sites}
    axis, places = depth_axis(rec.sites)
    names = {
        x: [id, None if (layer := sites[id].layer) is None else layer + 1, sites[id].kind]
        for id, x in places.items()
        if x in drawn
    }
    if panels:
        ticks = {x: text for x, text in (axis.ticks or {}).items() if text != "final" or x in drawn}
        yield Chart(title, caption, panels, axis._replace(ticks=ticks)).with_table(
            ["sublayer", "layer", "kind"], names, "By depth"
        )


def memory_charts(rec: Recording) -> Iterator[Chart]:
    """Yield a chart of each stream's memory map: the share of each source in the stream at each depth."""
    sites = {site.id: site for site in rec.sites}
    for name, (sources, shares) in rec.memory_maps.items():
        finite = [share for row in shares for share in row if math.isfinite(share)]
        if any(finite):
            stream = f"stream of the {name}" if len(rec.memory_maps) > 1 else "stream"
            depths = {float(k): "x_0" if not k else f"{k}" for k in range(len(shares))}
            rows: list[list[Cell]] = [[source, *(row[k] for row in shares)] for k, source in enumerate(sources)]
            head = ["source", *(text if text == "x_0" else f"depth {text}" for text in depths.values())]
            labels = [_source_label(source, sites.get(source)) for source in sources]
            yield Chart(
                f"Sources of the {stream}, by depth",
                f"Each row is a source, each column the {stream} at a depth; a column sums to one. Each source is carried "
                "exactly through the norms and matrices after it, as they were in the run.",
                [Map("layer and sublayer of the source", labels, shares, max(1.0, *map(abs, finite)))],
                Axis("depth in sublayers", ticks=depths),
                table=Table(head, rows, f"Share of each source in the {stream}; each column sums to one"),
            )


def _source_label(source: str, site: RecordedSite | None) -> str:
    """Return a short label of a source: its layer and kind."""
    if site is None or site.kind == "other" or site.layer is None:
        return "x_0" if site is not None and site.kind == "start" else source
    return f"{site.kind} {site.layer + 1}"


def ablation_chart(ablations: Sequence[Ablation]) -> Chart:
    """Return a chart of the changes of the output, and of the loss if there is one, without each sublayer."""
    has_loss = all(ablation.loss_change is not None for ablation in ablations)
    below, more = (
        ("change of the loss", "the change of the loss") if has_loss
        else ("KL divergence, nats", "the KL divergence of the softmax over its last dimension")
    )  # fmt: skip
    axis, places = depth_axis([ablation.site for ablation in ablations])

    def panel(label: str, values: Sequence[float | None]) -> Panel:
        series = []
        for kind in dict.fromkeys(one.site.kind for one in ablations):
            points = [
                (places[one.site.id], value or 0.0)
                for one, value in zip(ablations, values, strict=True)
                if one.site.kind == kind
            ]
            series.append(
                Series(kind, points, form="bars", colour=SUBLAYER_KINDS.index(kind), dash=SUBLAYER_KINDS.index(kind))
            )
        return Panel(label, series, log=False, height=150)

    rows: list[list[Cell]] = [
        [
            one.site.id,
            one.site.layer + 1,
            one.site.kind,
            one.output_change,
            one.kl,
            *([one.loss, one.loss_change] if has_loss else []),
        ]
        for one in ablations
    ]
    head = ["without", "layer", "kind", "change of the output", "KL divergence"] + [
        "loss",
        "change of the loss",
    ] * has_loss
    title = "The model without each sublayer"
    return Chart(
        title,
        f"The write of each sublayer was removed in turn. Bars show the change of the output relative to its norm, and {more}.",
        [panel("‖change‖ / ‖output‖", [one.output_change for one in ablations]),
         panel(below, [one.loss_change if has_loss else one.kl for one in ablations])],
        axis, table=Table(head, rows, title),
    )  # fmt: skip
