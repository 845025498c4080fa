"""The harness of the benchmarks in this folder: from cases and a function that measures one of them to a results file.

A benchmark is a `Benchmark`: its cases, how one is measured, and the evaluation of its rows. `main` is its command line. The
parts that `addnorm bench` shares (cases, the run, the document, the stopwatch, targets) are in `addnorm.bench`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from addnorm._util.blocks import Column, Table
from addnorm._util.numbers import format_number, format_percent, format_seconds
from addnorm._util.render import to_markdown
from addnorm.bench import environment, timing
from addnorm.bench.harness import (
    Case,
    Document,
    Progress,
    Results,
    Row,
    Run,
    by_case,
    header,
    new_results,
    partial_path,
    publish,
    read,
    resumable,
    run_cases,
)
from addnorm.bench.tables import busy_warning, digits, headline

__all__ = [
    "RESULTS",
    "Benchmark",
    "Case",
    "Column",
    "Document",
    "Results",
    "Row",
    "by_case",
    "digits",
    "failure",
    "headline",
    "main",
    "markdown",
    "missed",
    "publish",
    "quotient",
    "read",
    "report",
    "run",
    "times_as_fast",
]

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Benchmark:
    """Benchmark: cases as data, the function that measures one, and the functions that evaluate the rows.

    Attributes:
        name: name of the results file, results/NAME.json.
        about: the measured quantity, in one line.
        fields: names of a case's values, in their order.
        cases: function of the number of threads: all cases.
        measure: function of a case, and of `rounds` and further options by name: its rows by part.
        summarize: function of the rows by part: each number beside its target.
        title: text of a case.
        parts: names of the lists of rows, "rows" the last.
        protocol: how it is measured, for the document, besides the rounds.
        extra: function of the rows by part: further keys of the document.
        threads: default number of threads.
        rounds: default number of rounds.
    """

    name: str
    about: str
    fields: tuple[str, ...]
    cases: Callable[[int], Sequence[Case]]
    measure: Callable[..., Results]
    summarize: Callable[[Results], list[Row]]
    title: Callable[[Case], str]
    parts: tuple[str, ...] = ("rows",)
    protocol: Row = field(default_factory=dict)
    extra: Callable[[Results], Document] = lambda results: {}
    threads: int = 2
    rounds: int = timing.ROUNDS
    schema: int = 1


def run(
    benchmark: Benchmark, cases: Sequence[Case] | None = None, *, threads: int | None = None, rounds: int | None = None,
    earlier: Document | None = None, progress: Progress | None = None, **options: Any,
) -> Document:  # fmt: skip
    """Measure the cases and return the document.

    Args:
        benchmark: the benchmark.
        cases: a part of its cases; None is all.
        threads: number of torch's threads.
        rounds: timed loops for each variant.
        earlier: unfinished document; its cases are not measured again.
        progress: called with one line before each case.
        options: options of the benchmark's `measure`; they are part of the protocol.
    """
    chosen = benchmark.cases(threads or benchmark.threads) if cases is None else [*cases]
    rounds = benchmark.rounds if rounds is None else rounds
    meter, before = environment.LoadMeter(), torch.get_num_threads()
    start = Run(new_results(*benchmark.parts))
    if earlier is not None:
        start.results = {part: earlier[part] for part in benchmark.parts}
        start.done = [Case.of(row, benchmark.fields) for part in benchmark.parts for row in earlier[part]]
        start.done = [*dict.fromkeys(start.done)]

    def measured(case: Case, _: float | None) -> Results:
        torch.set_num_threads(case.threads)
        return benchmark.measure(case, rounds=rounds, **options)

    timing.settle_allocator()
    try:
        done = run_cases(chosen, measured, start, title=benchmark.title, progress=progress)
    finally:
        torch.set_num_threads(before)
    return {
        **header(benchmark.schema, done),
        **environment.describe(),
        "threads": max((case.threads for case in chosen), default=before),
        **load_columns(meter, earlier),
        "protocol": protocol(benchmark, rounds, options),
        "summary": benchmark.summarize(done.results),
        **benchmark.extra(done.results),
        **done.results,
    }


def load_columns(meter: environment.LoadMeter, earlier: Document | None) -> Row:
    """Return the load of a run, with that of the run that it continues: the larger counts."""
    columns = meter.columns()
    if earlier is not None:
        columns["load"] = max(columns["load"] or 0.0, earlier["load"])
    return columns


def protocol(benchmark: Benchmark, rounds: int, options: Mapping[str, Any]) -> Row:
    """Return how a benchmark is measured, for the document."""
    results = {**timing.protocol(rounds), **benchmark.protocol, **options}
    return results if results["cell_seconds"] else {**results, "fewest_rounds": rounds}  # no time limit: all rounds run


def main(
    benchmark: Benchmark | Callable[[argparse.Namespace], Benchmark],
    arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    options: Callable[[argparse.Namespace], Row] = lambda given: {},
) -> int:
    """Measure, print and write; return 130 if the run was interrupted.

    Args:
        benchmark: the benchmark, or a function of the parsed arguments that returns it.
        arguments: adds arguments to the parser.
        options: function of the parsed arguments: the options of `measure`.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--threads", type=int, help="number of threads of torch")
    parser.add_argument("--rounds", type=int, help="timed loops for each variant")
    parser.add_argument("--quick", action="store_true", help="one case of each job, and no results file")
    parser.add_argument("--json", type=Path, help="results file (default: results/NAME.json)")
    parser.add_argument("--force", action="store_true", help="publish the results of a busy machine, marked as such")
    arguments(parser)
    given = parser.parse_args()
    chosen = benchmark if isinstance(benchmark, Benchmark) else benchmark(given)
    more = options(given)
    cases = chosen.cases(given.threads or chosen.threads)
    path = given.json or RESULTS / f"{chosen.name}.json"
    if given.quick:
        cases = [*{getattr(case, "job", None): case for case in reversed(cases)}.values()]  # the smallest of each job
    earlier = None if given.quick else unfinished(chosen, path, given.rounds or chosen.rounds, more)
    document = run(
        chosen, cases, rounds=given.rounds, earlier=earlier,
        progress=lambda line: print(line, file=sys.stderr, flush=True), **more,
    )  # fmt: skip
    print("\n".join(report(chosen, document)))
    published = True
    if not given.quick:
        published = publish(document, path, force=given.force)
    return 130 if not document["complete"] else 0 if published else 1


