"""The GPU benchmark: measurement of one case (make, check, warm up and time every variant), the device, the document.

A variant that fails is reported, and the others are measured.
"""

from __future__ import annotations

import gc
import math
import re
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from addnorm import backends
from addnorm._util.timing import interleave
from addnorm._util.torch_internals import keep_donated_buffers
from addnorm.bench import environment, jobs, proofs, timing
from addnorm.bench.case import Case, Document, Results, Row, Stop, by_case
from addnorm.bench.gpu import clock, plan, summary, variants
from addnorm.bench.gpu.clock import TimedCall, Timer
from addnorm.bench.gpu.plan import FIELDS
from addnorm.bench.gpu.variants import COPY, EVERY, VARIANTS
from addnorm.bench.harness import Benchmark
from addnorm.bench.jobs import JOBS, moved_bytes, tensor_bytes
from addnorm.bench.targets import Target

BUDGET = 540.0  # seconds of a run, compilation included
PARTS = ("copies", "errors", "failures", "rows")
TIMES_CACHE = 3  # size of all sets together, in caches
MOST_SETS = 256
DRIVER = Path("/proc/driver/nvidia/version")
ASSUMED_L2 = 64 * 2**20  # bytes, for a device that does not report its cache


def measure(
    case: Case, *, rounds: int, variants: Sequence[str] | None = None, deadline: float | None = None, without: Sequence[str] = (),
) -> Results:  # fmt: skip
    """Return the results of a case: times of the correct variants, errors of all variants, failures, bandwidth of a copy.

    Args:
        case: the case to time.
        rounds: number of samples for each variant.
        variants: names of the variants to time; None: all.
        deadline: value of `time.monotonic` after which no variant begins, since each may compile for long; None: no deadline.
        without: variants to leave out.

    Raises:
        Stop: the deadline has passed, or a failure made the device unusable.
    """
    results: Results = {part: [] for part in PARTS}
    if EVERY not in without:
        try:
            _Measurement(case, results).run(rounds, variants, deadline, without)
        except Stop:
            raise
        except Exception as error:  # such as for memory
            results = {part: [] for part in PARTS}
            _report(case, EVERY, error, results)
        _free(case)  # here the error no longer keeps its tensors alive
    results["copies"].append(clock.copy_rates(case.device))
    return results


def _report(case: Case, name: str, error: Exception, results: Results) -> None:
    """Add a failure to the results, and stop if the device is lost: after an illegal access every later call fails."""
    results["failures"].append(timing.failure(case, name, error))
    try:
        clock.wait(case.device)
    except Exception as lost:
        # The case is measured again in the next run, without the variant that failed here.
        kept = {"failures": results["failures"]}
        raise Stop(f"the device was lost: {type(lost).__name__}: {lost}"[:300], kept) from lost


def _free(case: Case) -> None:
    """Free the memory that a failure left: tensors in reference cycles, and the allocator's cached blocks."""
    gc.collect()
    if case.device == "cuda":
        torch.cuda.empty_cache()


