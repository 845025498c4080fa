"""A run of the GPU benchmark: one case (every variant made, checked, warmed, timed), then the document, complete after each case.

A variant that fails is reported, and the others are measured.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from addnorm._util.timing import interleave
from addnorm._util.torch_internals import keep_donated_buffers
from addnorm.bench import environment
from addnorm.bench.gpu import cases, check, clock, variants
from addnorm.bench.gpu.cases import FIELDS, JOBS
from addnorm.bench.gpu.clock import Clock, Timer
from addnorm.bench.gpu.device import Copies, describe, triton_version
from addnorm.bench.gpu.summary import summarize
from addnorm.bench.gpu.variants import COPY, EVERY
from addnorm.bench.harness import (
    Case,
    Document,
    Progress,
    Results,
    Row,
    Run,
    Stop,
    by_case,
    header,
    new_results,
    partial_path,
    run_cases,
)
from addnorm.bench.harness import resumable as earlier_document

SCHEMA = 1
BUDGET = 540.0  # seconds of a run, compilation included
PARTS = ("errors", "failures", "rows")


class DeviceLost(Stop):
    """The device does not answer any more: after an illegal access every later call of the process fails."""


def measure(
    case: Case, device: torch.device, timekeeper: Clock, *,
    rounds: int = clock.ROUNDS, requested: Sequence[str] | None = None, without: Sequence[str] = (), cache: int | None = None,
    deadline: float | None = None,
) -> Results:  # fmt: skip
    """Return a row for each variant of a case that is right, the errors of all, and the failures.

    Args:
        case: the case to time.
        device: the device.
        timekeeper: the clock of the device.
        rounds: number of samples for each variant.
        requested: variants (None: those of the plan).
        without: variants to leave out.
        cache: bytes of the device's last cache; None: as the device reports.
        deadline: value of `time.monotonic` after which no variant begins, since each may compile for long; None: none.

    Raises:
        DeviceLost: a failure made the device unusable.
        Stop: the deadline has passed.
    """
    cache = describe(device)["l2_bytes"] if cache is None else cache
    sets = cases.set_count(case, cache)
    inputs = cases.inputs(case, device, sets)
    results = new_results(*PARTS)
    timers: dict[str, Timer] = {}
    repeats: dict[str, int] = {}
    ready: dict[str, float] = {}

    def begin(name: str) -> str | None:
        """Make the variant's timer, or return why the variant cannot be timed."""
        if name == COPY:
            call = cases.copier(case, device, sets)
        else:
            forward = variants.VARIANTS[name].make(case)
            relative, problem = check.errors(case, forward, inputs[0])
            finite = {key: value if math.isfinite(value) else None for key, value in relative.items()}
            results["errors"].append(case.row(variant=name, limits=check.limits(case), **finite))
            if problem is not None:
                return f"wrong: {problem}"
            call = cases.timed(case, forward, inputs)
        clock.warm(call, sets, timekeeper)
        timer = timekeeper.timer(call, sets)
        repeats[name] = clock.repeats_for(timer)
        timers[name] = timer
        return None

    def failed(name: str, error: Exception | str) -> None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        results["failures"].append(case.row(variant=name, error=text[:300]))
        if not isinstance(error, str):
            check_alive(timekeeper, results)

    names = [name for name in (*variants.chosen(case, device.type, requested), COPY) if name not in without]
    with retained_graphs(case):
        if any(name != COPY and variants.VARIANTS[name].compiles for name in names):
            torch.compiler.reset()  # only this case's graphs, without the guards of earlier ones
        for name in names:
            begun = time.monotonic()
            if deadline is not None and begun > deadline:
                raise Stop("budget")
            try:
                problem = begin(name)
                if problem is not None:
                    failed(name, problem)
            except Exception as error:  # any error of a peer is reported, and the others are measured
                if isinstance(error, Stop):
                    raise
                failed(name, error)
            ready[name] = time.monotonic() - begun
            if name not in timers:
                free(device)
        samples = interleave(
            {name: partial(timer.sample, repeats[name]) for name, timer in timers.items()}, rounds, failed=failed
        )
    cold = cases.is_cold(case, cache, sets)
    for name, some in samples.items():
        more = {"repeats": repeats[name], "sets": sets, "cold": cold, "bytes": cases.moved_bytes(case)}
        results["rows"].append(case.row(variant=name, **clock.times(some), **more, ready_s=ready[name]))
    return results


def check_alive(timekeeper: Clock, results: Results) -> None:
    """Raise DeviceLost if waiting for the device fails."""
    try:
        timekeeper.wait()
    except Exception as error:
        # The case is measured again in the next run, without the variant that failed here.
        kept = {"failures": results["failures"]}
        raise DeviceLost(f"the device was lost: {type(error).__name__}: {error}"[:300], kept) from error


