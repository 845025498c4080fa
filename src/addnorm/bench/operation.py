"""The benchmark of the operation on CPU: addnorm beside eager PyTorch, torch.compile and onnxruntime.

The variants of a case are functions of the same tensors. Bandwidth is that of the bytes that must move, as a share of what
`torch.add(out=)` of the same size reaches. onnxruntime has its own threads, which spin for a while after each call, as
torch's do. Interleaved, each would slow the other down, so it runs alone, after the others.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from addnorm.bench import accuracy, environment, facts, onnx_peer
from addnorm.bench.cases import (
    DTYPES,
    FIELDS,
    JOBS,
    NORMS,
    PLAIN,
    Call,
    differentiable,
    expressions,
    full_title,
    inputs,
    output_bytes,
    whole,
)
from addnorm.bench.harness import Case, Document, Progress, Results, Row, Run, by_case, header, new_results, run_cases
from addnorm.bench.tables import printed_progress
from addnorm.bench.targets import Goal, Target, ratio
from addnorm.bench.timing import ROUNDS, SEGMENT_MS, State, interleaved, protocol, settle_allocator

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["failed_proofs", "goals", "measure", "run", "summarize", "variants"]

SCHEMA = 2
ADD_TENSORS = 3  # tensors that torch.add reads and writes
MAY_FAIL = ("compile", "onnxruntime")  # peers that this machine may be unable to run
PAUSE_SECONDS = 0.2  # until the threads of the previous variant sleep


# ------------------------------------------------------------------------------------------------------------ one case


def variants(case: Case, compiled: bool) -> tuple[dict[str, Call], list[Tensor]]:
    """Return every variant as a function of the same arguments, and the arguments."""
    job = JOBS[case.job]
    args, cotangents = inputs(case.job, case.rows, case.d, DTYPES[case.dtype], grad=job.backward)
    calls = expressions(case.norm, case.job, case.d)
    if compiled and job.compiled:
        torch.compiler.reset()  # only this case's graph, without the guards of earlier ones
        calls["compile"] = torch.compile(calls["eager"], dynamic=False, fullgraph=True)
    if job.backward:
        inputs_with_gradient = differentiable(case.norm, args)
        calls = {name: _with_gradients(call, inputs_with_gradient, cotangents) for name, call in calls.items()}
    if onnx_peer.applies(case):
        calls["onnxruntime"] = _bound(case, args)
    left, right = args[0].detach(), args[1].detach()
    out = torch.empty_like(left)
    calls["add"] = lambda *_: torch.add(left, right, out=out)
    return calls, args


def _with_gradients(call: Call, inputs_with_gradient: list[Tensor], cotangents: tuple[Tensor, Tensor]) -> Call:
    grad = torch.autograd.grad
    return lambda *args: grad(call(*args), inputs_with_gradient, cotangents)


def _bound(case: Case, args: list[Tensor]) -> Call:
    """Return onnxruntime's call; where it cannot be made, a call that raises the error, for `failures`."""
    try:
        return onnx_peer.bound(case, args)
    except Exception as error:
        failure = error

    def call(*_: Tensor) -> None:
        raise failure

    return call


def time_variants(
    case: Case, state: State = "kept", *, rounds: int = ROUNDS, compiled: bool = False
) -> tuple[dict[str, Row], dict[str, Exception]]:
    """Return the times of a case's variants in a state of the allocator, and the errors of those that cannot run here."""
    calls, args = variants(case, compiled)
    errors: dict[str, Exception] = {}
    alone = calls.pop("onnxruntime", None)
    settled = settle_allocator(state)
    times = interleaved(calls, args, rounds, may_fail=MAY_FAIL, errors=errors)
    if alone is not None:
        time.sleep(PAUSE_SECONDS)
        times |= interleaved({"onnxruntime": alone}, args, rounds, may_fail=MAY_FAIL, errors=errors)
        time.sleep(PAUSE_SECONDS)
    return {name: {**row, "allocator": state} if settled else row for name, row in times.items()}, errors


def measure(
    case: Case, *, rounds: int = ROUNDS, compiled: bool = False, fresh: Mapping[str, Row] | None = None
) -> Results:
    """Return the rows of one case, one a variant, and the variants that this machine cannot run, with the error.

    Args:
        case: the case.
        rounds: timed loops for each variant.
        compiled: time torch.compile too.
        fresh: times of the case with fresh pages, measured before; those of a large case are the main ones.
    """
    times, errors = time_variants(case, rounds=rounds, compiled=compiled)
    others = dict(fresh or {})
    if others and output_bytes(case) >= LARGE:
        times, others = others, times
    rows = []
    for name, measured in times.items():
        row = {**measured}
        if name in others and "allocator" in others[name]:
            other = others[name]["allocator"]
            row |= {f"{other}_{key}": others[name][key] for key in ("median_us", "q1_us", "q3_us", "faults")}
            row[f"{other}_ratio_to_eager"] = others["eager"]["median_us"] / others[name]["median_us"]
        tensors = ADD_TENSORS if name == "add" else JOBS[case.job].tensors
        repeats = row.pop("repeats")
        rows.append(case.row(
            variant=name, **row, repeats=repeats,
            ratio_to_eager=times["eager"]["median_us"] / row["median_us"],
            bytes=tensors * output_bytes(case),
            share_of_add_bandwidth=tensors / ADD_TENSORS * times["add"]["median_us"] / row["median_us"],
        ))  # fmt: skip
    failures = [
        case.row(variant=name, error=f"{type(error).__name__}: {error}"[:300]) for name, error in errors.items()
    ]
    return {"rows": rows, "failures": failures}


