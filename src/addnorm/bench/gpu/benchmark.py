"""The GPU benchmark: measurement of one case (make, check, warm up and time every variant), the clocks, the device, the document.

A variant that fails is reported, and the others are measured.

Device time is that of `triton.testing.do_bench`: each call lies between two events, after a write that clears the cache. The
device needs longer for that write than the host for most launches, so the host enqueues the call meanwhile. Call time is the
wall clock of many calls with one synchronization at the end, by `torch.utils.benchmark.Timer`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

from addnorm import backends
from addnorm._util.timing import interleave
from addnorm._util.torch_internals import keep_donated_buffers
from addnorm.bench import environment, jobs, pages, proofs, timing
from addnorm.bench.case import Case, Document, Results, Row, Rows, Target, by_case, ratio, value
from addnorm.bench.gpu import plan, variants
from addnorm.bench.gpu.plan import FIELDS, LARGE, MEDIUM, TARGET_D
from addnorm.bench.gpu.variants import VARIANTS
from addnorm.bench.harness import Benchmark
from addnorm.bench.jobs import DTYPES, JOBS, NORMS, moved_bytes, tensor_bytes, title
from addnorm.bench.pages import digits, markdown, target_lines, unfinished

BUDGET = 540.0  # seconds of a run, compilation included
PARTS = ("copies", "errors", "failures", "rows")
TimedCall = Callable[[], object]
ROUNDS = 11
REPEATS = 20  # calls in one sample of the call time
WARM_UP_MS, SAMPLE_MS = 1, 10  # of one sample of the device time
COPY_BYTES = {"cuda": 2**30, "cpu": 2**22}  # size of the copied tensor
COPY_ROUNDS = 5
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
    return {**results, "copies": [copy_rates(case.device)]}  # it raises if a failure has made the device unusable


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
            {name: partial(sample, case.device, call) for name, call in calls.items()}, rounds,
            failed=lambda name, error: failures.append(timing.failure(case, name, error)),
        )  # fmt: skip
    rows = [
        case.row(variant=name, **times(some), bytes=moved_bytes(case), ready_s=ready[name])
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


# ----------------------------------------------------------------------------------------------------------- the clocks


class Sample(NamedTuple):
    """Seconds of a call: on the device, and by the wall clock."""

    device: float
    call: float


def sample(device: str, call: TimedCall) -> Sample:
    """Time a call. A CPU computes while the call runs, so on a CPU both times are the wall clock's."""
    threads = torch.get_num_threads()
    wall = float(Timer("call()", globals={"call": call}, num_threads=threads).timeit(REPEATS).mean)
    if device != "cuda":
        return Sample(wall, wall)
    from triton.testing import do_bench

    return Sample(do_bench(call, WARM_UP_MS, SAMPLE_MS, return_mode="median") / 1e3, wall)


def times(samples: list[Sample]) -> Row:
    """Return the median and the quartiles of the device time, and the median of the call time, in microseconds."""
    device, call = ([1e6 * seconds for seconds in part] for part in zip(*samples, strict=True))
    return {**timing.spread(device), "call_us": statistics.median(call)}