def free(device: torch.device) -> None:
    """Free the memory that a failure left: tensors in reference cycles, and the allocator's cached blocks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def retained_graphs(case: Case) -> Iterator[None]:
    """Forbid Inductor to reuse the memory of saved tensors where one graph runs backward repeatedly.

    The setting holds in this thread only. A GPU's backward runs in another thread, which checks again; there the first backward
    retains its graph too (`cases.gradients`). The setting here keeps such graphs apart from the others in the compiler's cache.
    """
    again = JOBS[case.job].backward and not JOBS[case.job].forward
    with keep_donated_buffers(again):
        yield


# ------------------------------------------------------------------------------------------------------------- the run


def run(
    plan: Sequence[Case], device: torch.device, *,
    rounds: int = clock.ROUNDS, budget: float | None = BUDGET, requested: Sequence[str] | None = None,
    earlier: Document | None = None, save: Callable[[Document], object] = lambda document: None,
    progress: Progress | None = None, commit: str | None = None,
) -> Document:  # fmt: skip
    """Measure the cases and return the document; `save` is called with it after each case.

    An interrupt, or a lost device, ends the run early: the document has the measured cases and is not `complete`. The budget
    ends it as intended: the other cases are in `left`.

    Args:
        plan: the cases, the most important first.
        device: the device.
        rounds: number of samples for each variant.
        budget: seconds, after which no further case or variant begins. A case that is unfinished then is left for the next
            run, except the first, which is always measured. None: no limit.
        requested: variants (None: those of the plan).
        earlier: document to continue (`resumable`): its cases are not measured again.
        save: called with the document after each case.
        progress: called with one line before each case.
        commit: commit of the sources, where they are not a checkout.
    """
    timekeeper, about, head = clock.clock_of(device), describe(device), identity(device, commit)
    copies = Copies(device, timekeeper, earlier["copy"]["bytes_per_second"] if earlier else None)
    meter = environment.LoadMeter()
    settings = {"rounds": rounds, "budget": budget, "variants": list(requested) if requested else None}
    start = Run(new_results(*PARTS))
    if earlier:
        start = Run(
            {part: earlier[part] for part in PARTS},
            [Case(**settings_of_case) for settings_of_case in earlier["cells"]],
            seconds=earlier["seconds"],
        )
    failures = [*start.results["failures"]]

    def measured(case: Case, deadline: float | None) -> Results:
        lost = [
            failure["variant"] for failure in failures if Case.of(failure, FIELDS) == case
        ]  # in a run that the device did not survive
        results = new_results(*PARTS) if EVERY in lost else measure_or_fail(
            case, device, timekeeper, rounds=rounds, requested=requested, without=lost, cache=about["l2_bytes"], deadline=deadline
        )  # fmt: skip
        copies.measure()
        return results

    def document(state: Run) -> Document:
        return _document(state, {**head, **meter.columns()}, about, timekeeper, copies, settings)

    copies.measure()
    done = run_cases(
        plan,
        measured,
        start,
        title=cases.title,
        budget=budget,
        progress=progress,
        save=lambda state: save(document(state)),
    )
    return document(done)


def measure_or_fail(
    case: Case, device: torch.device, timekeeper: Clock, *, rounds: int, requested: Sequence[str] | None, without: Sequence[str],
    cache: int, deadline: float | None,
) -> Results:  # fmt: skip
    """Return the result of `measure`; if it fails as a whole, such as for memory, report that as the case's failure."""
    try:
        return measure(
            case,
            device,
            timekeeper,
            rounds=rounds,
            requested=requested,
            without=without,
            cache=cache,
            deadline=deadline,
        )
    except Stop:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:300]
        results: Results = {**new_results(*PARTS), "failures": [case.row(variant=EVERY, error=text)]}
        check_alive(timekeeper, results)
    free(device)  # here the error no longer keeps its tensors alive
    return results


def identity(device: torch.device, commit: str | None = None) -> Document:
    """Return the environment, the versions of peers and the device.

    Args:
        device: the device.
        commit: commit of the sources, where they are not a checkout, such as a copy on another machine.
    """
    where = environment.describe()
    where["commit"] = where["commit"] or commit
    where["versions"] |= {"triton": triton_version(), "cuda": torch.version.cuda}
    where["peers"] = variants.versions()
    return where | {"device": describe(device)}


def resumable(path: Path, device: torch.device, commit: str | None = None) -> Document | None:
    """Return what an earlier run left at the path, unfinished or complete, or None.

    Raises:
        ValueError: it was measured on another device, with other versions or of another commit.
    """

    def same(document: Document) -> Row:
        return {"device": document["device"]["name"], "versions": document["versions"], "commit": document["commit"]}

    remedy = "measure again without --resume, or choose another --json"
    return earlier_document([partial_path(path), path], identity(device, commit), same, remedy)


def _document(state: Run, head: Document, about: Row, timekeeper: Clock, copies: Copies, settings: Row) -> Document:
    copied = copies.document()
    rows = with_ratios(state.results["rows"], copied["median"])
    return {
        **header(SCHEMA, state),
        "ended": state.ended,
        "seconds": state.seconds,
        **head,
        "clock": timekeeper.name,
        "missing": variants.missing(about["type"]),
        "limits": {
            name: [limit.why for limit in variant.limits] for name, variant in variants.VARIANTS.items() if variant.limits
        },
        "protocol": {
            **settings, "segment_seconds": clock.SEGMENT_SECONDS, "times_cache": cases.TIMES_CACHE,
            "most_sets": cases.MOST_SETS,
        },
        "copy": copied,
        "summary": summarize(rows, state.results["failures"], judged=about["type"] == "cuda"),
        "cells": [vars(case) for case in state.done],
        "left": [vars(case) for case in state.left],
        "errors": state.results["errors"],
        "failures": state.results["failures"],
        "rows": rows,
    }  # fmt: skip


def with_ratios(rows: Sequence[Row], copied: float) -> list[Row]:
    """Return the rows with bandwidth, its share of the large copy's and of the case's own copy's, and ratios to eager."""
    results = []
    for case_rows in by_case(rows, FIELDS).values():
        eager, copy = case_rows.get("eager"), case_rows.get(COPY)
        for row in case_rows.values():
            rate = row["bytes"] / row["device_us"] * 1e6
            results.append({
                **row, "gb_per_second": rate / 1e9, "share_of_copy": rate / copied,
                "share_of_cell_copy": copy["device_us"] / row["device_us"] if copy else None,
                **{f"{part}_ratio_to_eager": eager[f"{part}_us"] / row[f"{part}_us"] if eager else None
                   for part in ("device", "call")},
            })  # fmt: skip
    return results
