"""Module paths as short texts, and the tables of sublayers in which a stream and a program are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from addnorm._util.blocks import Column, Paragraph, Table, TableRow
from addnorm._util.numbers import format_count, format_number

MAX_PATHS = 3  # paths named in one line


def mask_numbers(path: str) -> str:
    """Return a path with `*` for its numbers: layers.*.attention."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def merge_paths(paths: Sequence[str]) -> str:
    """Return paths that differ only in their numbers as one: layers.0-11.attention."""
    parts = zip(*(path.split(".") for path in paths), strict=True)
    return ".".join(part[0] if len({*part}) == 1 else _merge_numbers(part) for part in parts)


def _merge_numbers(parts: Sequence[str]) -> str:
    """Return sorted numbers in a few characters: 0-11, or 0,2 where some are missing."""
    parts = sorted({*parts}, key=lambda part: int(part) if part.isdigit() else -1)
    numbers = [int(part) if part.isdigit() else -1 for part in parts]
    if numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
        return f"{parts[0]}-{parts[-1]}"
    return ",".join(parts) if len(parts) <= MAX_PATHS else f"{parts[0]},{parts[1]},...,{parts[-1]}"


def build_title(part: Any, title: str) -> Paragraph:
    """Return the line above the equation of a stream or a program: "stream: pre_ln, d = 16, 2 layers, 4 sublayers, float32"."""
    wiring = part.wiring.name if part.wiring else "none of the known wirings"
    sizes = f"{format_count(part.num_layers, 'layer')}, {format_count(len(part.sites), 'sublayer')}"
    return Paragraph(f"{title}: {wiring}, d = {part.width}, {sizes}, {part.dtype}", space=True)


Cells = dict[str, Any]  # texts by the name of the column, and the "style" of the line


def group_sites(sites: Iterable[Any], describe: Callable[[Any], Cells]) -> Iterator[tuple[list[Any], Cells]]:
    """Yield the sublayers and the cells of each line of a table. Consecutive layers with equal cells share their lines.

    The cells are those that `describe` returns, and the kind, the module, the layer, the error and the style of the line.
    """
    layers: dict[int, list[tuple[Any, Cells]]] = {}
    for site in sites:
        own = {
            "sublayer": site.kind, "module": mask_numbers(site.location), "style": "" if site.closes else "bad",
            **describe(site),
        }  # fmt: skip
        layers.setdefault(site.layer, []).append((site, own))
    groups = groupby(layers.values(), key=lambda pairs: [cells for _, cells in pairs])
    for _, group in groups:
        for pairs in zip(*group, strict=True):
            same = [site for site, _ in pairs]
            first, last = same[0].layer + 1, same[-1].layer + 1
            yield (
                same,
                pairs[0][1]
                | {
                    "layer": str(first) if len(same) == 1 else f"{first}-{last}",
                    "module": merge_paths([site.location for site in same]),
                    "error": format_number(max(site.closure for site in same), 1),
                },
            )


def build_site_table(
    columns: Mapping[str, Column], lines: Sequence[Cells], hidden: Sequence[str], caption: str = ""
) -> Table:
    """Return a table of sublayers. A column in `hidden` is left out if all its cells are equal."""
    names = [name for name in columns if name not in hidden or len({cells[name] for cells in lines}) > 1]
    rows = [TableRow([cells[name] for name in names], cells["style"]) for cells in lines]
    return Table([columns[name] for name in names], rows, caption)
