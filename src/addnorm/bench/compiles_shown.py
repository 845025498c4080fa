"""The tables of a document of `compiles`: times, errors and bits, and the choice that follows, in a sentence."""

from __future__ import annotations

from addnorm.bench import compiles
from addnorm.bench.frame import Document
from addnorm.bench.tables import digits, headline
from addnorm.bench.ways import JOBS

__all__ = ["contract", "times"]

PEERS = {"formula": "the formula", "torch": "torch alone", "eager": "eager addnorm"}
NORMS = {"layer": "LayerNorm", "rms": "RMSNorm"}
RESULTS = ("y", "z", "residual", "branch", "weight", "bias")
COMPILED = ("op", "formula", "torch")


def times(document: Document) -> str:
    """A line a cell: the operator's time, and how many times as fast it is as the others; then what was chosen."""
    head = [
        "what is compiled",
        "norm",
        "rows x d",
        "dtype",
        "the operator, us",
        *(f"x {name}" for name in PEERS.values()),
    ]
    lines = [head, [":--", ":--", "--:", ":--", *["--:"] * (len(PEERS) + 1)]]
    for cell, found in compiles.by_cell(document["rows"]).items():
        ratios = [compiles.ratio(found, "op", peer) for peer in PEERS]
        shown = ["" if value is None else f"{value:.2f}" for value in ratios]
        time = digits(found["op"]["median_us"]) if "op" in found else "failed"
        lines.append(
            [JOBS[cell.job].title, NORMS[cell.norm], f"{cell.rows} x {cell.d}", cell.dtype, time, *shown],
        )
    title = "Medians; how many times as fast the operator is, above 1, or how much slower, below:"
    return f"{title}\n\n{_markdown(lines)}\n\n{verdict(document)} {headline(document)}."


def verdict(document: Document) -> str:
    """What `compiles.choice` found, and what follows."""
    made = document["choice"]
    form = {"op": "the operator", "formula": "the formula"}[made["form"]]
    return (
        f"On {document['device']} a compiled call is therefore **{form}**: the formula is more than {made['faster']:g} times as "
        f"fast as the operator in {made['cells_faster']} of {made['cells']} cells, {made['errors_within']} of its "
        f"{made['errors']} errors are within the contract, and it keeps its bits in {made['bits_kept']} of {made['bits']} cells."
    )


def contract(document: Document) -> str:
    """A line for each cell of training without options and each variant: errors, those over their limit marked; then bits."""
    lines = [["norm", "rows x d", "dtype", "", *RESULTS], [":--", "--:", ":--", ":--", *["--:"] * len(RESULTS)]]
    errors: dict[compiles.Cell, dict[str, dict[str, str]]] = {}
    for row in document["errors"]:
        cell = compiles.Cell._make(row[name] for name in compiles.Cell._fields)
        over = "" if row["error"] <= row["limit"] else " (over)"
        errors.setdefault(cell, {}).setdefault(row["variant"], {})[row["what"]] = f"{row['error']:.1e}{over}"
    for cell, found in errors.items():
        for variant in filter(found.__contains__, COMPILED):
            shown = [found[variant].get(name, "") for name in RESULTS]
            lines.append([NORMS[cell.norm], f"{cell.rows} x {cell.d}", cell.dtype, variant, *shown])
    bits = [["dtype", "", "another run", "another number of threads", "fewer rows"], [":--", ":--", *[":--"] * 3]]
    for row in document["bits"]:
        if row["variant"] in COMPILED:
            same = ["the same" if row[name] else "others" for name in ("run", "threads_kept", "rows_kept")]
            bits.append([row["dtype"], row["variant"], *same])
    norm, rows, d = compiles.BITS
    return (
        "Relative errors against float64 at the z that was returned, y and the stream with backward; over: more than the bounds "
        f"of [numerics.md](numerics.md) allow:\n\n{_markdown(lines)}\n\nBits of the results, {NORMS[norm]}, {rows} x {d}:\n\n"
        f"{_markdown(bits)}"
    )


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
