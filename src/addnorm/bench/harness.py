"""The harness of every benchmark: a declaration, a run of its cases one after the other, resuming, and the JSON document.

A benchmark is a `Benchmark`: its cases as data, a function that measures one of them, and its targets. `run` measures the
cases and returns the document, `write` saves it, and `find_earlier` reads an unfinished one, which the next run can continue.
`main` is the command line of a benchmark's file: arguments from its declaration, a run, a report on stdout, and the results file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from addnorm._util import files, jsonio
from addnorm._util.numbers import format_seconds
from addnorm.bench import environment, timing
from addnorm.bench.case import Case, Document, Measured, Progress, Results, Row, Selection, Target, by_case, select
from addnorm.bench.pages import busy, find_load, markdown, target_lines, unfinished

MAX_LOAD = 1.0  # before a run whose times are published


@dataclass(frozen=True)
class Benchmark:
    """Benchmark: cases as data, the function that measures one case, and the targets of its result rows.

    Attributes:
        name: name of the results file, NAME.json.
        cases: all cases, the most important first; or a function of a selection (values by field) and of the number of threads,
            which selects them itself.
        measure: function of a case, of `rounds`, and of the options by name. It returns the case's rows by part.
        title: function of a case that returns its text.
        targets: the targets of the rows, or a function of the document that returns the targets.
        parts: names of the lists of rows, "rows" the last.
        protocol: settings of the measurement, for the document, besides the rounds.
        options: options of `measure`. True becomes a flag that turns the option off, a tuple the choices for a list of values.
        describe: function of the cases that returns further keys of the document about the environment.
        finish: function of the rows by part and of the document's head. It returns the parts to be written, and further keys.
        sections: functions of the document that return a section of a page, by "page#section".
        threads: default number of threads. 0 means torch's number of threads.
        rounds: default number of rounds.
        budget: default number of seconds after which no case begins. None: no limit.
        idle: whether results are published only from an idle machine and a clean checkout.
        verdicts: function of the document that returns further keys, computed from its numbers.
        device: default type of device.
        fields: names of a case's values; empty: those of the first case, and `threads`. The harness sets `device` and `threads`.
    """

    name: str
    cases: Sequence[Case] | Callable[[Selection, int], Sequence[Case]]
    measure: Callable[..., Results]
    title: Callable[[Case], str] = str
    targets: Iterable[Target] | Callable[[Document], Iterable[Target]] = ()
    parts: tuple[str, ...] = ("failures", "rows")
    protocol: Row = field(default_factory=dict)
    options: Row = field(default_factory=dict)
    describe: Callable[[Sequence[Case]], Document] = lambda cases: {}
    finish: Callable[[Results, Document], Document] = lambda results, head: results
    sections: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    threads: int = 2
    rounds: int = timing.ROUNDS
    budget: float | None = None
    idle: bool = True
    verdicts: Callable[[Document], Document] = lambda document: {}
    device: str = "cpu"
    fields: tuple[str, ...] = ()
    schema: int = 1

    def __post_init__(self) -> None:
        if not self.fields:
            object.__setattr__(self, "fields", (*vars(self.plan()[0]), "threads"))

    def plan(self, threads: int | None = None, selected: Selection | None = None) -> list[Case]:
        """Return the cases, or the `selected` ones.

        Raises:
            ValueError: no case is selected.
        """
        chosen, n = dict(selected or {}), threads or self.threads
        (device,) = chosen.pop("device", [self.device])
        cases = self.cases(chosen, n) if callable(self.cases) else select(self.cases, chosen)
        common = {name: value for name, value in (("device", device), ("threads", n)) if name in self.fields}
        return [*dict.fromkeys(case.but(**{**common, **vars(case)}) for case in cases)]

    def by_case(self, document: Document) -> Measured:
        """Return each case of a document, with its result rows by variant."""
        return by_case(document.get("rows", []), self.fields)

    def failures(self, document: Document) -> Iterator[str]:
        """Yield a sentence for each variant that failed."""
        for row in document.get("failures", []):
            where = self.title(Case.of(row, self.fields))
            yield f"{row['variant']} failed in {where}: {' '.join(row['error'].split())}"

    def judge(self, document: Document) -> Document:
        """Return `summary`, the numbers of a document beside their targets if there are any, and the keys of `verdicts`."""
        targets = self.targets(document) if callable(self.targets) else self.targets
        # Numbers that `measure` has judged itself.
        direct = [row for row in document.get("summary", []) if "cells" not in row]
        cases = self.by_case(document) if targets else ()
        summary = [row for target in targets for row in target.rows(cases, self.title)] + direct
        # Claims have verdicts in place of a summary.
        judged = {"summary": summary} if targets or "summary" in document else {}
        return judged | self.verdicts(document)


def run(
    benchmark: Benchmark, cases: Sequence[Case] | None = None, *, budget: float | None = None,
    earlier: Document | None = None, path: Path | None = None, progress: Progress = lambda line: None,
    here: Document | None = None, **options: Any,
) -> Document:  # fmt: skip
    """Measure the cases and return the document. After an interrupt it has the finished cases, and `complete` is False.

    Args:
        benchmark: the benchmark.
        cases: the cases to measure; None: all cases of the benchmark.
        budget: seconds after which no further case begins, which ends the run as intended. The first case is always measured.
        earlier: document to continue (`find_earlier`): its cases are not measured again.
        path: file of the results. After each case the unfinished document is written beside it, to `partial_path(path)`.
        progress: called with one line before each case.
        here: description of the environment; None: `environment.describe` and the benchmark's own keys.
        options: `rounds`, and the benchmark's options.
    """
    chosen, earlier = benchmark.plan() if cases is None else [*cases], earlier or {}
    if here is None:
        here = {**environment.describe(), **benchmark.describe(chosen)}
    options = {"rounds": benchmark.rounds, **options}
    measure_load, start, before = environment.meter_load(), time.monotonic(), torch.get_num_threads()
    results: Results = {part: [*earlier.get(part, [])] for part in benchmark.parts}
    done = [Case(**values) for values in earlier.get("cells", [])]
    if earlier.get("ended") == "done":  # its document does not list the cases
        done = chosen
    threads = max([case.threads for case in chosen if "threads" in vars(case)] or [benchmark.threads])

    def find_left() -> list[Case]:
        return [case for case in chosen if case not in done]

    def document(ended: str | None) -> Document:
        load, left = measure_load(), find_left()
        load["load"] = max(load["load"] or 0.0, earlier.get("load", 0.0))  # the larger counts
        head = {
            "schema": benchmark.schema, "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "complete": ended in ("done", "budget"), "ended": ended,
            "seconds": earlier.get("seconds", 0.0) + time.monotonic() - start, **here, "threads": threads or before, **load,
            "protocol": {**timing.protocol(options["rounds"]), **benchmark.protocol, **options},
        }  # fmt: skip
        if left:
            head |= {"cells": [*map(vars, done)], "left": [*map(vars, left)]}
        parts = benchmark.finish(results, head)
        judged = benchmark.judge({**head, **parts})
        return {**head, **judged, **parts, **judged}  # judged keys come first and keep their values

    timing.settle_allocator()
    ended, todo = "done", find_left()
    try:
        for i, case in enumerate(todo, 1):
            seconds = time.monotonic() - start
            if budget and seconds > budget and i > 1:
                ended = "budget"
                break
            progress(f"{i:3}/{len(todo)}  {seconds:5.0f} s  {benchmark.title(case)}")
            torch.set_num_threads(getattr(case, "threads", threads) or before)
            for part, rows in benchmark.measure(case, **options).items():
                results[part] += rows
            done.append(case)
            if path is not None and i < len(todo):
                write(document(None), path)
    except KeyboardInterrupt:
        ended = "interrupt"
    finally:
        torch.set_num_threads(before)
        timing.settle_allocator("default")
    return document(ended)


def partial_path(path: Path) -> Path:
    """Return the path of the unfinished document of the results file `path`: NAME.partial.json."""
    return path.with_suffix(f".partial{path.suffix}")


def read(path: Path) -> Document:
    """Return the document in a file."""
    return dict(jsonio.loads(path.read_text(encoding="utf-8")))


def write(document: Document, path: Path) -> Path:
    """Write a document atomically, one row a line, and return its path.

    An unfinished document goes to `partial_path` and never replaces a complete one. Writing a complete document removes the
    unfinished one.
    """
    if not document["complete"]:
        return files.write_text(partial_path(path), jsonio.dumps(document))
    files.write_text(path, jsonio.dumps(document))
    partial_path(path).unlink(missing_ok=True)
    return path


def failed_proofs(document: Document) -> list[Row]:
    """Return the facts that do not hold. Times prove nothing, since they depend on the machine."""
    return [fact for fact in document.get("facts", []) if not fact["met"]]


def find_obstacle(document: Document) -> str | None:
    """Return why a document of times is not published, in words, or None: a changed checkout, or a machine that was not idle."""
    if document.get("dirty"):
        return "the checkout has changes, expected the code of its commit"
    return find_load(document, MAX_LOAD)


def find_earlier(path: Path, here: Document) -> Document | None:
    """Return the document that an earlier run left unfinished, or None.

    Args:
        path: file of the results.
        here: description of this run's environment.

    Raises:
        ValueError: the earlier run was measured on another device, with other versions or of another commit.
    """
    earlier = next((one for one in (partial_path(path), path) if one.exists()), None)
    if earlier is None:
        return None
    document = read(earlier)
    for name in ("device", "versions", "commit"):
        theirs, mine = document.get(name), here.get(name)
        if theirs != mine:
            remedy = "measure again without --resume, or choose another --json"
            raise ValueError(f"{earlier.name} has {name} {theirs}, expected {mine}: {remedy}")
    return document


# -------------------------------------------------------------------------------------------------------- command line


def main(benchmark: Benchmark, words: Sequence[str] | None = None) -> int:
    """Run a benchmark from the command line: measure, print a report, and write the results to `results` beside the script.

    Args:
        benchmark: the benchmark.
        words: the arguments; None: those of the command line.

    Returns:
        The exit code: 0; 1 if the results are not published; 2 for wrong arguments; 3 if the measured code is wrong; 130 if
        the run was interrupted.
    """
    given = _parser(benchmark).parse_args(words)
    selected = {name: some for name in benchmark.fields if name != "threads" and (some := getattr(given, name))}
    (device,) = selected.get("device", [benchmark.device])
    name = benchmark.name if device == benchmark.device else f"{benchmark.name}_{device}"
    results = Path(sys.argv[0]).parent / "results" / f"{name}.json"
    if given.judge:
        stored = read(results)
        write({**stored, **benchmark.judge(stored)}, results)
        return 0
    options = {"rounds": given.rounds, **{name: getattr(given, name) for name in benchmark.options}}
    is_part = (
        device != benchmark.device == "cuda"  # times of a CPU in place of a GPU's
        or {*selected} - {"device"}
        or any(options[name] for name, value in benchmark.options.items() if value is not True)
    )
    path = given.json or (Path(tempfile.gettempdir()) / f"addnorm-{results.name}" if is_part else results)
    try:
        cases = benchmark.plan(given.threads, selected)
        if given.list:
            print("\n".join(map(benchmark.title, cases)))
            return 0
        here = {**environment.describe(), **benchmark.describe(cases)}
        here["commit"] = here["commit"] or given.commit
        earlier = find_earlier(path, here) if given.resume else None
    except ValueError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    document = run(
        benchmark, cases, budget=given.budget, earlier=earlier, path=path, here=here,
        progress=lambda line: print(line, file=sys.stderr, flush=True), **options,
    )  # fmt: skip
    print("\n".join(filter(None, report(benchmark, document))))
    reason = find_obstacle(document) if benchmark.idle and document["complete"] else None
    if reason is None:
        print(f"Written: {write(document, path)}")
    else:  # times of a busy machine, or of code that no commit has
        partial_path(path).unlink(missing_ok=True)
        written = write(document, path.with_suffix(f".busy{path.suffix}"))
        print(f"Not published, {reason}: written to {written}; measure again.")
    if not document["complete"]:
        print(f"Cut short ({document['ended']}): the same command with --resume continues.", file=sys.stderr)
        return 130
    return 3 if failed_proofs(document) else 1 if reason else 0


def _parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    add = parser.add_argument
    add("--threads", type=_positive, help="number of threads of torch")
    add("--rounds", type=_positive, default=benchmark.rounds, help=f"(default {benchmark.rounds})")
    add("--budget", type=float, default=benchmark.budget, help="seconds after which no case begins; 0: none")
    add("--json", type=Path, help="results file (default results/NAME.json; for a part a temporary file)")
    add("--resume", action="store_true", help="continue the run in the results file")
    add("--judge", action="store_true", help="judge the stored numbers again, after a target has changed")
    add("--commit", help="commit of the sources, if they are a copy and no checkout")
    add("--list", action="store_true", help="list the cases and measure nothing")
    for name in benchmark.fields:
        values = [*dict.fromkeys(getattr(case, name) for case in benchmark.plan() if hasattr(case, name))]
        if name == "device":
            add("--device", nargs=1, choices=("cpu", "cuda"))
        elif name != "threads":
            kind = type(values[0])
            words = {"choices": values} if kind is str else {"type": _positive if kind is int else float}
            add(f"--{name.replace('_', '-')}", nargs="+", help="only these cases", **words)
    for name, value in benchmark.options.items():
        if value is True:
            add(f"--no-{name}", dest=name, action="store_false")
        else:
            add(f"--{name}", nargs="+", choices=value)
    return parser


def _positive(text: str) -> int:
    """Parse a whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def report(benchmark: Benchmark, document: Document) -> Iterator[str]:
    """Yield the lines that a script prints: times, failures, and the numbers beside their targets; then warnings."""
    timed = [row for row in document.get("rows", []) if "median_us" in row]
    for case, rows in by_case(timed, benchmark.fields):
        times = "   ".join(f"{name} {format_seconds(row['median_us'] / 1e6)}" for name, row in rows.items())
        yield f"{benchmark.title(case)}:   {times}"
    yield from benchmark.failures(document)
    yield markdown(target_lines(document.get("summary", [])))
    if benchmark.idle:
        yield busy(document)
    yield unfinished(document)
