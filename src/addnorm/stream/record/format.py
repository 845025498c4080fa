"""A recording in a terminal and in a notebook: a table by depth, and two small drawings without script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # rich is imported where it is used; recording.py stands on this file
    from rich.table import Table

    from addnorm.stream.record.recording import Recording

__all__ = ["COLUMNS", "html", "rich_table"]


class Column(NamedTuple):
    """A statistic that is worth a place in a table by depth."""

    heading: str
    role: str
    statistic: str


COLUMNS = (
    Column("stream rms", "out", "rms"),
    Column("write / stream", "write", "ratio"),
    Column("cosine", "write", "cosine"),
    Column("similarity", "out", "similarity"),
    Column("gradient", "grad", "l2"),
    Column("of weights", "params", "grad_l2"),
)
NOTE = (
    "stream rms: after the sublayer; cosine: of the write with the stream; similarity: of the tokens; "
    "gradient: its length at the stream, and of the sublayer's weights."
)
CHARTS = (("stream rms by depth", 0, "#0072B2"), ("gradient at the stream by depth", 4, "#D55E00"))
WIDTH, HEIGHT, EDGE = 280, 84, 6
WIDE, GAP = 100, 2
ENDS = ("start", "final")
BAD = ("nan", "inf", "-inf")


def _columns(recording: Recording) -> list[tuple[str, dict[str, float]]]:
    """The columns that have a value: the heading, and the values by the site's id; of the last step that has each."""
    found = ((c.heading, recording.series(c.role, c.statistic)) for c in COLUMNS)
    return [(heading, {site.id: value for site, value in series}) for heading, series in found if series]


def short(value: float | None) -> str:
    """Three significant digits in at most eight characters, for a column."""
    text = number(value)
    return text if len(text) <= 8 or value is None else f"{value:.1e}"


def number(value: float | None) -> str:
    """Three significant digits; empty where there is none."""
    return "" if value is None else f"{value:.3g}"


def rich_table(recording: Recording, width: int = WIDE) -> Table:
    """What `Recording.__rich_console__` prints: in a wide terminal with the modules, in a narrow one with fewer columns.

    Args:
        recording: what is shown; the ends of its streams where they have a number.
        width: how many columns the terminal has.
    """
    from rich.table import Table
    from rich.text import Text

    columns = _columns(recording)
    sites = [s for s in recording.sites if s.kind not in ENDS or any(s.id in values for _, values in columns)]
    named = [
        ("layer", ["" if site.layer is None else str(site.layer + 1) for site in sites]),
        ("sublayer", [site.kind for site in sites]),
        ("module", ["" if site.kind in ENDS else site.id for site in sites]),
    ]
    measured = [(heading, [short(values.get(site.id)) for site in sites]) for heading, values in columns]
    if _width(shown := [*named, *measured]) > width:  # a line more for the headings
        measured = [(heading.replace(" ", "\n", 1), cells) for heading, cells in measured]
    if _width(shown := [*named, *measured], 1) > width:
        shown = [*named[:2], *measured]
    gap = GAP if _width(shown) <= width else 1
    while _width(shown, gap) > width and len(shown) > 3:
        shown.pop()
    left_out = [heading.replace("\n", " ") for heading, _ in measured if heading not in dict(shown)]
    note = f"{NOTE} A wider terminal has more: {', '.join(left_out)}." if left_out else NOTE
    table = Table(
        title=Text(repr(recording)[1:-1], "bold"), title_justify="left", caption=Text(note, "dim"), caption_justify="left",
        box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim",
    )  # fmt: skip
    for heading, _ in shown:
        table.add_column(heading, justify="left" if heading in ("sublayer", "module") else "right", no_wrap=True)
    last = recording.streams[0] if len(recording.streams) == 1 else ""
    for site, *cells in zip(sites, *(cells for _, cells in shown), strict=True):
        if site.stream != last:
            last = site.stream
            table.add_row("", Text(last, "bold"))
        table.add_row(*(Text(cell, "bold red" if cell in BAD else "") for cell in cells))
    return table


def _width(columns: Sequence[tuple[str, list[str]]], gap: int = GAP) -> int:
    """Of a table of them."""
    return sum(max(map(len, [*heading.split("\n"), *cells])) for heading, cells in columns) + gap * (len(columns) - 1)


def html(recording: Recording) -> str:
    """What `Recording._repr_html_` gives: no script, no style that leaves it, everything escaped."""
    columns = _columns(recording)
    right = ' style="text-align:right"'
    head = "".join(f'<th scope="col"{right}>{escape(heading)}</th>' for heading, _ in columns)
    rows = [
        f'<tr><th scope="row" style="text-align:left">{escape(site.id)}</th><td>{escape(site.kind)}</td>'
        + "".join(f"<td{right}>{number(values.get(site.id))}</td>" for _, values in columns)
        + "</tr>"
        for site in recording.sites
    ]
    charts = [
        _chart(title, [value for _, value in recording.series(COLUMNS[column].role, COLUMNS[column].statistic)], colour)
        for title, column, colour in CHARTS
    ]
    return (
        f"<div><p><b>{escape(repr(recording)[1:-1])}</b></p><div>{''.join(charts)}</div>"
        '<div style="max-height:24em;overflow:auto"><table>'
        f'<thead><tr><th scope="col">site</th><th scope="col">kind</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        f"</div><p><small>{escape(NOTE)}</small></p></div>"
    )


def _chart(title: str, values: Sequence[float], colour: str) -> str:
    """Values by depth: logarithmic where all are positive and far apart; what is not finite is a cross at the top."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    log = low > 0 and high > 10 * low
    low = low if log else min(low, 0.0)  # a line that starts at nothing, or noise would look like much

    def place(value: float) -> float:
        size = math.log(value / low) / math.log(high / low) if log else (value - low) / ((high - low) or 1.0)
        return HEIGHT - EDGE - size * (HEIGHT - 2 * EDGE)

    step = (WIDTH - 2 * EDGE) / max(len(values) - 1, 1)
    points = [(EDGE + step * k, place(value) if math.isfinite(value) else None) for k, value in enumerate(values)]
    path = "".join(
        f"{'L' if k and points[k - 1][1] is not None else 'M'}{x:.1f} {y:.1f}"
        for k, (x, y) in enumerate(points)
        if y is not None
    )
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"/>'
        if y is not None
        else f'<path d="M{x - 3:.1f} 2l6 6m0 -6l-6 6" stroke="#B00020" stroke-width="1.5"/>'
        for x, y in points
    )
    bad = len(values) - len(finite)
    scale = "log scale" if log else f"from {number(low)}"
    says = f"{title}, {scale}: {number(min(finite))} to {number(high)}{f', {bad} not finite' if bad else ''}"
    return (
        '<figure style="display:inline-block;margin:0 1em 0 0">'
        f'<svg role="img" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"><title>{escape(says)}</title>'
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>{marks}</svg>'
        f"<figcaption><small>{escape(says)}</small></figcaption></figure>"
    )
