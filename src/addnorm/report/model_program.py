"""Sections of a report on a residual program: its wiring and matrices, and the streams by depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from addnorm._util.blocks import Cell, Finding
from addnorm._util.charts import Chart, Panel, Series, depth_axis
from addnorm.report.figure import figure_of
from addnorm.report.page import Findings, Formula, Section
from addnorm.stream.program.result import Program
from addnorm.stream.program.statistics import SiteStatistics, measure_streams

MAX_LINES = 8  # streams that are drawn
CAPTION = "The sublayers with their matrices, and the relative error of the equations"
SYMBOLS = (
    "f is the sublayer, N a norm, R its normalization without weight, X the streams before it, X' the streams after it."
)
STREAMS = (
    "The size of each stream's elements before each sublayer, and below the share of B W in the sum A X + B W: "
    "⟨B W, s⟩ / |s|², mean over the tokens."
)
MATRICES = (
    "How far a row of A (what a stream receives) and a column of A (what it passes on, and its gradient receives) are from a sum "
    "of 1; whether C reads one stream (1) or all alike (1/n); how much the entries of C and B differ between tokens."
)


def build_program_sections(program: Program) -> Iterator[Section]:
    """Yield the sections of a residual program. All numbers are those of the inspected run, which the program holds."""
    equation, sentences = program.describe()
    source = [f"Source: {program.wiring.source}. {program.wiring.use}"] if program.wiring is not None else []
    texts = [text if not text.startswith("addnorm.") else f"in code: {text}" for text in (*sentences, *source)]
    findings = Findings([Finding(f"{text[:1].upper()}{text[1:].rstrip('.')}.") for text in texts])
    yield Section("The wiring", "", [Formula(equation, SYMBOLS), findings, program.build_table(CAPTION)])
    rows = measure_streams(program)
    yield Section("The streams by depth", "", [figure_of(chart) for chart in _draw_streams(program, rows)])


def _draw_streams(program: Program, rows: Sequence[SiteStatistics]) -> Iterator[Chart]:
    """Yield a chart of the streams, and one of the matrices if they are computed."""
    axis, places = depth_axis(program.sites)
    names: dict[float, list[Cell]] = {places[site.id]: [site.id, site.layer + 1, site.kind] for site in program.sites}
    kinds = {places[site.id]: site.kind for site in program.sites}

    def line(label: str, values: Sequence[float | None]) -> Series:
        points = [(places[row.site], value) for row, value in zip(rows, values, strict=True) if value is not None]
        return Series(label, points, [kinds[x] for x, _ in points])

    def by_stream(values: Sequence[Sequence[float] | None]) -> list[Series]:
        lines = range(min(MAX_LINES, max(map(len, filter(None, values)), default=0)))
        return [line(f"stream {j + 1}", [v[j] if v and j < len(v) else None for v in values]) for j in lines]

    def panels(named: dict[str, list[Series]]) -> list[Panel]:
        kept = {label: [one for one in series if one.points] for label, series in named.items()}
        return [Panel(label, series) for label, series in kept.items() if series]

    streams = {
        "rms": by_stream([row.rms for row in rows]),
        "share of the write": by_stream([row.write_share for row in rows]),
    }
    matrices = {
        "|sum of A - 1|": [line("row", [row.forward for row in rows]), line("column", [row.backward for row in rows])],
        "concentration of C": [line("C", [row.concentration for row in rows])],
        "spread over tokens": [line("C", [row.spread_C for row in rows]), line("B", [row.spread_B for row in rows])],
    }
    for title, caption, drawn in (
        ("The streams", STREAMS, panels(streams)),
        ("The matrices", MATRICES, panels(matrices)),
    ):
        if drawn:
            yield Chart(title, caption, drawn, axis).with_table(["sublayer", "layer", "kind"], names, title)
