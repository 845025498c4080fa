"""The whole matrix of `addnorm bench`. Writes results/functional.json, from which table.py makes tables of README.md and docs/.

README.md in this folder has the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from addnorm.bench.case import Document, Rows, has
from addnorm.bench.harness import main
from addnorm.bench.jobs import JOBS, NORMS
from addnorm.bench.operation import BENCHMARK as OPERATION
from addnorm.bench.operation import PLAIN, TIMED, error_lines
from addnorm.bench.pages import digits, headline, markdown, merge, quotient, size_columns

TRAINING = ("forward_backward", "dropout", "everything")
INFERENCE = ("forward", "reuse", "forward_stream", "in_place")
PEERS = {"compile": "`torch.compile` of the eager expression", "onnxruntime": "onnxruntime"}

MORE = "[All sizes](docs/performance.md), [all targets, met or not](docs/targets.md), [how it is measured](benchmarks/README.md)."
SPREAD = "times as fast as eager PyTorch, ± from quartile to quartile (median microseconds: addnorm / eager)"
README_SHAPES = ((1, 768), (512, 768), (8192, 768))


def times(title: str, document: Document, jobs: Sequence[str], peer: str = "eager", threads: int = 0) -> str:
    """Return a table for each norm: a line a size and dtype, a column a job that was measured with the peer.

    Args:
        title: what the numbers are.
        document: the results.
        jobs: the columns.
        peer: the variant that addnorm is compared with.
        threads: number of threads; 0 is that of the document, whose table has both times too.
    """
    n = threads or document["threads"]
    tables = {
        name: merge(
            (size_columns(case), {JOBS[case.job].title: quotient(rows, peer, times=peer == "eager" and not threads)})
            for case, rows in OPERATION.by_case(document) if has(norm=norm, threads=n, job=jobs)(case) and peer in rows
        )
        for norm, name in NORMS.items()
    }  # fmt: skip
    return "\n\n".join(f"{name}, {title}:\n\n{markdown(lines)}" for name, lines in tables.items() if lines)


def speed_section(document: Document) -> str:
    """Return README's section: some sizes, and where the rest is."""
    rows = [row for row in document["rows"] if (row["rows"], row["d"]) in README_SHAPES and row["norm"] == "layer"]
    table = times(SPREAD, {**document, "rows": rows}, PLAIN)
    return f"{table}\n\n{headline(document)}. {MORE}"


def one_thread_section(document: Document) -> str:
    """Return the tables of every job on one thread; empty where the other tables are of one thread."""
    title = "one thread, times as fast as eager PyTorch"
    return "" if document["threads"] == 1 else times(title, document, TIMED, threads=1)


def peers_section(document: Document) -> str:
    """Return the tables of ratios to torch.compile and onnxruntime."""
    sections = [times(f"times as fast as {title}", document, TIMED, peer) for peer, title in PEERS.items()]
    version = document["peers"].get("onnxruntime")
    return "\n\n".join(filter(None, [*sections, f"onnxruntime: {version}." if version else ""]))


def states_section(document: Document) -> str:
    """Return the ratios of the largest sizes in both states of the allocator; empty where one state was measured."""

    def cell(rows: Rows, state: str) -> str:
        both = [rows[name] for name in ("addnorm", "eager")]
        prefix = "" if both[0]["allocator"] == state else f"{state}_"
        (mine, theirs), faults = ([row[f"{prefix}{key}"] for row in both] for key in ("median_us", "faults"))
        return f"**{theirs / mine:.2f}** ({digits(mine)} / {digits(theirs)}; {faults[0]:.0f} / {faults[1]:.0f})"

    lines = [
        {
            **size_columns(case), "norm": NORMS[case.norm], "job": JOBS[case.job].title,
            **{state: cell(rows, state) for state in ("kept", "fresh")},
        }
        for case, rows in OPERATION.by_case(document)
        if {"kept_median_us", "fresh_median_us"} & {*rows.get("addnorm", {})}
    ]  # fmt: skip
    title = (
        "Times as fast as eager with memory that the allocator keeps, and with fresh pages at each call "
        "(microseconds; page faults of a call: addnorm / eager):"
    )
    return f"{title}\n\n{markdown(lines)}" if lines else ""


def saved_section(document: Document) -> str:
    """Return the table of bytes saved for backward."""
    prefix = "saved bytes, "
    return markdown(
        {
            "saved by autograd, bytes, without the parameters": fact["name"].removeprefix(prefix), "norm": NORMS[fact["norm"]],
            "addnorm": digits(fact["value"]), "PyTorch": digits(fact["torch"]),
        }
        for fact in document["facts"] if fact["name"].startswith(prefix)
    )  # fmt: skip


BENCHMARK = replace(OPERATION, sections={
    "README.md#speed": speed_section,
    "docs/performance.md#training": partial(times, SPREAD, jobs=TRAINING),
    "docs/performance.md#saved": saved_section,
    "docs/performance.md#inference": partial(times, SPREAD, jobs=INFERENCE),
    "docs/performance.md#states": states_section, "docs/performance.md#peers": peers_section,
    "docs/performance.md#one-thread": one_thread_section,
    "docs/numerics.md#accuracy": lambda document: markdown(error_lines(document)),
})  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
