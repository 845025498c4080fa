"""The whole matrix of `addnorm bench`. Writes results/functional.json, from which table.py makes tables of README.md and docs/.

python benchmarks/bench_functional.py [--threads 2] [--rounds 21] [--no-compile]

README.md in this folder has the protocol.
"""

from __future__ import annotations

import argparse

import harness
from harness import Document, Row, digits, headline, markdown, right, times_as_fast

from addnorm import bench
from addnorm.bench.accuracy import COLUMNS as ERRORS
from addnorm.bench.cases import FIELDS, JOBS, NORMS, PLAIN, SHAPES
from addnorm.bench.harness import by_case
from addnorm.bench.operation import is_settled

TRAINING = ("forward_backward", "dropout", "everything")
INFERENCE = ("forward", "reuse", "forward_stream", "in_place")
PEERS = {"compile": "`torch.compile` of the eager expression", "onnxruntime": "onnxruntime"}

MORE = "[All sizes](docs/performance.md), [all targets, met or not](docs/targets.md), [how it is measured](benchmarks/README.md)."
SPREAD = "± from quartile to quartile (median microseconds: addnorm / eager)"
README_SHAPES = ((1, 768), (512, 768), (8192, 768))

Sizes = dict[tuple[int, int, str], dict[tuple[str, str], dict[str, Row]]]


def main() -> int:
    """Measure, print, write; return 3 if a fact does not hold, 130 if the run was interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--threads", type=int, default=2, help="number of threads of torch (default 2, as in the targets)"
    )
    parser.add_argument("--rounds", type=int, default=bench.ROUNDS)
    parser.add_argument("--no-compile", dest="compiled", action="store_false", help="without torch.compile")
    parser.add_argument("--force", action="store_true", help="publish the results of a busy machine, marked as such")
    options = parser.parse_args()
    cases = bench.whole(threads=options.threads)
    document = bench.run(cases, rounds=options.rounds, compiled=options.compiled, progress=bench.console(stderr=True))
    bench.show(document, bench.console())
    published = harness.publish(document, harness.RESULTS / "functional.json", force=options.force)
    return 130 if not document["complete"] else 3 if bench.failed_proofs(document) else 0 if published else 1


# ------------------------------------------------------------------------------------------------ tables of the pages


def speed_section(document: Document) -> str:
    """Return README's section: some sizes, and where the rest is."""
    rows = [row for row in document["rows"] if (row["rows"], row["d"]) in README_SHAPES]
    return "\n\n".join([
        f"Times as fast as eager PyTorch, `F.layer_norm(x + branch)`, {SPREAD}:",
        times({**document, "rows": rows}, "layer", PLAIN),
        f"{headline(document)}. {MORE}",
    ])  # fmt: skip


def training_section(document: Document) -> str:
    """Return the tables of the jobs with backward."""
    return _against_eager(document, TRAINING)


def inference_section(document: Document) -> str:
    """Return the tables of the jobs without backward."""
    return _against_eager(document, INFERENCE)


def _against_eager(document: Document, jobs: tuple[str, ...]) -> str:
    return "\n\n".join(
        f"{title}, times as fast as eager PyTorch, {SPREAD}:\n\n{table}"
        for norm, title in NORMS.items() if (table := times(document, norm, jobs))
    )  # fmt: skip


def one_thread_section(document: Document) -> str:
    """Return the tables of every job on one thread; empty where the other tables are of one thread."""
    return "" if document["threads"] == 1 else "\n\n".join(
        f"{title}, one thread, times as fast as eager PyTorch:\n\n{table}"
        for norm, title in NORMS.items() if (table := times(document, norm, tuple(JOBS), threads=1, microseconds=False))
    )  # fmt: skip


def peers_section(document: Document) -> str:
    """Return the tables of ratios to torch.compile and onnxruntime."""
    sections = [
        f"Times as fast as {title}, {name}:\n\n{table}"
        for peer, title in PEERS.items() for norm, name in NORMS.items()
        if (table := times(document, norm, tuple(JOBS), peer, microseconds=False))
    ]  # fmt: skip
    version = document["peers"].get("onnxruntime")
    return "\n\n".join([*sections, f"onnxruntime: {version}."] if version else sections)