@cache
def _copies(device: str) -> dict[str, TimedCall]:
    """Return a large copy within the device: by the driver, and by a kernel.

    On an H200 the driver's copy reached two thirds of the bandwidth (https://github.com/NVIDIA/cccl/issues/1672), so a share of
    the driver's bandwidth would be too high.
    """
    source = torch.randint(-(2**31), 2**31, (COPY_BYTES[device] // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return {"memcpy": lambda: target.copy_(source), "kernel": lambda: torch.bitwise_not(source, out=target)}


def copy_rates(device: str) -> Row:
    """Return the bytes a second that a large copy reads and writes, by method: the median of a few rounds."""
    seconds = {
        name: statistics.median(sample(device, call).device for _ in range(COPY_ROUNDS))
        for name, call in _copies(device).items()
    }
    return {name: 2 * COPY_BYTES[device] / each for name, each in seconds.items()}


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


# ------------------------------------------------------------------------------------------------------------- targets

NAMES = {name: variant.title for name, variant in VARIANTS.items() if name != "addnorm"}
JUDGED = ("eager", "compile", "liger")


def _aimed(case: Case) -> bool:
    return tensor_bytes(case) >= LARGE and TARGET_D[0] <= case.d <= TARGET_D[-1]


SIZES = "64 MB and more, d 1024 to 16384: lowest share of the copy bandwidth"
SHARE = value("addnorm", "share_of_copy")
TARGETS = (
    Target(f"forward, {SIZES}", ">=", 0.9, SHARE, min, lambda case: _aimed(case) and not JOBS[case.job].backward),
    Target(f"backward, {SIZES}", ">=", 0.8, SHARE, min, lambda case: _aimed(case) and case.job == "backward"),
    *(Target(f"device time over {NAMES[peer]}'s: highest", "<=", 1.0, ratio(peer, "addnorm"), max) for peer in JUDGED),
    *(Target(f"call time over {NAMES[peer]}'s, 16 MB and more: highest", "<=", 1.0, ratio(peer, "addnorm", "call_us"), max,
             lambda case: tensor_bytes(case) >= MEDIUM) for peer in JUDGED),
    *(Target(f"device time over {name}'s: mean", "<=", None, ratio(peer, "addnorm"), statistics.geometric_mean)
      for peer, name in NAMES.items()),
)  # fmt: skip


def targets(document: Document) -> list[Target]:
    """Return the targets by norm. For a document of a CPU they have no bounds."""
    on_gpu = document["device"]["type"] == "cuda"
    return [target._replace(by=("norm",), bound=target.bound if on_gpu else None) for target in TARGETS]


# ------------------------------------------------------------------------------------------------------------- Markdown


def section(document: Document) -> str:
    """Return the section of the page.

    Raises:
        ValueError: the document is not of a GPU.
    """
    if document["device"]["type"] != "cuda":
        raise ValueError(
            f"the document is of {document['device']['name']}, expected one of a GPU: run "
            "python benchmarks/bench_gpu.py on a machine with one"
        )
    return report(document)


def report(document: Document) -> str:
    """Return the device, the targets, a table for each norm, missing variants, failures."""
    cases = by_case(document["rows"], FIELDS)
    tables = {name: markdown(_times(cases, norm)) for norm, name in NORMS.items()}
    norms = [f"{name}:\n\n{table}" for name, table in tables.items() if table]
    summary = markdown(target_lines(document["summary"]))
    failures = markdown(
        {"variant": row["variant"], "case": title(Case.of(row, FIELDS)), "error": " ".join(row["error"].split())}
        for row in document["failures"]
    )
    notes = [" ".join(f"{sentence}." for sentence in document["missing"].values())]
    notes += [f"Failed, and left out of the times:\n\n{failures}" if failures else "", unfinished(document)]
    return "\n\n".join(filter(None, [headline(document), summary, *norms, *notes]))


def headline(document: Document) -> str:
    """Return a sentence with the device, the bandwidth of a copy, and the headline of every benchmark."""
    device = document["device"]
    if device["type"] == "cuda":
        versions = f"CUDA {device['cuda']}, driver {device['driver']}, triton {document['versions']['triton']}"
        where = f"{device['name']}, {device['multiprocessors']} multiprocessors, {versions}"
    else:
        where = f"{device['name']}, which is no GPU: a trial of the script, whose times do not apply to one"
    return f"{where}; copies at {digits(document['copy'] / 1e9)} GB/s; {pages.headline(document)}."


def _times(cases: Mapping[Case, Rows], norm: str) -> Iterator[dict[str, str]]:
    """Yield a table line per case: addnorm's times, its share of the copy's bandwidth, and the ratios to the peers' times."""
    jobs, dtypes = [*JOBS], [*DTYPES]
    chosen = [case for case, rows in cases.items() if case.norm == norm and "addnorm" in rows]
    measured = [peer for peer in NAMES if any(peer in cases[case] for case in chosen)]
    for case in sorted(chosen, key=lambda case: (jobs.index(case.job), dtypes.index(case.dtype), case.d, case.rows)):
        ours = cases[case]["addnorm"]
        line = {
            "rows x d": f"{case.rows} x {case.d}", "dtype": case.dtype, "job": JOBS[case.job].title,
            "share of the copy": f"{ours['share_of_copy']:.0%}",
        }  # fmt: skip
        for part, key in (("device", "median_us"), ("call", "call_us")):
            line[f"{part}, us"] = digits(ours[key])
            for peer in measured:
                number = ratio("addnorm", peer, key)(cases[case])
                line[f"{part} / {NAMES[peer]}"] = f"**{number:.2f}**" if number else ""
        yield line


BENCHMARK = Benchmark(
    "gpu", plan.plan, measure, title, targets, PARTS,
    {"repeats": REPEATS, "warm_up_ms": WARM_UP_MS, "sample_ms": SAMPLE_MS},
    {"variants": tuple(VARIANTS)}, describe, finish, {"docs/performance.md#gpu": section},
    fields=FIELDS, threads=0, rounds=ROUNDS, budget=BUDGET, idle=False, device="cuda", report=report,
)  # fmt: skip