class _Measurement:
    """Measurement of one case: its inputs, and the timers of its variants."""

    def __init__(self, case: Case, results: Results) -> None:
        self.case, self.results = case, results
        self.cache = device(case.device)["l2_bytes"]
        self.count = set_count(case, self.cache)
        self.sets = jobs.inputs(case, self.count, case.device)
        self.timers: dict[str, Timer] = {}
        self.columns: dict[str, Row] = {}

    def run(self, rounds: int, requested: Sequence[str] | None, deadline: float | None, without: Sequence[str]) -> None:
        """Prepare every variant, time the variants in turns, and add their result rows."""
        case, cold = self.case, self.count * 2 * tensor_bytes(self.case) > self.cache
        names = [name for name in (*variants.chosen(case, requested), COPY) if name not in without]
        # A GPU's backward runs in another thread, where this setting does not apply; there the first backward retains its graph
        # too. The setting here keeps such graphs apart from the others in the compiler's cache.
        with keep_donated_buffers(JOBS[case.job].retained):
            torch.compiler.reset()  # only this case's graphs, without the guards of earlier ones
            for name in names:
                if deadline is not None and time.monotonic() > deadline:
                    raise Stop("budget")
                self._prepare(name)
            samplers = {name: partial(each.sample, self.columns[name]["repeats"]) for name, each in self.timers.items()}
            samples = interleave(samplers, rounds, failed=self._failed)
        for name, some in samples.items():
            more = {"sets": self.count, "cold": cold, "bytes": moved_bytes(case), **self.columns[name]}
            self.results["rows"].append(case.row(variant=name, **clock.times(some), **more))

    def _prepare(self, name: str) -> None:
        """Make a variant, check it, warm it up and keep its timer. If this fails, report the reason."""
        begun = time.monotonic()
        try:
            call = self._copier() if name == COPY else self._checked(name)
            timer = Timer(self.case.device, call, self.count)
            self.columns[name] = {"repeats": timer.repeats(), "ready_s": time.monotonic() - begun}
            self.timers[name] = timer
        except Stop:
            raise
        except Exception as error:  # any error of a peer is reported, and the others are measured
            self._failed(name, error)
        if name not in self.timers:
            _free(self.case)

    def _failed(self, name: str, error: Exception) -> None:
        _report(self.case, name, error, self.results)

    def _checked(self, name: str) -> TimedCall:
        """Check a variant, and return the function to time, which runs the job on the inputs of set i."""
        case, job, sets = self.case, JOBS[self.case.job], self.sets
        forward = VARIANTS[name].make(case)
        with torch.set_grad_enabled(job.backward):
            relative, problem = proofs.check(case, forward, sets[0])
        finite = {key: value if math.isfinite(value) else None for key, value in relative.items()}
        self.results["errors"].append(case.row(variant=name, limits=proofs.limits(case), **finite))
        if problem is not None:
            raise WrongError(problem)
        args = [tensors.args for tensors in sets]
        if not job.backward:
            return lambda i: forward(*args[i])
        if not job.retained:
            return lambda i: sets[i].gradients(forward(*args[i]))
        # The graphs are made here. At its first run `torch.compile` decides whether the backward may overwrite saved tensors.
        graphs = [forward(*tensors) for tensors in args]
        return lambda i: sets[i].gradients(graphs[i], retain=True)

    def _copier(self) -> TimedCall:
        """Return a call that reads and writes as many bytes as the case must move (a kernel: see `clock`)."""
        words = max(1, moved_bytes(self.case) // 8)  # of four bytes, read and written
        options: Any = {"dtype": torch.int32, "device": self.case.device}
        sources = [torch.randint(-(2**31), 2**31, (words,), **options) for _ in range(self.count)]
        targets = [torch.empty_like(source) for source in sources]
        return lambda i: torch.bitwise_not(sources[i], out=targets[i])


class WrongError(ValueError):
    """Error for a variant whose results are wrong."""


def set_count(case: Case, cache: int) -> int:
    """Return the number of input sets, at least two: so many that a set has left the cache when its turn comes again."""
    return max(2, min(MOST_SETS, -(-TIMES_CACHE * cache // (2 * tensor_bytes(case)))))


# ----------------------------------------------------------------------------------------------------------- the device


def device(kind: str) -> Document:
    """Return name, multiprocessors, caches, memory and driver of a GPU, or the name and the last-level cache of a CPU."""
    if kind != "cuda":
        cache = environment.last_level_cache(environment.caches())
        return {"type": kind, "name": environment.cpu_model(), "l2_bytes": cache}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    text = DRIVER.read_text(errors="replace") if DRIVER.exists() else ""
    driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", text)
    return {
        "type": "cuda", "name": properties.name, "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count, "l2_bytes": getattr(properties, "L2_cache_size", 0) or ASSUMED_L2,
        "memory_bytes": properties.total_memory, "driver": driver[1] if driver else None, "cuda": torch.version.cuda,
    }  # fmt: skip


def describe(cases: Sequence[Case]) -> Document:
    """Return the facts that head the results: device, kind of clock, versions, and the variants that are missing or limited.

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
    more = {"triton": variants.version_of("triton", "pytorch-triton"), "cuda": torch.version.cuda}
    return {
        "versions": environment.describe()["versions"] | more, "peers": variants.versions(), "device": device(kind),
        "clock": "CUDA events" if kind == "cuda" else "host clock", "missing": variants.missing(kind),
        "limits": {name: [limit.why for limit in one.limits] for name, one in VARIANTS.items() if one.limits},
    }  # fmt: skip


def finish(results: Results, head: Document) -> Document:
    """Return the parts of the document, with the bandwidth of each row and its ratios to eager.

    The bandwidth is also given as a share of that of a large copy, and of a copy of the case's own size.
    """
    copied = statistics.median(max(row.values()) for row in results["copies"]) if results["copies"] else math.nan
    for rows in by_case(results["rows"], FIELDS).values():
        eager, copy = rows.get("eager"), rows.get(COPY)
        for row in rows.values():
            rate = row["bytes"] / row["device_us"] * 1e6
            row |= {
                "gb_per_second": rate / 1e9, "share_of_copy": rate / copied,
                "share_of_cell_copy": copy["device_us"] / row["device_us"] if copy else None,
                **{f"{part}_ratio_to_eager": eager[f"{part}_us"] / row[f"{part}_us"] if eager else None
                   for part in ("device", "call")},
            }  # fmt: skip
    wrong = summary.failed_cases(results["failures"])
    target = Target("cells in which addnorm is wrong or fails", "==", 0)
    return {"copy": copied, "summary": [target.row(wrong, norm=None)], **results}


BENCHMARK = Benchmark(
    "gpu", FIELDS, plan.plan, measure, plan.title, summary.targets, PARTS,
    {"segment_seconds": clock.SEGMENT_SECONDS, "times_cache": TIMES_CACHE, "most_sets": MOST_SETS},
    {"variants": tuple(VARIANTS)}, describe, finish, {"docs/performance.md#gpu": summary.section},
    threads=0, rounds=clock.ROUNDS, budget=BUDGET, idle=False, device="cuda", report=summary.report,
    failed=lambda document: summary.failed_cases(document["failures"]) > 0,
)  # fmt: skip