# ------------------------------------------------------------------------------------------------------------- targets


LARGE = 32e6  # bytes of y: above glibc's highest threshold for mapping, so that fresh pages dominate


BOTH_STATES = 12e6  # bytes of y from which a case is measured in both states of the allocator


def is_settled(case: Case, row: Row) -> bool:
    """Return whether a row was measured in a known state of the allocator, or is too small for a difference."""
    return "allocator" in row or output_bytes(case) < LARGE


def _plain(case: Case) -> bool:
    return case.job in PLAIN


def _forward(case: Case) -> bool:
    return _plain(case) and not JOBS[case.job].backward


def _backward(case: Case) -> bool:
    return _plain(case) and JOBS[case.job].backward


def _batch(case: Case) -> bool:
    return bool(case.rows >= 128 and output_bytes(case) < LARGE)


def _over_add(rows: Mapping[str, Row]) -> float | None:
    """Return the time of addnorm over that of torch.add(out=)."""
    value = ratio("addnorm", "add")(rows)
    return None if value is None else 1 / value


EAGER, COMPILE, ONNX = ("x eager", "eager"), ("x compile", "compile"), ("x onnxruntime", "onnxruntime")
ADD = ("x add's time", "add")


def goals(cache: float) -> list[tuple[str, Goal]]:
    """Return the goals for times, each with the peer that it compares with. `cache`: bytes of the last-level cache."""

    def goal(
        name: str, statistic: Callable[[list[float]], float], versus: tuple[str, str], compare: str, bound: float | None,
        where: Callable[[Case], bool],
    ) -> tuple[str, Goal]:  # fmt: skip
        number = _over_add if versus is ADD else ratio("addnorm", versus[1])
        return versus[0], Goal(Target(name, compare, bound), number, statistic, where)

    def in_cache(case: Case) -> bool:
        fits = case.rows >= 128 and 3 * output_bytes(case) <= cache
        return case.job == "forward" and case.dtype == "float32" and fits

    def largest(job: str) -> Callable[[Case], bool]:
        return lambda case: (case.job, case.rows, case.d) == (job, 4096, 4096)

    return [
        goal("forward, 128+ rows, under 32 MB: mean", geometric_mean, EAGER, ">=", 2.8,
             lambda case: _forward(case) and _batch(case)),
        goal("forward, one row: mean", geometric_mean, EAGER, ">=", 1.25, lambda case: _forward(case) and case.rows == 1),
        goal("forward, over 32 MB: lowest", min, EAGER, ">=", 0.95,
             lambda case: _forward(case) and output_bytes(case) >= LARGE),
        goal("with backward, 128+ rows, under 32 MB: mean", geometric_mean, EAGER, ">=", 2.5,
             lambda case: _backward(case) and _batch(case)),
        goal("with backward: lowest", min, EAGER, ">=", 0.95, _backward),
        goal("without options: lowest", min, EAGER, ">=", 0.95, _plain),
        goal("without options, under 32 MB: lowest", min, COMPILE, ">=", 0.95,
             lambda case: _plain(case) and output_bytes(case) < LARGE),
        goal("y alone, float32, 128+ rows, in cache: highest", max, ADD, "<=", 1.8, in_cache),
        goal("dropout, with backward: mean", geometric_mean, EAGER, ">=", 3.0, lambda case: case.job == "dropout"),
        goal("all options, with backward: mean", geometric_mean, EAGER, ">=", 4.0, lambda case: case.job == "everything"),
        goal("in place, 4096 x 4096: lowest", min, EAGER, ">=", 4.0, largest("in_place")),
        goal("y into given memory, 4096 x 4096: highest", max, ADD, "<=", 1.3, largest("reuse")),
        goal("dropout and all options: mean", geometric_mean, COMPILE, ">=", None,
             lambda case: case.job in ("dropout", "everything")),
        goal("forward, float32: mean", geometric_mean, ONNX, ">=", None, _forward),
        goal("y into given memory, float32: mean", geometric_mean, ONNX, ">=", None, lambda case: case.job == "reuse"),
    ]  # fmt: skip


