"""`Recording`: measurements with files, drawings, a table for terminals and notebooks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from addnorm._util.blocks import Block, Column, Drawing, Paragraph, Span, Table, TableRow
from addnorm._util.charts import Chart, Panel, depth_axis, depth_series
from addnorm._util.numbers import format_count, format_number
from addnorm._util.optional import require
from addnorm._util.render import Rendered
from addnorm._util.svg import chart_image
from addnorm.stream.program.statistics import MATRICES, SiteStatistics, build_statistics
from addnorm.stream.record.schema import ENDS, Measurement, RecordedSite
from addnorm.stream.record.store import StoredMeasurements

if TYPE_CHECKING:
    from addnorm.stream.record.plot import Plots


SIMILARITY, FROZEN = "similarity", "frozen gradient"
COLUMNS = {  # of the table by depth: role and statistic by the heading
    "stream rms": ("out", "rms"),
    "write / stream": ("write", "ratio"),
    "cosine": ("write", "cosine"),
    SIMILARITY: ("out", "similarity"),
    "gradient": ("grad", "l2"),
    FROZEN: ("grad_frozen", "l2"),
    "weight gradient": ("params", "grad_l2"),
}
NOTE = (
    "stream rms: after the sublayer; cosine: between write and stream; similarity: between tokens; "
    "gradient: its norm at the stream; weight gradient: its norm over the sublayer's weights."
)
FROZEN_NOTE = " frozen gradient: the gradient with the computed A, B and C as constants."
EMPTY = "Nothing is recorded: call the model while the recorder is open, in its `with` block."
UNDEFINED = "-"
LONE_NOTE = " -: no sequence has two tokens that are not zero."
CHARTS = {"stream rms": "stream rms", "gradient at the stream": "gradient"}  # columns, in notebooks
HEIGHT = 84  # of a panel, in pixels
CELL = 8  # characters


class Recording(Rendered, StoredMeasurements):
    """Measurements of a model by step and site. `rec.plot` draws them, `rec.save` writes a file, `rec.table()` has all numbers.

    `STATISTICS` in `addnorm.stream.record.schema` lists what is recorded. Methods that take a role accept the names of
    TransformerLens as well: resid_pre, attn_out, resid_mid, mlp_out, resid_post, scale, and "3_attn_out" for layer 3 only.

    Args:
        sites: sites in order of depth, one stream after the other.
        metadata: how the recording was made: class of the model, version of torch, dtype, mode, notes; under "streams" the
            wiring of each stream and how well every equation closes.
        memory_maps: for each stream, at the last recorded step: the sources, and for each depth their shares, which sum to 1.
        balances: for each stream, at the last recorded step: how much each source contributes to the stream's norm.

    Example:
        >>> from addnorm.stream.record.schema import RecordedSite
        >>> rec = addnorm.stream.Recording([RecordedSite("layers.0.attn", "layers.0.attn", "attention", 0)], {"model": "Toy"})
        >>> rec.add(0, 0, "write", "rms", 0.5)
        >>> rec.add(1, 0, "write", "rms", 0.75)
        >>> rec
        <Recording of Toy: 1 sublayer, 2 steps from 0 to 1>
        >>> [(site.layer, value) for site, value in rec.series("attn_out", "rms")]
        [(0, 0.75)]
        >>> rec.over_time("layers.0.attn", "write", "rms")
        [(0, 0.5), (1, 0.75)]
    """

    def to_pandas(self) -> Any:
        """Return the table as a pandas DataFrame; `layer` is Int64, NA at the ends of a stream. Needs `addnorm[data]`."""
        frame = require("pandas", "make a DataFrame").DataFrame(self.table(), columns=Measurement._fields)
        return frame.astype({"step": "int64", "layer": "Int64", "value": "float64"})

    @property
    def plot(self) -> Plots:
        """Drawings of the recording: `rec.plot.stream(ax=ax)`. Needs `addnorm[plot]`."""
        from addnorm.stream.record.plot import Plots  # late: most programs draw nothing

        return Plots(self)

    def __repr__(self) -> str:
        sublayers = format_count(sum(site.kind not in ENDS for site in self.sites), "sublayer")
        streams = f" in {len(self.streams)} streams" if len(self.streams) > 1 else ""
        gradients = ", with gradients" if any(role == "grad" for _, role, _ in self._series) else ""
        model = f" of {self.metadata['model']}" if self.metadata.get("model") else ""
        return f"<Recording{model}: {sublayers}{streams}, {_steps_text(self.steps)}{gradients}>"

    def describe(self) -> dict[str, str]:
        """Return model, inputs, date and loss, as far as the metadata has them. Set `metadata["loss"]` to describe your loss."""
        known = {name: str(text) for name in ("inputs", "date", "loss") if (text := self.metadata.get(name))}
        if not known:
            return {}
        model, name = (str(self.metadata.get(key) or "") for key in ("model", "name"))
        has_gradients = any(role == "grad" or name == "grad_l2" for _, role, name in self._series)
        known.setdefault("loss", "that of the caller" if has_gradients else "none, forward only")
        return {"model": f"{name} ({model})" if name and name != model else model, **known}

    def _blocks(self) -> Iterator[Block]:
        yield Paragraph(repr(self)[1:-1], style="strong")
        for name, text in self.describe().items():
            yield Paragraph(f"{name}: {text}", hang=2)
        if not self.steps:
            yield Paragraph(EMPTY)
            return
        axis, places = depth_axis(self.sites)
        series = {heading: values for heading, pair in COLUMNS.items() if (values := self.series(*pair))}
        panels = [
            Panel(title, depth_series("", series[heading], places), height=HEIGHT)
            for title, heading in CHARTS.items() if heading in series
        ]  # fmt: skip
        if panels:
            yield Drawing(chart_image(Chart("By depth", "At the last step that has numbers.", panels, axis, columns=2)))
        columns = {heading: {site.id: value for site, value in values} for heading, values in series.items()}
        rms, similarity = (columns.get(heading, {}) for heading in ("stream rms", SIMILARITY))
        # At these sites no sequence has two tokens that are not zero, so there is no similarity.
        alone = {
            site for site, value in similarity.items() if math.isnan(value) and math.isfinite(rms.get(site, value))
        }
        rows: list[TableRow | Sequence[Span]] = []
        stream = self.streams[0] if len(self.streams) == 1 else ""
        for site in self.sites:
            is_end = site.kind in ENDS
            if is_end and not any(site.id in values for values in columns.values()):
                continue
            if site.stream != stream:
                stream = site.stream
                rows.append(TableRow(["", stream], "strong"))
            layer = "" if site.layer is None else str(site.layer + 1)
            rows.append(
                [
                    layer,
                    ENDS.get(site.kind, site.kind),
                    "" if is_end else site.id,
                    *(
                        UNDEFINED if site.id in alone and heading == SIMILARITY else _cell(values.get(site.id))
                        for heading, values in columns.items()
                    ),
                ]
            )
        headings = [Column("layer", "right"), Column("sublayer"), Column("module", drop="first")]
        yield Table(
            [*headings, *(Column(heading, "right", drop="last") for heading in columns)],
            rows,
            caption=NOTE + FROZEN_NOTE * (FROZEN in columns) + LONE_NOTE * bool(alone),
        )
        if statistics := self._list_stream_statistics():
            yield from build_statistics(statistics)
        if note := self.metadata.get("note"):
            yield Paragraph(f"Note: {note}.", style="dim", space=True)

    def _list_stream_statistics(self) -> list[SiteStatistics]:
        """Return the numbers of each of several streams, and of the matrices, at the last step; an empty list for one stream."""
        rms, shares = self._read_streams("in", "rms"), self._read_streams("write", "share")
        matrices = {name: dict(self.series("matrices", name)) for name in MATRICES}
        names = {site: f"{1 + (site.layer or 0)} {site.kind}" for site in rms}
        return [
            SiteStatistics(name, rms[site], shares.get(site), **{key: of.get(site) for key, of in matrices.items()})
            for site, name in names.items()
        ]

    def _read_streams(self, role: str, name: str) -> dict[RecordedSite, tuple[float, ...]]:
        """Return a statistic of each stream by site, at the last step."""
        found: dict[RecordedSite, tuple[float, ...]] = {}
        k = 0
        while values := self.series(role, f"{name}_{k}"):
            for site, value in values:
                found[site] = (*found.get(site, ()), value)
            k += 1
        return found


def _steps_text(steps: tuple[int, ...]) -> str:
    if len(steps) > 1:
        return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    return f"step {steps[0]}" if steps else "no steps"


def _cell(value: float | None) -> Span:
    text = format_number(value, 3, width=CELL)
    return text if value is None or math.isfinite(value) else (text, "bad")