def states_section(document: Document) -> str:
    """Return the ratios of the largest sizes in both states of the allocator; empty where one state was measured."""
    by_name = {str(norm): name for norm, name in NORMS.items()}
    lines: list[list[str]] = []
    for (rows, d, dtype), cases in by_size(document, document["threads"]).items():
        for (norm, job), by_variant in cases.items():
            ours, eager = by_variant.get("addnorm", {}), by_variant.get("eager", {})
            other = next((state for state in ("kept", "fresh") if f"{state}_median_us" in ours), None)
            if other is not None:
                states = {ours["allocator"]: (ours["median_us"], eager["median_us"], ours["faults"], eager["faults"])}
                keys = (f"{other}_median_us", f"{other}_faults")
                states[other] = (ours[keys[0]], eager[keys[0]], ours[keys[1]], eager[keys[1]])
                cells = [
                    f"**{theirs / mine:.2f}** ({digits(mine)} / {digits(theirs)}; {faults:.0f} / {their_faults:.0f})"
                    for mine, theirs, faults, their_faults in (states["kept"], states["fresh"])
                ]
                lines.append([f"{rows} x {d}", dtype, by_name[norm], JOBS[job].title, *cells])
    title = (
        "Times as fast as eager with memory that the allocator keeps, and with fresh pages at each call "
        "(microseconds; page faults of a call: addnorm / eager):"
    )
    table = markdown([*right("rows x d"), "dtype", "norm", "job", *right("kept", "fresh")], lines)
    return f"{title}\n\n{table}" if lines else ""


def targets_section(document: Document) -> str:
    """Return the table of all numbers of the summary, also those without a target."""
    sections = []
    for threads in dict.fromkeys(one["threads"] for one in document["summary"] if one["norm"]):
        rows = [one for one in document["summary"] if one["norm"] and one["threads"] == threads]
        title = "" if threads == document["threads"] else f"With {threads} thread, for which there are no targets:\n\n"
        sections.append(title + targets(rows))
    return "\n\n".join([*sections, f"{headline(document)}."])


def saved_section(document: Document) -> str:
    """Return the table of bytes saved for backward."""
    prefix = "saved bytes, "
    lines = [
        [fact["name"].removeprefix(prefix), NORMS[fact["norm"]], digits(fact["value"]), digits(fact["torch"])]
        for fact in document["facts"] if fact["name"].startswith(prefix)
    ]  # fmt: skip
    return markdown(["saved by autograd, bytes, without the parameters", "norm", *right("addnorm", "PyTorch")], lines)


def accuracy_section(document: Document) -> str:
    """Return the table of errors with every option on."""
    names = {"addnorm": "addnorm", "eager": "PyTorch"}
    lines = [
        [
            NORMS[one["norm"]],
            one["dtype"],
            names[one["variant"]],
            *(harness.two_digits(one.get(name)) for name in ERRORS),
        ]
        for one in document["accuracy"]
    ]
    return markdown(["norm", "dtype", "", *right(*ERRORS)], lines)


def times(
    document: Document, norm: str, names: tuple[str, ...], peer: str = "eager",
    *, threads: int | None = None, microseconds: bool = True,
) -> str:  # fmt: skip
    """Return a table with a line a size and dtype and a column a job that was measured with the peer; empty if none was."""
    sizes = by_size(document, threads or document["threads"])
    jobs = [job for job in names if any(peer in cases.get((norm, job), {}) for cases in sizes.values())]
    lines = []
    for (rows, d, dtype), cases in sizes.items():
        ratios = [times_as_fast(cases.get((norm, job), {}), peer, microseconds=microseconds) for job in jobs]
        if any(ratios):
            lines.append([f"{rows} x {d}", dtype, *ratios])
    return markdown([*right("rows x d"), "dtype", *right(*(JOBS[job].title for job in jobs))], lines)


def targets(rows: list[Row]) -> str:
    """Return a table of the summary: the number beside its target, a column a norm."""
    rows = [one for one in rows if one["norm"] and one["value"] is not None]
    norms = dict.fromkeys(one["norm"] for one in rows)
    results: dict[tuple[str, str], dict[str, str]] = {}
    for one in rows:
        missed = " (missed)" if one["met"] is False else ""
        name = f"{one['name']} ({one['versus']})"
        results.setdefault((name, harness.bound(one)), {})[one["norm"]] = digits(one["value"]) + missed
    lines = [[*name, *(values.get(norm, "") for norm in norms)] for name, values in results.items()]
    return markdown(["measured over the cases", "target", *right(*(NORMS[norm] for norm in norms))], lines)


def by_size(document: Document, threads: int) -> Sizes:
    """Return the rows by (rows, d, dtype), in the order of the sizes, then by (norm, job), then by variant."""

    def order(item: tuple[harness.Case, dict[str, Row]]) -> tuple[int, int, int]:
        rows, d = item[0].rows, item[0].d
        return (SHAPES.index((rows, d)) if (rows, d) in SHAPES else len(SHAPES)), rows, d

    results: Sizes = {}
    for case, row in sorted(by_case(document["rows"], FIELDS).items(), key=order):
        if case.threads == threads:
            kept = {name: one for name, one in row.items() if is_settled(case, one)}
            results.setdefault((case.rows, case.d, case.dtype), {})[case.norm, case.job] = kept
    return results


if __name__ == "__main__":
    raise SystemExit(main())
