"""`addnorm bench`: the speed and the accuracy of the operation on this machine, in tables: the ratio first, then the times."""

import os
from collections.abc import Iterator
from pathlib import Path

import click

from addnorm._util.blocks import Block, Paragraph
from addnorm._util.files import check_writable
from addnorm._util.norms import Norm
from addnorm._util.numbers import format_count
from addnorm._util.render import print_blocks
from addnorm.bench import harness, operation, timing
from addnorm.bench.case import Case, Document, Rows
from addnorm.bench.jobs import JOBS, NORMS
from addnorm.bench.operation import BENCHMARK, error_lines
from addnorm.bench.pages import Line, busy, digits, headline, size_columns, table, target_lines, unfinished
from addnorm.cli._output import ArgumentError, argument_errors, print_json, save_result, stdout, working

# `addnorm bench --quick`: does it work, and roughly how fast is it?
QUICK_SHAPES = ((1, 768), (128, 768), (512, 768))
QUICK_ROUNDS = 5
PEERS = {"x eager": "eager", "x compile": "compile", "x onnx": "onnxruntime"}


def run(
    target: str | None,
    norms: tuple[Norm, ...],
    dtypes: tuple[str, ...],
    threads: int | None,
    rounds: int | None,
    quick: bool,
    compiled: bool | None,
) -> None:
    """Measure the speed and the accuracy of add + norm against PyTorch."""
    if target == "":
        raise ArgumentError("--json is '', expected the path of a file, or - for stdout")
    file = None if target in (None, "-") else Path(target)
    if file is not None:
        with argument_errors():
            check_writable(file, name="--json")
    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise ArgumentError(f"--threads is {threads}, expected at most {cores}, the cores of this machine")
    chosen = norms or tuple(NORMS), dtypes or operation.DTYPES
    cases = operation.plan(operation.matrix(*chosen, threads, QUICK_SHAPES if quick else ()))
    with working("measuring", len(cases)) as advance:
        document = harness.run(
            BENCHMARK,
            cases,
            rounds=rounds or (QUICK_ROUNDS if quick else timing.ROUNDS),
            compile=not quick if compiled is None else compiled,
            progress=lambda line: advance(),
        )
    if file is not None:
        save_result(file, lambda path: harness.write(document, path), "--json")
    if target == "-":
        print_json(document)
    else:
        print_blocks(stdout(), *list_blocks(document))
    if not document["complete"]:
        raise KeyboardInterrupt
    click.get_current_context().exit(3 if harness.failed_proofs(document) else 0)


def list_blocks(document: Document) -> Iterator[Block]:
    """Yield the tables of every norm and job, the summary, the facts, the errors and the failures."""
    yield Paragraph(headline(document))
    rounds = format_count(document["protocol"]["rounds"], "interleaved round")
    yield Paragraph(
        f"Medians of up to {rounds}, in microseconds; spread: from quartile to "
        "quartile. Bandwidth: of the bytes that must move, as a share of what torch.add(out=) of that size reaches. "
        "Error: relative L2, against float64 over the same z."
    )
    if warning := busy(document):
        words = "The machine was busy"
        yield Paragraph((words, "warning"), warning.removeprefix(words))
    tables: dict[str, list[Line]] = {}
    for case, rows in BENCHMARK.by_case(document):
        threads = format_count(case.threads, "thread")
        name = f"{NORMS[case.norm]}: {JOBS[case.job].title}, {threads}"
        tables.setdefault(name, []).append(_times(case, rows))
    tables["Targets of the times"] = [*target_lines(document["summary"])]
    tables["Facts on every machine"] = [*target_lines(document["facts"])]
    tables["All options: relative error against float64"] = [
        {name.replace("_", "_\n").replace("resi", "resi-\n"): cell for name, cell in line.items()}  # 100 columns
        for line in error_lines(document)
    ]
    for name, lines in tables.items():
        if lines:
            yield Paragraph((name, "strong"), space=True)
            yield table(lines)
    for failure in BENCHMARK.failures(document):
        yield Paragraph(failure, style="warning")
    if not document["complete"]:
        yield Paragraph(("Interrupted:", "warning"), f" {unfinished(document)}")


def _times(case: Case, rows: Rows) -> Line:
    ours = rows["addnorm"]
    ratios = {name: rows[peer]["median_us"] / ours["median_us"] for name, peer in PEERS.items() if peer in rows}
    width = f"{(ours['q3_us'] - ours['q1_us']) / ours['median_us']:.0%}" if ours["rounds"] > 1 else "-"
    return {
        **{name: (f"{value:.2f}", "strong" if name == "x eager" else "") for name, value in ratios.items()},
        **size_columns(case), "addnorm": digits(ours["median_us"]), "spread": width,
        "eager": digits(rows["eager"]["median_us"]), "add(out=)": digits(rows["add"]["median_us"]),
        "bandwidth": f"{ours['share_of_add_bandwidth']:.0%}",
    }  # fmt: skip
