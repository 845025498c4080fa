"""The GPU benchmark: measurement of one case (make, check, warm up and time every variant), the device, the document.

A variant that fails is reported, and the others are measured.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import torch

from addnorm import backends
from addnorm._util.timing import interleave
from addnorm._util.torch_internals import keep_donated_buffers
from addnorm.bench import environment, jobs, proofs, timing
from addnorm.bench.case import Case, Document, Results, Row
from addnorm.bench.gpu import clock, plan, summary, variants
from addnorm.bench.gpu.clock import TimedCall
from addnorm.bench.gpu.plan import FIELDS
from addnorm.bench.gpu.variants import VARIANTS
from addnorm.bench.harness import Benchmark
from addnorm.bench.jobs import JOBS, moved_bytes, title
from addnorm.bench.targets import Target

BUDGET = 540.0  # seconds of a run, compilation included
PARTS = ("copies", "errors", "failures", "rows")
DRIVER = Path("/proc/driver/nvidia/version")


def measure(
    case: Case, *, rounds: int, variants: Sequence[str] | None = None, deadline: float | None = None
) -> Results:
    """Return the results of a case: times of the correct variants, errors of all variants, failures, bandwidth of a copy.

    Args:
        case: the case to time.
        rounds: number of samples for each variant.
        variants: names of the variants to time; None: all.
        deadline: value of `time.monotonic` after which no variant begins; None: no deadline.

    Raises:
        Stop: the deadline has passed.
    """
    results = _measure_variants(case, rounds, variants, math.inf if deadline is None else deadline)
    timing.free()
    return {**results, "copies": [clock.copy_rates(case.device)]}  # it raises if a failure has made the device unusable


def _measure_variants(case: Case, rounds: int, requested: Sequence[str] | None, deadline: float) -> Results:
    """Check every variant and time the variants in turns. A variant that fails is left out."""
    tensors = cache(partial(jobs.inputs, case, case.device))  # of all variants; too large ones fail in each
    errors: list[Row] = []
    makers = {
        name: lambda name=name: check_variant(case, name, tensors(), errors)
        for name in variants.chosen(case, requested)
    }
    # A GPU's backward runs in another thread, where this setting does not apply; there the first backward retains its graph
    # too. The setting here keeps such graphs apart from the others in the compiler's cache.
    with keep_donated_buffers(JOBS[case.job].retained):
        calls, ready, failures = timing.attempt(case, makers, makers, deadline)  # any error of a peer is reported
        samples = interleave(
            {name: partial(clock.sample, case.device, call) for name, call in calls.items()}, rounds,
            failed=lambda name, error: failures.append(timing.failure(case, name, error)),
        )  # fmt: skip
    rows = [
        case.row(variant=name, **clock.times(some), bytes=moved_bytes(case), ready_s=ready[name])
        for name, some in samples.items()
    ]
    return {"errors": errors, "failures": failures, "rows": rows}


def check_variant(case: Case, name: str, tensors: jobs.Set, errors: list[Row]) -> TimedCall:
    """Check a variant, add a row with its errors, and return the function to time, which runs the job."""
    forward = VARIANTS[name].make(case)
    with torch.set_grad_enabled(JOBS[case.job].backward):
        relative, problem = proofs.check(case, forward, tensors)
    finite = {key: value if math.isfinite(value) else None for key, value in relative.items()}
    errors.append(case.row(variant=name, limits=proofs.limits(case), **finite))
    if problem is not None:
        raise WrongError(problem)
    # With `retained` the graph is made now. At its first run `torch.compile` decides whether the backward may overwrite saved
    # tensors.
    return jobs.timed(forward, tensors, retained=JOBS[case.job].retained)


class WrongError(ValueError):
    """Error for a variant whose results are wrong."""


# ----------------------------------------------------------------------------------------------------------- the device


def device(kind: str) -> Document:
    """Return name, multiprocessors, memory and driver of a GPU, or the name of a CPU."""
    if kind != "cuda":
        return {"type": kind, "name": environment.cpu_model()}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    text = DRIVER.read_text(errors="replace") if DRIVER.exists() else ""
    driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", text)
    return {
        "type": "cuda", "name": properties.name, "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count, "memory_bytes": properties.total_memory,
        "driver": driver[1] if driver else None, "cuda": torch.version.cuda,
    }  # fmt: skip


def describe(cases: Sequence[Case]) -> Document:
    """Return the facts that head the results: device, versions, and the variants that are missing or limited.

    Raises:
        ValueError: there is no such device, or addnorm has no kernels for it.
    """
    kind = cases[0].device
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("there is no CUDA device: --device cpu tries everything but the clock")
        triton = next(one for one in backends() if one.name == "triton")
        if not triton.available:  # the formulas would be timed as addnorm
            raise ValueError(f"addnorm has no kernels: {triton.detail}")
    more = {"triton": environment.version_of("triton", "pytorch-triton"), "cuda": torch.version.cuda}
    return {
        "versions": environment.describe()["versions"] | more, "peers": variants.versions(), "device": device(kind),
        "missing": variants.missing(kind),
        "limits": {name: [*one.limits] for name, one in VARIANTS.items() if one.limits},
    }  # fmt: skip


def finish(results: Results, head: Document) -> Document:
    """Return the parts of the document, with the share of each row's bandwidth in a large copy's."""
    copied = statistics.median(max(row.values()) for row in results["copies"]) if results["copies"] else math.nan
    for row in results["rows"]:
        row["share_of_copy"] = row["bytes"] / row["median_us"] * 1e6 / copied
    wrong = sum(row["variant"] == "addnorm" for row in results["failures"])
    target = Target("cells in which addnorm is wrong or fails", "==", 0)
    return {"copy": copied, "facts": [target.row(wrong)], **results}


BENCHMARK = Benchmark(
    "gpu", plan.plan, measure, title, summary.targets, PARTS,
    {"repeats": clock.REPEATS, "warm_up_ms": clock.WARM_UP_MS, "sample_ms": clock.SAMPLE_MS},
    {"variants": tuple(VARIANTS)}, describe, finish, {"docs/performance.md#gpu": summary.section},
    fields=FIELDS, threads=0, rounds=clock.ROUNDS, budget=BUDGET, idle=False, device="cuda", report=summary.report,
)  # fmt: skip
