"""README's table of times, made from results/functional.json.

python benchmarks/table.py            replaces what stands between the two bench comments of README.md
python benchmarks/table.py --check    changes nothing; 1 if it is not what the results say
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from addnorm.bench import JOBS, NORMS, SHAPES
from addnorm.bench.summary import by_cell
from addnorm.bench.tables import digits, headline

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "functional.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def table(document: dict[str, Any], norm: str = "layer") -> str:
    """One line a size and dtype, one column a job: times as fast as eager (addnorm's time / eager's, microseconds)."""
    cells = {cell: row for cell, row in by_cell(document["rows"]).items() if cell.norm == norm}
    lines = [["rows x d", "dtype", *(job.title for job in JOBS.values())], ["--:", ":--", *["--:"] * len(JOBS)]]
    keys = dict.fromkeys((cell.dtype, cell.rows, cell.d) for cell in sorted(cells, key=_order))
    for dtype, rows, d in keys:
        line = [f"{rows} x {d}", dtype]
        for job in JOBS:
            row = next((row for cell, row in cells.items() if cell[1:] == (job, rows, d, dtype)), None)
            line.append("" if row is None else _cell(row))
        lines.append(line)
    return _markdown(lines)


def targets(document: dict[str, Any]) -> str:
    """The targets next to what was measured, one column a norm."""
    norms = dict.fromkeys(one["norm"] for one in document["summary"] if one["norm"])
    lines = [
        ["measured over the cells", "target", *(NORMS[norm] for norm in norms)],
        [":--", ":--", *["--:"] * len(norms)],
    ]
    goals: dict[tuple[str, str], dict[str, str]] = {}
    for one in document["summary"]:
        if one["norm"] and one["value"] is not None:
            what = f"{one['name']} ({one['versus']})", f"{one['compare']} {digits(one['target'])}"
            goals.setdefault(what, {})[one["norm"]] = digits(one["value"]) + ("" if one["met"] else " (missed)")
    lines += [[*what, *(found.get(norm, "") for norm in norms)] for what, found in goals.items()]
    return _markdown(lines)


def section(document: dict[str, Any]) -> str:
    """What stands between the two comments."""
    return "\n".join([
        BEGIN,
        "Times as fast as eager PyTorch (median microseconds: addnorm / eager), LayerNorm:",
        "",
        table(document),
        "",
        targets(document),
        "",
        f"{headline(document)}. [How it is measured](benchmarks/README.md).",
        END,
    ])  # fmt: skip


def replaced(readme: str, text: str) -> str:
    """README with the section put between its comments."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise SystemExit(f"{README.name} needs one {BEGIN} and one {END}: add the two lines where the table belongs.")
    before, rest = readme.split(BEGIN)
    return before + text + rest.split(END)[1]


def main(words: list[str]) -> int:
    """Replace, or check."""
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    readme = README.read_text(encoding="utf-8")
    wanted = replaced(readme, section(document))
    if words == ["--check"]:
        if readme != wanted:
            print("README.md's table is not what benchmarks/results/functional.json says: run benchmarks/table.py")
        return int(readme != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


def _order(cell: Any) -> tuple[int, tuple[int, int]]:
    place = SHAPES.index((cell.rows, cell.d)) if (cell.rows, cell.d) in SHAPES else len(SHAPES)
    return place, (cell.rows, cell.d)


def _cell(row: dict[str, Any]) -> str:
    ours, eager = row["addnorm"]["median_us"], row["eager"]["median_us"]
    return f"**{eager / ours:.2f}** ({digits(ours)} / {digits(eager)})"


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