def unfinished(benchmark: Benchmark, path: Path, rounds: int, options: Mapping[str, Any]) -> Document | None:
    """Return what an interrupted run of the same clean commit, versions and protocol left, or None."""
    here = {**environment.describe(), "protocol": protocol(benchmark, rounds, options)}
    keys = ("commit", "dirty", "versions", "protocol")
    try:
        results = resumable([partial_path(path)], here, lambda document: {key: document[key] for key in keys})
    except ValueError:
        return None
    return None if results is None or results["dirty"] else results


def report(benchmark: Benchmark, document: Document) -> Iterator[str]:
    """Yield the lines that a script prints: times, failures, the summary."""
    yield from map(str, busy_warning(document))
    for case, rows in by_case(document["rows"], benchmark.fields).items():
        times = "   ".join(f"{name} {format_seconds(row['median_us'] / 1e6)}" for name, row in rows.items())
        yield f"{benchmark.title(case)}:   {times}"
    for row in document.get("failures", []):
        yield f"{row['variant']} failed in {benchmark.title(Case.of(row, benchmark.fields))}: {row['error']}"
    for one in document["summary"]:
        value = "not measured" if one["value"] is None else digits(one["value"])
        yield f"{value}  {one['name']}{'  MISSED' if one['met'] is False else ''}"
    for name, value in benchmark.extra({part: document[part] for part in benchmark.parts}).items():
        yield f"{name}: {value}"


def failure(case: Case, variant: str, error: Exception) -> Row:
    """Return a row of `failures`."""
    return case.row(variant=variant, error=f"{type(error).__name__}: {error}"[:300])


# ------------------------------------------------------------------------------------------------ tables of the pages


def markdown(columns: Sequence[str | Column], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown; empty without rows."""
    return to_markdown(Table(columns, rows)) if rows else ""


def right(*names: str) -> list[Column]:
    """Return right-aligned columns."""
    return [Column(name, "right") for name in names]


def times_as_fast(rows: Mapping[str, Row], peer: str, *, microseconds: bool = True, inverse: bool = False) -> str:
    """Return the peer's time over addnorm's (or the inverse), its spread and both times; empty where it was not measured."""
    if peer not in rows:
        return ""
    above, below = ("addnorm", peer) if inverse else (peer, "addnorm")
    text = quotient(rows, above, below)
    times = f"({digits(rows['addnorm']['median_us'])} / {digits(rows[peer]['median_us'])})"
    return f"{text} {times}" if microseconds else text


def quotient(rows: Mapping[str, Row], above: str, below: str) -> str:
    """Return the time of one variant over that of another, and its spread: half the way from quartile to quartile."""
    over, under = rows[above], rows[below]
    ratio = over["median_us"] / under["median_us"]
    spread = (over["q3_us"] / under["q1_us"] - over["q1_us"] / under["q3_us"]) / 2
    return f"**{ratio:.2f}** ±{format_percent(spread / ratio, 1).replace('%', ' %')}"


def missed(document: Document, otherwise: str) -> str:
    """Return which targets are missed, or the other sentence."""
    names = [f"{one['name']} ({digits(one['value'])})" for one in document["summary"] if one["met"] is False]
    return f"Missed: {'; '.join(names)}" if names else otherwise


def bound(one: Row) -> str:
    """Return the target of a row of a summary as text."""
    return "" if one["target"] is None else f"{one['compare']} {digits(one['target'], trim=True)}"


def two_digits(value: float | None) -> str:
    """Return a number with two significant digits."""
    return format_number(value, 2)
