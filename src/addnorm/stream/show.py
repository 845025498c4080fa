"""A recording in a terminal and in a notebook: a table by depth, and two small drawings without script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # rich is imported where it is used; recording.py stands on this file
    from rich.table import Table

    from addnorm.stream.recording import Recording

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
    Column("of parameters", "params", "grad_l2"),
)
NOTE = (
    "stream rms: after the sublayer; cosine: of the write with the stream; similarity: of the tokens; "
    "gradient: its length at the stream, and for the sublayer's parameters."
)
CHARTS = (("stream rms by depth", 0, "#0072B2"), ("gradient at the stream by depth", 4, "#D55E00"))
WIDTH, HEIGHT, EDGE = 280, 84, 6


def _columns(recording: Recording) -> list[tuple[str, dict[str, float]]]:
    """The columns that have a value: the heading, and the values by the site's id; of the last step that has each."""
    found = ((c.heading, recording.series(c.role, c.statistic)) for c in COLUMNS)
    return [(heading, {site.id: value for site, value in series}) for heading, series in found if series]


def number(value: float | None) -> str:
    """Three significant digits; empty where there is none."""
    return "" if value is None else f"{value:.3g}"


def rich_table(recording: Recording) -> Table:
    """What `Recording.__rich_console__` prints."""
    from rich.markup import escape as plain
    from rich.table import Table
    from rich.text import Text

    table = Table(title=plain(repr(recording)[1:-1]), title_justify="left", caption=NOTE, caption_justify="left")
    columns = _columns(recording)
    table.add_column("site", overflow="fold")
    table.add_column("kind")
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for site in recording.sites:
        values = [values.get(site.id) for _, values in columns]
        bad = [value is not None and not math.isfinite(value) for value in values]
        cells = [
            Text(number(value), style="bold red" if is_bad else "") for value, is_bad in zip(values, bad, strict=True)
        ]
        table.add_row(plain(site.id), site.kind, *cells)
    return table


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
