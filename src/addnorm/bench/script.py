"""The command line of a benchmark's file: arguments from its declaration, a run, a report on stdout, and the results file."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from addnorm._util.numbers import format_seconds
from addnorm.bench import environment
from addnorm.bench.case import Case, Document
from addnorm.bench.harness import Benchmark, failed_proofs, find_earlier, find_obstacle, partial_path, read, run, write
from addnorm.bench.pages import busy, judged, unfinished

DEVICES = ("cpu", "cuda")


def main(benchmark: Benchmark, words: Sequence[str] | None = None, folder: Path | None = None) -> int:
    """Run a benchmark from the command line: measure, print a report, and write the results.

    Args:
        benchmark: the benchmark.
        words: the arguments; None: those of the command line.
        folder: folder of the results; None: `results` beside the script.

    Returns:
        The exit code: 0; 1 if the results are not published; 2 for wrong arguments; 3 if the measured code is wrong; 130 if
        the run was interrupted.
    """
    given = _parser(benchmark).parse_args(words)
    selected = {name: some for name in benchmark.fields if name != "threads" and (some := getattr(given, name))}
    (device,) = selected.get("device", [benchmark.device])
    is_trial = device != benchmark.device == "cuda"  # times of a CPU in place of a GPU's
    name = f"{benchmark.name}_{device}" if device != benchmark.device == "cpu" else benchmark.name
    results = (folder or Path(sys.argv[0]).parent / "results") / f"{name}.json"
    if given.judge:
        stored = read(results)
        write({**stored, **benchmark.judge(stored)}, results)
        return 0
    options = {"rounds": given.rounds, **{name: getattr(given, name) for name in benchmark.options}}
    chosen = [options[name] for name, value in benchmark.options.items() if isinstance(value, tuple)]
    part = is_trial or {*selected} - {"device"} or any(chosen)
    path = given.json or (Path(tempfile.gettempdir()) / f"addnorm-{results.name}" if part else results)
    try:
        cases = benchmark.plan(given.threads, selected)
        if given.list:
            print("\n".join(map(benchmark.title, cases)))
            return 0
        if is_trial and path.resolve() == results.resolve():
            raise ValueError(f"{path} is for times of a GPU, and this run is on cpu: choose another --json")
        here = {**environment.describe(), **benchmark.describe(cases)}
        here["commit"] = here["commit"] or given.commit
        earlier = find_earlier(path, here) if given.resume else None
    except ValueError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    document = run(
        benchmark, cases, budget=given.budget or None, earlier=earlier, path=path, here=here,
        progress=lambda line: print(line, file=sys.stderr, flush=True), **options,
    )  # fmt: skip
    print("\n".join(report(benchmark, document)))
    saved = _save(benchmark, document, path)
    if not document["complete"]:
        print(f"Cut short ({document['ended']}): the same command with --resume continues.", file=sys.stderr)
        return 130
    return 3 if failed_proofs(document) else 0 if saved else 1


def _save(benchmark: Benchmark, document: Document, path: Path) -> bool:
    """Write the document, print its path, and return whether the path is `path`.

    Times of a busy machine, or of code that no commit has, go to NAME.busy.json.
    """
    reason = find_obstacle(document) if benchmark.idle and document["complete"] else None
    if reason is None:
        print(f"Written: {write(document, path)}")
    else:
        partial_path(path).unlink(missing_ok=True)
        written = write(document, path.with_suffix(f".busy{path.suffix}"))
        print(f"Not published, {reason}: written to {written}; measure again.")
    return reason is None


def _parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--threads", type=_positive, help="number of threads of torch")
    parser.add_argument("--rounds", type=_positive, default=benchmark.rounds, help=f"(default {benchmark.rounds})")
    parser.add_argument(
        "--budget", type=float, default=benchmark.budget, help="seconds after which no case begins; 0: none"
    )
    parser.add_argument(
        "--json", type=Path, help="results file (default results/NAME.json; for a part a temporary file)"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in the results file")
    parser.add_argument(
        "--judge", action="store_true", help="judge the stored numbers again, after a target has changed"
    )
    parser.add_argument("--commit", help="commit of the sources, if they are a copy and no checkout")
    parser.add_argument("--list", action="store_true", help="list the cases and measure nothing")
    for name in benchmark.fields:
        values = [*dict.fromkeys(getattr(case, name) for case in benchmark.plan() if hasattr(case, name))]
        if name == "device":
            parser.add_argument("--device", nargs=1, choices=DEVICES)
        elif name != "threads":
            kind = type(values[0])
            words = {"choices": values} if kind is str else {"type": _positive if kind is int else float}
            parser.add_argument(f"--{name.replace('_', '-')}", nargs="+", help="only these cases", **words)
    for name, value in benchmark.options.items():
        if value is True:
            parser.add_argument(f"--no-{name}", dest=name, action="store_false")
        else:
            parser.add_argument(f"--{name}", nargs="+", choices=value)
    return parser


def _positive(text: str) -> int:
    """Parse a whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def report(benchmark: Benchmark, document: Document) -> Iterator[str]:
    """Yield the lines that a script prints: the benchmark's own report, or times, failures and summary; then warnings."""
    if benchmark.report is not None:
        yield benchmark.report(document)
    else:
        for case, rows in benchmark.by_case(document).items():
            times = "   ".join(f"{name} {format_seconds(row['median_us'] / 1e6)}" for name, row in rows.items())
            yield f"{benchmark.title(case)}:   {times}"
        for row in document.get("failures", []):
            yield f"{row['variant']} failed in {benchmark.title(Case.of(row, benchmark.fields))}: {row['error']}"
        for row in document["summary"]:
            yield f"{judged(row)}  {row['name']}"
    yield from filter(None, [benchmark.idle and busy(document), unfinished(document)])
