"""The benchmark of the operation on CPU: addnorm beside eager PyTorch, torch.compile and onnxruntime.

The variants of a case are functions of the same tensors. Bandwidth is that of the bytes that must move, as a share of what
`torch.add(out=)` of the same size reaches. onnxruntime has its own threads, which spin for a while after each call, as
torch's do. Interleaved, each would slow the other down, so it runs alone, after the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from statistics import geometric_mean
from typing import Any

import torch

from addnorm._util.numbers import format_number
from addnorm.bench import environment, exactness, peers, timing
from addnorm.bench.case import (
    Case,
    Condition,
    Document,
    Makers,
    Results,
    Row,
    Target,
    by_case,
    grid,
    has,
    ratio,
    select,
)
from addnorm.bench.harness import Benchmark
from addnorm.bench.jobs import (
    FIELDS,
    JOBS,
    NORMS,
    compiled,
    eager,
    inputs,
    moved_bytes,
    ours,
    tensor_bytes,
    timed,
)
from addnorm.reference import Norm

SHAPES = ((1, 768), (1, 4096), (128, 768), (512, 768), (2048, 1024), (8192, 768), (4096, 4096))
ONE_THREAD_SHAPES = ((128, 768), (2048, 1024))  # one in the second level of the cache, one in the last
DTYPES = ("float32", "bfloat16")
TIMED = [job for job in JOBS if job != "backward"]
PLAIN = ("forward", "forward_stream", "forward_backward")  # without options, into new tensors
UNCOMPILED = ("in_place", "reuse")  # their eager expressions are those of other jobs
MAY_FAIL = ("compile", "onnxruntime")  # peers that this machine may be unable to run
ADD_TENSORS = 3  # tensors that torch.add reads and writes
PAUSE_SECONDS = 0.2  # until the threads of the previous variant sleep
LARGE = 32e6  # bytes of y: above glibc's highest threshold for mapping, so that fresh pages dominate
BOTH_STATES = 12e6  # bytes of y from which a case is measured in both states of the allocator


# ----------------------------------------------------------------------------------------------------------------- cases


def matrix(
    norms: Sequence[Norm] = tuple(NORMS), dtypes: Sequence[str] = DTYPES, threads: int | None = None,
    shapes: Sequence[tuple[int, int]] = (),
) -> list[Case]:  # fmt: skip
    """Return a case for every combination, the norm outermost.

    Args:
        norms: the norms.
        dtypes: the dtypes.
        threads: number of threads. None: as many as torch has.
        shapes: pairs of rows and d; by default `SHAPES`, and a few of them on one thread.
    """
    n = threads or torch.get_num_threads()
    parts = [(n, shapes)] if shapes else [(n, SHAPES), (1, ONE_THREAD_SHAPES)]
    cases = (grid(norm=norms, job=TIMED, rows__d=some, dtype=dtypes, threads=number) for number, some in parts)
    return [*dict.fromkeys(chain(*cases))]


def plan(timed: Sequence[Case], *, proofs: bool = True) -> list[Case]:
    """Return the cases to measure: the proofs, the large cases with fresh pages, then all cases.

    The cases with fresh pages come first, since the allocator reuses memory that it has kept. torch.compile is timed only in the
    cases with the most threads.
    """
    most = max(case.threads for case in timed)
    norms, dtypes = (dict.fromkeys(getattr(case, name) for case in timed) for name in ("norm", "dtype"))
    of_errors = exactness.ROUNDINGS if {*dtypes} == {*DTYPES} else dtypes
    proven = [*grid(proof="errors", norm=norms, dtype=of_errors), Case(proof="import")]
    cases = [case if case.threads == most else case.but(compiles=False) for case in timed]
    large = [case for case in cases if tensor_bytes(case) >= BOTH_STATES] if timing.settle_allocator("fresh") else []
    return [*(proven if proofs else []), *(case.but(state="fresh") for case in large), *cases]


# ------------------------------------------------------------------------------------------------------------ one case


def variants(case: Case, with_compiler: bool = False) -> Makers:
    """Return, by variant, functions that make the call to time. Calls have no arguments and use the same tensors."""
    tensors = inputs(case)
    functions = {"eager": eager(case), "addnorm": ours(case)}
    if with_compiler and case.job not in UNCOMPILED:
        functions["compile"] = compiled(case)
    left, right, *_ = (t.detach() for t in tensors.leaves)
    return {
        **{name: partial(timed, call, tensors) for name, call in functions.items()},
        "add": lambda: partial(torch.add, left, right, out=torch.empty_like(left)),
        **({"onnxruntime": partial(peers.bind_onnxruntime, case, tensors)} if peers.onnxruntime_applies(case) else {}),
    }


def measure(case: Case, *, rounds: int, compile: bool) -> Results:  # the name of the option
    """Return the results of one case: a row for each variant, and the failures of variants that this machine cannot run."""
    if hasattr(case, "proof"):
        return _prove(case)
    plain = Case.of(vars(case), FIELDS)
    state: timing.State = getattr(case, "state", "kept")
    together = {**variants(plain, compile and getattr(case, "compiles", True))}
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
        target = Target("import addnorm after torch: milliseconds", "<", 60)
        return {"summary": [target.row(exactness.import_ms(), norm=None)]}
    errors = exactness.errors(case.norm, case.dtype, *exactness.SHAPE, job="everything")
    rows = [{"norm": case.norm, "dtype": case.dtype, "variant": name, **each} for name, each in errors.items()]
    return {"accuracy": rows, "facts": [*exactness.facts(case.norm, case.dtype, errors)]}


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
    for case, measured in by_case(rows, FIELDS):
        added = ADD_TENSORS * tensor_bytes(case)
        for name, row in measured.items():
            eager_times, add_times = (measured[peer]["median_us"] / row["median_us"] for peer in ("eager", "add"))
            size = added if name == "add" else moved_bytes(case)
            row |= {"ratio_to_eager": eager_times, "bytes": size, "share_of_add_bandwidth": size / added * add_times}
    return {"peers": {"onnxruntime": peers.onnxruntime_status()}, **results, "rows": rows}


# ------------------------------------------------------------------------------------------------------------- targets


def _small(case: Case) -> bool:
    return tensor_bytes(case) < LARGE


FORWARD, BACKWARD, WITHOUT_OPTIONS = (has(job=jobs) for jobs in (PLAIN[:2], PLAIN[2:], PLAIN))
BATCH, HUGE = has(rows=range(128, 2**31)), has(rows=4096, d=4096)
PEERS = {
    "x eager": ratio("addnorm", "eager"), "x compile": ratio("addnorm", "compile"),
    "x onnxruntime": ratio("addnorm", "onnxruntime"), "x add's time": ratio("add", "addnorm"),
}  # fmt: skip
STATISTICS: dict[str, Any] = {"mean": (geometric_mean, ">="), "lowest": (min, ">="), "highest": (max, "<=")}
NOISE = "never slower; 0.05 is the noise of a case"
FIVE_TENSORS = "PyTorch's add and norm move five tensors, one call three"
FIFTEEN_TENSORS = "PyTorch moves 11 tensors, and reads the lines of 4 before it writes them; addnorm moves 8"
# Each target: the number's name, which ends with the statistic; the peer; the bound, and its reason; the conditions of a case.
TARGETS = (
    ("forward, 128+ rows, under 32 MB: mean", "x eager", 1.67, FIVE_TENSORS, FORWARD, BATCH, _small),
    ("forward, one row: mean", "x eager", 1.25, "one call instead of two", FORWARD, has(rows=1)),
    ("forward, over 32 MB: lowest", "x eager", 0.95, NOISE, FORWARD, lambda case: not _small(case)),
    ("with backward, 128+ rows, under 32 MB: mean", "x eager", 1.8, FIFTEEN_TENSORS, BACKWARD, BATCH, _small),
    ("with backward: lowest", "x eager", 0.95, NOISE, BACKWARD),
    ("without options: lowest", "x eager", 0.95, NOISE, WITHOUT_OPTIONS),
    ("without options, under 32 MB: lowest", "x compile", 0.95, NOISE, WITHOUT_OPTIONS, _small),
    ("y alone, float32, 128+ rows, in cache: highest", "x add's time", 1.8,
     "both move three tensors; the statistics read each row once more, from the first cache",
     has(job="forward", dtype="float32", in_cache=True), BATCH),
    ("dropout, with backward: mean", "x eager", 3.0,
     "PyTorch draws, writes and reads a mask in operators of their own", has(job="dropout")),
    ("all options, with backward: mean", "x eager", 4.0,
     "PyTorch has an operator for each option, forward and backward", has(job="everything")),
    ("in place, 4096 x 4096: lowest", "x eager", 4.0,
     "PyTorch writes two new tensors, whose pages the system clears first", has(job="in_place"), HUGE),
    ("y into given memory, 4096 x 4096: highest", "x add's time", 1.3,
     "the bytes of the add, and the noise of memory", has(job="reuse"), HUGE),
    ("dropout and all options: mean", "x compile", None, "", has(job=("dropout", "everything"))),
    ("forward, float32: mean", "x onnxruntime", None, "", FORWARD),
    ("y into given memory, float32: mean", "x onnxruntime", None, "", has(job="reuse")),
)  # fmt: skip


def targets(document: Document) -> Iterator[Target]:
    """Yield the targets by norm and number of threads. Only those for the most threads have bounds.

    The statistic "highest" must be at most its bound, the others at least theirs. A case is in the cache if three tensors fit
    into the last level.
    """
    cache = max(document["machine"]["caches"].values(), default=environment.ASSUMED_CACHE)
    most, *fewer = sorted({row["threads"] for row in document["rows"]}, reverse=True) or [0]

    def fits(threads: int, conditions: Sequence[Condition], case: Case) -> bool:
        case = case.but(in_cache=ADD_TENSORS * tensor_bytes(case) <= cache)
        return case.threads == threads and all(condition(case) for condition in conditions)

    for threads in (most, *fewer):
        for name, peer, bound, why, *conditions in TARGETS:
            statistic, compare = STATISTICS[name.rpartition(": ")[2]]
            yield Target(
                name, compare, bound if threads == most else None, PEERS[peer], statistic, partial(fits, threads, conditions),
                ("norm",), {"versus": peer, "threads": threads}, why,
            )  # fmt: skip


BENCHMARK = Benchmark(
    "functional",
    lambda selected, threads: plan(select(matrix(threads=threads), selected), proofs=not selected), measure, targets=targets,
    parts=("summary", "facts", "accuracy", "failures", "rows"),
    fields=FIELDS, options={"compile": True}, finish=finish, schema=2,
)  # fmt: skip


def error_lines(document: Document) -> Iterator[dict[str, str]]:
    """Yield the table lines of the errors with all options: addnorm's, and PyTorch's below them."""
    names = {"addnorm": "addnorm", "eager": "PyTorch"}
    for row in document["accuracy"]:
        numbers = {name: format_number(row.get(name), 2) for name in exactness.COLUMNS}
        yield {"norm": NORMS[row["norm"]], "dtype": row["dtype"], "": names[row["variant"]], **numbers}
