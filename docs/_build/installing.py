"""Write the table of docs/installing.md: the wheel in each Python and torch, from benchmarks/results/wheels.json."""

from __future__ import annotations

import page

SECTIONS = {}


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
    audit = document["audit"]
    return (
        f"{table}\n\n`{document['wheel']}`, {document['bytes'] / 1e6:.1f} MB. torch-abi-audit: {audit['Torch ABI'].lower()} "
        f"interface, torch {audit['Min torch']} or newer. The wheel without kernels, with torch {torches[-1]}: "
        f"{', '.join(_cell(row) for row in document['rows'] if row not in rows)}."
    )


def _cell(row: dict[str, object]) -> str:
    """Return what runs in an environment, or why nothing does."""
    return str(row.get("kernels") or row["error"]).removesuffix(" (AVX512)")


SECTIONS = {"wheels": wheels}
