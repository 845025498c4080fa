"""Generator of the tables in streams.md: roles and statistics from schema.py, random models from benchmarks/results."""

from __future__ import annotations

from typing import Any

import page

from addnorm._util.blocks import Column, Table
from addnorm._util.render import to_markdown
from addnorm.stream.record.schema import ROLES, STATISTICS, Statistic

COUNTS = ("models", "right", "refused", "wrong")
PARTS = {  # kinds of parts of chains, as their names begin in random_models.json
    "wiring": "rows", "norm": "norms", "sublayer": "sublayers", "add": "adds", "layout": "layouts of the stream",
    "start": "beginnings of the stream", "end": "ends of the stream", "modules": "modules that add",
}  # fmt: skip


def statistics() -> str:
    """Return the table of roles, and the table of statistics with the roles that have them."""
    roles = page.table(["role", "meaning"], [[f"`{role}`", meaning] for role, meaning in ROLES.items()])
    by_name: dict[tuple[str, str], list[Statistic]] = {}
    for one in STATISTICS:
        by_name.setdefault((one.name, one.meaning), []).append(one)
    rows = [
        [f"`{name}`", meaning, entries[0].formula, ", ".join(f"`{one.role}`" for one in entries)]
        for (name, meaning), entries in by_name.items()
    ]
    return f"{roles}\n\n{page.table(['statistic', 'meaning', 'formula', 'roles'], rows)}"


def random_models() -> str:
    """Return the table of inspections of random models: a row for each construct.

    The parts of chains share a row by kind.
    """
    document = page.document("random_models")
    constructs: dict[str, dict[str, Any]] = document["constructs"]
    kinds: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in PARTS}
    rows = [["**all**", *(f"**{document['total'][key]:,}**" for key in COUNTS), ""]]
    for name, entry in constructs.items():
        kind, _, part = name.partition(": ")
        if kind in kinds:
            kinds[kind][part] = entry
        else:
            rows.append([name, *(f"{entry[key]:,}" for key in COUNTS), entry["reason"]])
    chains = [[PARTS[kind], "; ".join(map(_format_part, of_kind.items()))] for kind, of_kind in kinds.items()]
    head = [Column("construct"), *(Column(key, "right") for key in COUNTS), Column("why it may be refused")]
    return f"{to_markdown(Table(head, rows))}\n\n{page.table(['parts of chains', 'with the number of models'], chains)}"


def _format_part(item: tuple[str, dict[str, Any]]) -> str:
    """Return a part of chains with its number of models, and the number that are refused or wrong if there are any."""
    name, entry = item
    others = [f"{entry[key]} {key}" for key in ("refused", "wrong") if entry[key]]
    return f"{name} ({', '.join([str(entry['models']), *others])})"


SECTIONS = {"streams:statistics": statistics, "streams:random-models": random_models}
