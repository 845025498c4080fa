"""The benchmark of the operation on CPU: addnorm beside eager PyTorch, torch.compile and onnxruntime, and its document as text.

The variants of a case are functions of the same tensors. Bandwidth is that of the bytes that must move, as a share of what
`torch.add(out=)` of the same size reaches. onnxruntime has its own threads, which spin for a while after each call, as
torch's do. Interleaved, each would slow the other down, so it runs alone, after the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import torch

from addnorm._util.blocks import Block, Paragraph, Span
from addnorm._util.numbers import format_count, format_number
from addnorm._util.render import WIDTH, make_console, print_blocks, to_text
from addnorm.bench import environment, exactness, harness, onnx_peer, timing
from addnorm.bench.case import Case, Document, Progress, Results, Row, Rows, Target, by_case, grid, has, ratio, select
from addnorm.bench.harness import Benchmark
from addnorm.bench.jobs import (
    FIELDS,
    JOBS,
    NORMS,
    Call,
    compiled,
    eager,
    inputs,
    moved_bytes,
    ours,
    tensor_bytes,
    timed,
)
from addnorm.bench.pages import Line, bound, busy, digits, headline, table, unfinished
from addnorm.reference import Norm

if TYPE_CHECKING:
    from rich.console import Console


SHAPES = ((1, 768), (1, 4096), (128, 768), (512, 768), (2048, 1024), (8192, 768), (4096, 4096))
ONE_THREAD_SHAPES = ((128, 768), (2048, 1024))  # one in the second level of the cache, one in the last
DTYPES = ("float32", "bfloat16")
TIMED = tuple(job for job in JOBS if job != "backward")
PLAIN = ("forward", "forward_stream", "forward_backward")  # without options, into new tensors
UNCOMPILED = ("in_place", "reuse")  # their eager expressions are those of other jobs
MAY_FAIL = ("compile", "onnxruntime")  # peers that this machine may be unable to run
ADD_TENSORS = 3  # tensors that torch.add reads and writes
PAUSE_SECONDS = 0.2  # until the threads of the previous variant sleep
PEER_COLUMNS = {"x eager": "eager", "x compile": "compile", "x onnx": "onnxruntime"}
MARKS: dict[bool | None, Span] = {True: ("yes", "good"), False: ("no", "bad"), None: ("-", "dim")}
LARGE = 32e6  # bytes of y: above glibc's highest threshold for mapping, so that fresh pages dominate
BOTH_STATES = 12e6  # bytes of y from which a case is measured in both states of the allocator


# ----------------------------------------------------------------------------------------------------------------- cases


def matrix(
    norms: Iterable[Norm] = tuple(NORMS), dtypes: Iterable[str] = DTYPES, shapes: Iterable[tuple[int, int]] = SHAPES, *,
    jobs: Iterable[str] = TIMED, threads: int | None = None,
) -> list[Case]:  # fmt: skip
    """Return a case for every combination, the norm outermost. `threads` None: as many as torch has."""
    n = threads or torch.get_num_threads()
    return grid(norm=norms, job=jobs, rows__d=shapes, dtype=dtypes, threads=[n])


def whole(
    norms: Iterable[Norm] = tuple(NORMS), dtypes: Iterable[str] = DTYPES, threads: int | None = None
) -> list[Case]:
    """Return the whole matrix, and a few of its shapes on one thread."""
    cases = matrix(norms, dtypes, threads=threads)
    return [*dict.fromkeys(cases + matrix(norms, dtypes, ONE_THREAD_SHAPES, threads=1))]


def plan(timed: Sequence[Case], *, proofs: bool = True) -> list[Case]:
    """Return the cases to measure: the proofs, the large cases with fresh pages, then all cases.

    The fresh pages are first, since memory that was kept once is used again. torch.compile is timed with as many threads as the
    cases have at most.
    """
    most = max(case.threads for case in timed)
    norms, dtypes = (tuple(dict.fromkeys(getattr(case, name) for case in timed)) for name in ("norm", "dtype"))
    of_errors = tuple(exactness.ROUNDINGS) if {*dtypes} == {*DTYPES} else dtypes
    proven = [*grid(proof=["errors"], norm=norms, dtype=of_errors), Case(proof="import")]
    cases = [case if case.threads == most else case.but(compiles=False) for case in timed]
    large = [case for case in cases if tensor_bytes(case) >= BOTH_STATES] if timing.settle_allocator("fresh") else []
    return [*(proven if proofs else []), *(case.but(state="fresh") for case in large), *cases]


# ------------------------------------------------------------------------------------------------------------ one case


def variants(case: Case, with_compiler: bool = False) -> dict[str, Callable[[], Call]]:
    """Return for each variant a function that makes the call, which has no arguments. All calls use the same tensors."""
    tensors = inputs(case)
    functions = {"eager": eager(case), "addnorm": ours(case)}
    if with_compiler and case.job not in UNCOMPILED:
        functions["compile"] = compiled(case)
    left, right, *_ = (t.detach() for t in tensors.leaves)
    return {
        **{name: partial(timed, call, tensors) for name, call in functions.items()},
        "add": lambda: partial(torch.add, left, right, out=torch.empty_like(left)),
        **({"onnxruntime": partial(onnx_peer.bound, case, tensors)} if onnx_peer.applies(case) else {}),
    }


def measure(case: Case, *, rounds: int, compile: bool) -> Results:  # the name of the option
    """Return the results of one case: a row for each variant, and the failures of variants that this machine cannot run."""
    if hasattr(case, "proof"):
        return _prove(case)
    plain = Case.of(vars(case), FIELDS)
    state: timing.State = getattr(case, "state", "kept")
    together = variants(plain, compile and getattr(case, "compiles", True))
    alone = {name: together.pop(name) for name in ("onnxruntime",) if name in together}
    settled = {"allocator": state} if timing.settle_allocator(state) else {}
    results: Results = {"failures": [], "rows": []}
    for makers in filter(None, (together, alone)):
        for part, rows in timing.compare(plain, makers, rounds, MAY_FAIL).items():
            results[part] += [row | settled for row in rows]
        time.sleep(PAUSE_SECONDS if alone else 0)
    return results


def _prove(case: Case) -> Results:
    """Return the results of a case with a `proof`: the time of the import, or the errors against float64 and the facts."""
    if case.proof == "import":
        return {
            "summary": [
                Target("import addnorm after torch: milliseconds", "<", 60).row(exactness.import_ms(), norm=None)
            ]
        }
    by_variant = exactness.errors(case.norm, case.dtype, *exactness.SHAPE, job="everything")
    rows = [
        {"norm": case.norm, "dtype": case.dtype, "variant": name, **relative} for name, relative in by_variant.items()
    ]
    return {"accuracy": rows, "facts": [*exactness.facts(case.norm, case.dtype, by_variant)]}


def finish(results: Results, head: Document) -> Document:
    """Return the parts of the document. Rows get their ratios, and both states of the allocator share one row.

    The main state of a case is "kept", as in a process that has run for a while, and "fresh" for the largest tensors, which is
    glibc's default for them. The times in the other state have the state's name as a prefix.
    """
    by_variant: dict[tuple[Case, str], list[Row]] = {}
    for row in results["rows"]:
        by_variant.setdefault((Case.of(row, FIELDS), row["variant"]), []).append(row)
    rows = []
    for (case, _), states in by_variant.items():
        main = "fresh" if tensor_bytes(case) >= LARGE else "kept"
        row, *others = sorted(states, key=lambda row: row.get("allocator") != main)
        for other in others:
            row |= {f"{other['allocator']}_{key}": other[key] for key in ("median_us", "q1_us", "q3_us", "faults")}
        rows.append(row)
    for case, measured in by_case(rows, FIELDS).items():
        for name, row in measured.items():
            size = moved_bytes(case) if name != "add" else ADD_TENSORS * tensor_bytes(case)
            row["ratio_to_eager"] = measured["eager"]["median_us"] / row["median_us"]
            row["bytes"] = size
            times = measured["add"]["median_us"] / row["median_us"]
            row["share_of_add_bandwidth"] = size / (ADD_TENSORS * tensor_bytes(case)) * times
    return {"peers": {"onnxruntime": onnx_peer.status()}, **results, "rows": rows}


# ------------------------------------------------------------------------------------------------------------- targets


def _small(case: Case) -> bool:
    return tensor_bytes(case) < LARGE


FORWARD, BACKWARD, WITHOUT_OPTIONS = (has(job=jobs) for jobs in (PLAIN[:2], PLAIN[2:], PLAIN))
BATCH = has(rows=range(128, 2**31))
PEERS = {
    "x eager": ratio("addnorm", "eager"), "x compile": ratio("addnorm", "compile"),
    "x onnxruntime": ratio("addnorm", "onnxruntime"), "x add's time": ratio("add", "addnorm"),
}  # fmt: skip


STATISTICS = {"mean": (geometric_mean, ">="), "lowest": (min, ">="), "highest": (max, "<=")}
NOISE = "never slower; 0.05 is the noise of a case"
FIVE_TENSORS = "PyTorch's add and norm move five tensors, one call three"
FIFTEEN_TENSORS = "PyTorch moves 11 tensors, and reads the lines of 4 before it writes them; addnorm moves 8"


def _target(name: str, peer: str, bound: float | None, *where: Callable[[Case], bool], why: str = "") -> Target:
    """Return a target of the statistic at the end of its name: a highest number is at most the bound, another at least."""
    statistic: Any
    statistic, compare = STATISTICS[name.rpartition(": ")[2]]

    def fits(case: Case) -> bool:
        return all(one(case) for one in where)

    return Target(name, compare, bound, PEERS[peer], statistic, fits, ("norm",), {"versus": peer}, why)


def targets(document: Document) -> list[Target]:
    """Return the targets by norm and number of threads. Only those for the most threads have bounds."""
    cache = max(document["machine"]["caches"].values(), default=environment.ASSUMED_CACHE)

    def in_cache(case: Case) -> bool:  # three tensors fit the last level
        return ADD_TENSORS * tensor_bytes(case) <= cache

    every = [
        _target("forward, 128+ rows, under 32 MB: mean", "x eager", 1.67, FORWARD, BATCH, _small, why=FIVE_TENSORS),
        _target("forward, one row: mean", "x eager", 1.25, FORWARD, has(rows=1), why="one call instead of two"),
        _target("forward, over 32 MB: lowest", "x eager", 0.95, FORWARD, lambda case: not _small(case), why=NOISE),
        _target("with backward, 128+ rows, under 32 MB: mean", "x eager", 1.8, BACKWARD, BATCH, _small,
                why=FIFTEEN_TENSORS),
        _target("with backward: lowest", "x eager", 0.95, BACKWARD, why=NOISE),
        _target("without options: lowest", "x eager", 0.95, WITHOUT_OPTIONS, why=NOISE),
        _target("without options, under 32 MB: lowest", "x compile", 0.95, WITHOUT_OPTIONS, _small, why=NOISE),
        _target("y alone, float32, 128+ rows, in cache: highest", "x add's time", 1.8,
                has(job="forward", dtype="float32"), BATCH, in_cache,
                why="both move three tensors; the statistics read each row once more, from the first cache"),
        _target("dropout, with backward: mean", "x eager", 3.0, has(job="dropout"),
                why="PyTorch draws, writes and reads a mask in operators of their own"),
        _target("all options, with backward: mean", "x eager", 4.0, has(job="everything"),
                why="PyTorch has an operator for each option, forward and backward"),
        _target("in place, 4096 x 4096: lowest", "x eager", 4.0, has(job="in_place", rows=4096, d=4096),
                why="PyTorch writes two new tensors, whose pages the system clears first"),
        _target("y into given memory, 4096 x 4096: highest", "x add's time", 1.3, has(job="reuse", rows=4096, d=4096),
                why="the bytes of the add, and the noise of memory"),
        _target("dropout and all options: mean", "x compile", None, has(job=("dropout", "everything"))),
        _target("forward, float32: mean", "x onnxruntime", None, FORWARD),
        _target("y into given memory, float32: mean", "x onnxruntime", None, has(job="reuse")),
    ]  # fmt: skip
    most, *fewer = sorted({row["threads"] for row in document["rows"]}, reverse=True) or [0]

    def on(threads: int, target: Target) -> Target:
        where = lambda case: case.threads == threads and target.where(case)  # noqa: E731
        return target._replace(where=where, labels={**target.labels, "threads": threads})

    return [on(most, one) for one in every] + [on(n, one._replace(bound=None)) for n in fewer for one in every]


BENCHMARK = Benchmark(
    "functional",
    lambda selected, threads: plan(select(whole(threads=threads), selected), proofs=not selected), measure, targets=targets,
    parts=("summary", "facts", "accuracy", "failures", "rows"),
    fields=FIELDS, options={"compile": True}, finish=finish, schema=2, report=lambda document: to_text(blocks(document)),
)  # fmt: skip


def run(
    cases: Sequence[Case] | None = None, *, rounds: int = timing.ROUNDS, compiled: bool = True, proofs: bool = True,
    progress: Console | None = None,
) -> Document:  # fmt: skip
    """Measure the cases and return the document. After an interrupt it has the finished cases, and `complete` is False.

    Args:
        cases: the cases to measure, from `matrix`; None means `whole()`.
        rounds: timed loops for each variant of a case, at most: fewer where a call takes long.
        compiled: time torch.compile of the eager expression too, with as many threads as the cases have at most.
        proofs: measure `exactness.facts` and the time of the import too.
        progress: console for the progress of the run; None shows no progress.
    """
    chosen = plan(whole() if cases is None else cases, proofs=proofs)
    with printed_progress(progress) as show:
        return harness.run(BENCHMARK, chosen, rounds=rounds, compile=compiled, progress=show)


# ----------------------------------------------------------- the document in a terminal: the ratio first, then the times


def console(*, stderr: bool = False) -> Console:
    """Return a console that is 100 columns wide where the output is not a terminal."""
    return make_console(stderr=stderr, width=WIDTH)


def show(document: Document, screen: Console) -> None:
    """Print a document."""
    print_blocks(screen, *blocks(document))


def _warning(document: Document) -> Iterator[Paragraph]:
    if warning := busy(document):
        words = "The machine was busy"
        yield Paragraph((words, "warning"), warning.removeprefix(words))


def blocks(document: Document) -> Iterator[Block]:
    """Yield the tables of every norm and job, the summary, the facts, the errors and the failures."""
    yield Paragraph(headline(document))
    rounds = format_count(document["protocol"]["rounds"], "interleaved round")
    yield Paragraph(
        f"Medians of up to {rounds}, in microseconds; spread: from quartile to "
        "quartile. Bandwidth: of the bytes that must move, as a share of what torch.add(out=) of that size reaches. "
        "Error: relative L2, against float64 over the same z."
    )
    yield from _warning(document)
    tables: dict[str, list[Line]] = {}
    for case, rows in by_case(document["rows"], FIELDS).items():
        threads = format_count(case.threads, "thread")
        name = f"{NORMS[case.norm]}: {JOBS[case.job].title}, {threads}"
        tables.setdefault(name, []).append(_times(case, rows))
    tables["Targets of the times"] = [*_targets(document["summary"])]
    tables["Facts on every machine"] = [*_targets(document["facts"])]
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
    ratios = {name: rows[peer]["median_us"] / ours["median_us"] for name, peer in PEER_COLUMNS.items() if peer in rows}
    width = f"{(ours['q3_us'] - ours['q1_us']) / ours['median_us']:.0%}" if ours["rounds"] > 1 else "-"
    return {
        **{name: (f"{value:.2f}", "strong" if name == "x eager" else "") for name, value in ratios.items()},
        "rows x d": f"{case.rows} x {case.d}", "dtype": case.dtype, "addnorm": digits(ours["median_us"]), "spread": width,
        "eager": digits(rows["eager"]["median_us"]), "add(out=)": digits(rows["add"]["median_us"]),
        "bandwidth": f"{ours['share_of_add_bandwidth']:.0%}",
    }  # fmt: skip


def _targets(rows: Iterable[Row]) -> Iterator[Line]:
    """Yield a line for each number of a summary, or for each fact."""
    for row in rows:
        yield {
            "addnorm": "-" if row["value"] is None else digits(row["value"]), **({"": row["versus"]} if "versus" in row else {}),
            **({"PyTorch": digits(row["torch"])} if "torch" in row else {}), "target": bound(row) or "-",
            "met": MARKS[row["met"]], "norm": NORMS[row["norm"]] if row["norm"] else "",
            "what": row["name"] + (", 1 thread" if row.get("threads") == 1 else ""),  # why it has no target
        }  # fmt: skip


def error_lines(document: Document) -> Iterator[dict[str, str]]:
    """Yield the table lines of the errors with all options: addnorm's, and PyTorch's below them."""
    names = {"addnorm": "addnorm", "eager": "PyTorch"}
    for row in document["accuracy"]:
        numbers = {name: format_number(row.get(name), 2) for name in exactness.COLUMNS}
        yield {"norm": NORMS[row["norm"]], "dtype": row["dtype"], "": names[row["variant"]], **numbers}


@contextmanager
def printed_progress(screen: Console | None) -> Iterator[Progress]:
    """Yield a function that shows a line of progress: in place on a terminal, else one below the other; None shows nothing."""
    if screen is None:
        yield lambda line: None
    elif screen.is_terminal:
        with screen.status("") as status:
            yield status.update
    else:
        yield lambda line: screen.print(line, soft_wrap=True)
