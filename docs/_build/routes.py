"""Write the tables of routes.md from benchmarks/results/routes.json, which tests/support/route_results.py measures.

python docs/_build/routes.py            replace the text between the routes comments of the page
python docs/_build/routes.py --check    change nothing; exit with 1 if the page differs from the results
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import page

from addnorm._util import jsonio

PAGE = page.DOCS / "routes.md"
RESULTS = page.RESULTS / "routes.json"
TITLES = {"AddNorm": "`AddNorm`", "pre-LN": "pre-LN stack", "post-LN": "post-LN stack", "MiniLM": "fused MiniLM"}
SAME = "same bits"
EPS = {"torch.float32": 2.0**-23, "torch.float64": 2.0**-52}

Row = dict[str, Any]


def document() -> dict[str, Any]:
    """Return the results."""
    results: dict[str, Any] = jsonio.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def table(dtype: str) -> str:
    """Return the table of a dtype: a route in each row, an operation in each column, and the tolerances."""
    results = document()
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
    output, gradients = row["outputs"], row["gradients"]
    if gradients is None:
        text = f"{result(output)}, no gradients"
    elif output == gradients == SAME:
        text = SAME
    else:
        text = f"{result(output)}, {result(gradients)}"
    return f"{text} (not fused)" if row["fused"] is False else text


def result(value: str | float) -> str:
    """Return the comparison of one kind of tensors."""
    return value if isinstance(value, str) else number(value)


def number(value: float) -> str:
    """Return an error with two digits."""
    return f"{value:.1e}"


def where() -> str:
    """Return the machine and the versions."""
    results = document()
    versions = results["versions"]
    return f"{results['machine']['cpu']}, torch {versions['torch']}, {results['date'][:10]}."


SECTIONS = {
    "routes:float32": lambda: table("torch.float32"),
    "routes:float64": lambda: table("torch.float64"),
    "routes:where": where,
}


def main(words: Sequence[str]) -> int:
    """Run `page.main` for routes.md."""
    return page.main(words, PAGE, SECTIONS, "the results say")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
