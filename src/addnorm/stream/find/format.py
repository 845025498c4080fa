"""An inspection as a reader sees it: in a terminal and in a notebook.

Layers that are alike are one line; what is the same in every line is said above.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from addnorm.stream.find.inspection import Inspection, Site, Stream, Unknown
from addnorm.stream.find.norm import Norm
from addnorm.wirings.equation import number

__all__ = ["NORMS", "SHOWN", "as_html", "merged", "norm_text", "on_console", "starred"]

NORMS = {"layer": "LayerNorm", "rms": "RMSNorm", "scale": "ScaleNorm"}
SHOWN = 3  # paths named in a line


@dataclass
class Line:
    """A sublayer, in all the layers that are alike."""

    cells: dict[str, str]
    closes: bool


def on_console(found: Inspection) -> Iterator[Any]:
    """For rich."""
    yield Text.assemble((found.model, "bold"), f", {found.mode}: ", (found.wiring, "bold cyan"))
    for stream in found.streams:
        lines = _lines(stream)
        yield Text(f"\n{_title(stream)}")
        yield from (Padding(Text(line), (0, 0, 0, 2), expand=False) for line in _summary(stream, lines))
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in _columns(lines):
            table.add_column(
                name, justify="right" if name == "closure" else "left", overflow="fold", no_wrap=name != "module"
            )
        for line in lines:
            table.add_row(*(line.cells[name] for name in _columns(lines)), style=None if line.closes else "red")
        yield table
    for text in _not_understood(found.unknown):
        yield Text.assemble(("not understood ", "bold red"), text)


def as_html(found: Inspection) -> str:
    """For a notebook."""
    head = f"<p><b>{html.escape(found.model)}</b>, {html.escape(found.mode)}: <b>{html.escape(found.wiring)}</b></p>"
    parts = [head]
    for stream in found.streams:
        lines = _lines(stream)
        columns = _columns(lines)
        rows = "".join(f"<tr>{''.join(_cell('td', line.cells[name]) for name in columns)}</tr>" for line in lines)
        title = "<br>".join(html.escape(line) for line in (_title(stream), *_summary(stream, lines)))
        names = "".join(_cell("th", name) for name in columns)
        parts.append(f"<p>{title}</p><table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>")
    parts += [f"<p>not understood: {html.escape(text)}</p>" for text in _not_understood(found.unknown)]
    return "".join(parts)


def norm_text(norm: Norm) -> str:
    """The norm in a word, with its eps."""
    more = " (d - 1)" * norm.unbiased + " (eps outside the root)" * norm.eps_outside
    return f"{NORMS[norm.kind]} {number(norm.eps) if norm.eps is not None else ''}{more}".strip()


def _cell(tag: str, text: str) -> str:
    return f"<{tag} style='text-align:left'>{html.escape(text)}</{tag}>"


def _title(stream: Stream) -> str:
    wiring = stream.wiring.name if stream.wiring else "none of the known wirings"
    sublayers = f"{len(stream.sites)} sublayer{'s' * (len(stream.sites) > 1)}"
    layers = f"{stream.num_layers} layer{'s' * (stream.num_layers > 1)}, {sublayers}"
    return f"{stream.name}: {wiring}, d = {stream.width}, {layers}, {stream.dtype}"


def _summary(stream: Stream, lines: Sequence[Line]) -> list[str]:
    """What is said of a stream above its table."""
    said = stream.equation.split("\n")
    norms = {line.cells["norms"] for line in lines}
    if len(norms) == 1 and norms != {""}:
        said.append(f"norms: {norms.pop()}")
    for name, norm in (("embedding norm", stream.embedding_norm), ("final norm", stream.final_norm)):
        if norm is not None:
            said.append(f"{name}: {norm_text(norm)}, {norm.path or 'in the model itself'}")
    if stream.closure is not None:
        said.append(f"x_L = x_0 + all writes: relative error {stream.closure:.1e}")
    return [*said, *stream.remarks]


def _columns(lines: Sequence[Line]) -> list[str]:
    """Those of the table; what all lines have in common needs none."""
    same = {name for name in ("x'", "norms") if len({line.cells[name] for line in lines}) == 1}
    return [name for name in ("layer", "sublayer", "module", "x'", "norms", "closure") if name not in same]


def _lines(stream: Stream) -> list[Line]:
    layers: dict[int, list[Site]] = {}
    for site in stream.sites:
        layers.setdefault(site.layer, []).append(site)
    groups: list[list[list[Site]]] = []
    for sites in layers.values():
        if groups and _alike(groups[-1][0], sites):
            groups[-1].append(sites)
        else:
            groups.append([sites])
    return [_line([sites[k] for sites in group]) for group in groups for k in range(len(group[0]))]


def _alike(one: Sequence[Site], other: Sequence[Site]) -> bool:
    return [_signature(site) for site in one] == [_signature(site) for site in other]


def _signature(site: Site) -> tuple[Any, ...]:
    """What sublayers of layers that are alike have in common."""
    norms = tuple(norm_text(norm) for norm in _norms(site))
    return site.kind, site.role, site.equation, norms, starred(site.where), site.closes, site.parallel > 1


def _norms(site: Site) -> list[Norm]:
    return [norm for norm in (site.norm_in, site.norm_branch, site.norm_out) if norm is not None]


def starred(path: str) -> str:
    """A path without its numbers."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _line(sites: Sequence[Site]) -> Line:
    first, last = sites[0], sites[-1]
    where = merged([site.where for site in sites])
    if first.shared > 1:
        calls = f"call {first.call + 1}" if len(sites) == 1 else f"calls {first.call + 1} to {last.call + 1}"
        where += f" ({calls} of {first.shared})"
    cells = {
        "layer": str(first.layer + 1) if len(sites) == 1 else f"{first.layer + 1}-{last.layer + 1}",
        "sublayer": f"{first.kind} (parallel)" if first.parallel > 1 else first.kind,
        "module": where,
        "x'": first.equation.removeprefix("x' = "),
        "norms": ", ".join(dict.fromkeys(norm_text(norm) for norm in _norms(first))),
        "closure": f"{max(site.closure for site in sites):.0e}",
    }
    return Line(cells, all(site.closes for site in sites))


def merged(paths: Sequence[str]) -> str:
    """Paths that differ in their numbers, as one: layers.0-11.attention."""
    numbered = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(parts[0] if len({*parts}) == 1 else _range(parts) for parts in numbered)


def _range(parts: Sequence[str]) -> str:
    """Numbers in a few characters, in order: 0-11, or 0,2 where some are left out."""
    parts = sorted({*parts}, key=lambda part: int(part) if part.isdigit() else -1)
    numbers = [int(part) if part.isdigit() else -1 for part in parts]
    if numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
        return f"{parts[0]}-{parts[-1]}"
    return ",".join(parts) if len(parts) <= SHOWN else f"{parts[0]},{parts[1]},...,{parts[-1]}"


def _not_understood(unknown: Sequence[Unknown]) -> list[str]:
    """One line for each reason."""
    paths: dict[str, list[str]] = {}
    for one in unknown:
        paths.setdefault(one.reason, []).append(one.path or "the model")
    more = {reason: f" and {len(of) - SHOWN} more" if len(of) > SHOWN else "" for reason, of in paths.items()}
    return [f"{', '.join(of[:SHOWN])}{more[reason]}: {reason}" for reason, of in paths.items()]
