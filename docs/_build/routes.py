"""Write the tables of routes.md from benchmarks/results/routes.json, which tests/support/route_results.py measures."""

from __future__ import annotations

from typing import Any

import page

from addnorm._util.numbers import format_number

TITLES = {"AddNorm": "`AddNorm`", "pre-LN": "pre-LN stack", "post-LN": "post-LN stack", "MiniLM": "fused MiniLM"}
SAME = "same bits"
EPS = {"torch.float32": 2.0**-23, "torch.float64": 2.0**-52}

Row = dict[str, Any]


def table(dtype: str) -> str:
    """Return the table of a dtype: a route in each row, an operation in each column, and the tolerances."""
    results = page.document("routes")
    rows = {(row["route"], row["operation"]): row for row in results["rows"] if row["dtype"] == dtype}
    routes, names = ([*dict.fromkeys(key[i] for key in rows)] for i in (0, 1))
    lines = [[route, *(cell(rows.get((route, name))) for name in names)] for route in routes]
    limits = [results["factor"] * results["errors"][name] * EPS[dtype] / EPS["torch.float32"] for name in names]
    lines.append(["tolerance", *map(number, limits)])
    return page.table(["route", *(TITLES[name] for name in names)], lines)


def cell(row: Row | None) -> str:
    """Return the comparison of a cell: of the output, and of the gradients."""
    if row is None:
        return "not run"
    values = [row["outputs"], "no gradients" if row["gradients"] is None else row["gradients"]]
    texts = [value if isinstance(value, str) else number(value) for value in values]
    text = SAME if values == [SAME, SAME] else ", ".join(texts)
    return f"{text} (not fused)" if row["fused"] is False else text


def number(value: float) -> str:
    """Return an error with two digits."""
    return format_number(value, 2)


def where() -> str:
    """Return the machine and the versions."""
    results = page.document("routes")
    versions = results["versions"]
    return f"{results['machine']['cpu']}, torch {versions['torch']}, {results['date'][:10]}."


SECTIONS = {
    "routes:float32": lambda: table("torch.float32"),
    "routes:float64": lambda: table("torch.float64"),
    "routes:where": where,
}
