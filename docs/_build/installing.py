"""Write the table of docs/installing.md: the wheel in each Python and torch, from benchmarks/results/wheels.json."""

from __future__ import annotations

from typing import Any

import page


def wheels() -> str:
    """Return the table of the environments, and what the audit of the wheel says."""
    document = page.document("wheels")
    rows = [row for row in document["rows"] if row["file"] == document["wheel"]]
    pythons, torches = ([*dict.fromkeys(row[key] for row in rows)] for key in ("with", "of"))
    cells = {(row["with"], row["of"]): _cell(row) for row in rows}
    table = page.table(
        ["Python", *(f"torch {torch}" for torch in torches)],
        [[python, *(cells.get((python, torch), "") for torch in torches)] for python in pythons],
    )
    (pure,) = [row for row in document["rows"] if row["file"].endswith("-any.whl")]
    return (
        f"{table}\n\n`{document['wheel']}`, {document['bytes'] / 1e6:.1f} MB. torch-abi-audit: {document['audit'].lower()} "
        "interface (the oldest torch that it names is too new: it counts functions that are used only where torch has them). "
        f"With the wheel without kernels, `addnorm.backends()` says of them: {pure['kernels']}."
    )


def _cell(row: dict[str, Any]) -> str:
    """Return the largest error of outputs and gradients in float32, in its machine epsilons, or why there is none."""
    if "error" in row:
        return "torch has no wheel" if "only found wheels" in row["error"] else row["error"]
    return f"works, {row['worst']['float32']:.1f} eps"


SECTIONS = {"installing:wheels": wheels}