def summarize(rows: Sequence[Row], cache: float) -> list[Row]:
    """Return every goal for each norm, and again without targets for fewer threads, since the targets are for all threads."""
    rows = [row for row in rows if is_settled(Case.of(row, FIELDS), row)]
    cases, summary = by_case(rows, FIELDS), []
    counts = sorted({case.threads for case in cases}, reverse=True)
    for threads in counts:
        for norm in dict.fromkeys(case.norm for case in cases):
            chosen = {case: results for case, results in cases.items() if (case.threads, case.norm) == (threads, norm)}
            for versus, goal in goals(cache):
                numbers = [*goal.numbers(chosen).values()]
                target = goal.target if threads == counts[0] else goal.target._replace(bound=None)
                if numbers or target.bound is not None:
                    value = goal.statistic(numbers) if numbers else None
                    summary.append(target.row(value, norm, versus=versus, threads=threads, cells=len(numbers)))
    return summary


# ------------------------------------------------------------------------------------------------------------- the run


def run(
    cases: Sequence[Case] | None = None,
    *,
    rounds: int = ROUNDS,
    compiled: bool = True,
    proofs: bool = True,
    progress: Console | None = None,
) -> Document:
    """Measure the cases and return the document. After an interrupt it has the finished cases, and `complete` is False.

    Args:
        cases: from `matrix`; None is `whole()`.
        rounds: timed loops for each variant of a case, at most: fewer where a call takes long.
        compiled: time torch.compile of the eager expression too, with as many threads as the cases have at most.
        proofs: measure `facts.facts`, `accuracy.table` and the time of the import too.
        progress: console for the progress of the run; None shows none.
    """
    cases = whole() if cases is None else [*cases]
    before = torch.get_num_threads()
    threads = max((case.threads for case in cases), default=before)
    proven: Results = {"facts": [], "accuracy": [], "import": []}
    meter = environment.LoadMeter()

    fresh: dict[Case, dict[str, Row]] = {}  # before all others: memory that was kept once is used again

    def measured(case: Case, _: float | None) -> Results:
        torch.set_num_threads(case.threads)
        options: Any = {"rounds": rounds, "compiled": compiled and case.threads == threads}
        if "state" in vars(case):
            plain = Case.of(vars(case), FIELDS)
            fresh[plain] = time_variants(plain, "fresh", **options)[0]
            return {}
        return measure(case, **options, fresh=fresh.get(case))

    def name(case: Case) -> str:
        return full_title(case) + (", fresh pages" if "state" in vars(case) else "")

    both = [case.but(state="fresh") for case in cases if output_bytes(case) >= BOTH_STATES]
    both = both if settle_allocator("fresh") else []
    torch.set_num_threads(threads)
    done = Run(new_results("failures", "rows"))
    try:
        with printed_progress(progress) as show:
            if proofs:
                proven = _proofs(cases, show)
            done = run_cases([*both, *cases], measured, done, title=name, progress=show)
    except KeyboardInterrupt:  # during the proofs
        done.ended = "interrupt"
    finally:
        torch.set_num_threads(before)
        settle_allocator("default")
    where = environment.describe()
    cache = environment.last_level_cache(where["machine"]["caches"])
    return {
        **header(SCHEMA, done),
        **where,
        "peers": {"onnxruntime": onnx_peer.status()},
        "threads": threads,
        **meter.columns(),
        "protocol": protocol(rounds, segment_ms=SEGMENT_MS, compiled=compiled, cells=len(cases)),
        "summary": summarize(done.results["rows"], cache) + proven["import"],
        "facts": proven["facts"],
        "accuracy": proven["accuracy"],
        **done.results,
    }


def _proofs(cases: Sequence[Case], show: Progress) -> Results:
    """Return the measurements besides times, for the norms and dtypes of the cases, and show each part before it begins."""
    norms = tuple(norm for norm in NORMS if any(case.norm == norm for case in cases))
    dtypes = tuple(dtype for dtype in DTYPES if any(case.dtype == dtype for case in cases))
    errors: list[Row] = []
    for norm, dtype in itertools.product(norms, accuracy.DTYPES if dtypes == tuple(DTYPES) else dtypes):
        show(f"Errors against float64: {NORMS[norm]}, {dtype}")
        errors += accuracy.table([norm], [dtype])
    show("Gradients of parameters, models' casting, saved bytes")
    known = facts.facts(norms, dtypes) + facts.of_accuracy(errors)
    show("Time of the import, in new processes")
    imported = Target("import addnorm after torch: milliseconds", "<", 60).row(facts.import_ms())
    return {"facts": known, "accuracy": errors, "import": [imported]}


def failed_proofs(document: Document) -> list[Row]:
    """Return the facts that do not hold. Times prove nothing, since they depend on the machine."""
    return [fact for fact in document["facts"] if not fact["met"]]
