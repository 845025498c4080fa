"""The benchmark of the operation on a GPU, which benchmarks/bench_gpu.py runs: cases, one case, clocks, the document, targets.

A variant that fails is reported, and the others are measured. Everything except the clock works on a CPU too: the document then
names the CPU, and no target applies to it. benchmarks/README.md has the protocol.

Device time is that of `triton.testing.do_bench`: each call lies between two events, after a write that clears the cache. The
device needs longer for that write than the host for most launches, so the host enqueues the call meanwhile. Call time is the
wall clock of many calls with one synchronization at the end, by `torch.utils.benchmark.Timer`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache, partial

import torch
from torch.utils.benchmark import Timer

from addnorm import backends
from addnorm._util.timing import interleave
from addnorm._util.torch_internals import keep_donated_buffers
from addnorm.bench import environment, exactness, jobs, pages, timing
from addnorm.bench.case import Call, Case, Document, Results, Rows, Selection, Target, grid, ratio, select, value
from addnorm.bench.harness import Benchmark
from addnorm.bench.jobs import JOBS, NORMS, moved_bytes, tensor_bytes
from addnorm.bench.pages import Line, digits, markdown, size_columns, target_lines, unfinished
from addnorm.bench.peers import VARIANTS, choose, list_versions

REPEATS = 20  # calls in one sample of the call time
WARM_UP_MS, SAMPLE_MS = 1, 10  # of one sample of the device time
COPY_BYTES = {"cuda": 2**30, "cpu": 2**22}  # size of the copied tensor
COPY_ROUNDS = 5

# ---------------------------------------------------------------------------------------- cases, the most important first

LARGE, MEDIUM = 2**26, 2**24  # bytes of the branch from which the targets hold
TARGET_D = (1024, 2048, 4096, 8192, 16384)
TIMED = ("forward", "forward_stream", "backward", "forward_backward", "dropout")
APART, TOGETHER = ("forward_stream", "backward"), ("forward_stream", "forward_backward")


def sized(size: int, *ds: int) -> list[tuple[int, int]]:
    """Return (rows, d) for each d, so that the branch has `size` bytes in 16 bits."""
    return [(size // 2 // d, d) for d in ds]


# First a case of every kind, at d = 4096, then the other sizes: cases for which the budget is too short are of measured kinds.
TIERS = (
    ("bfloat16", (*APART, "forward"), sized(LARGE, 4096)),
    ("bfloat16", APART, sized(LARGE, *TARGET_D)),
    ("bfloat16", TOGETHER, [(1, 4096), (128, 4096), (1, 768), (128, 768)]),
    (["bfloat16", "mixed"], ("dropout", "forward_backward"), sized(LARGE, 4096)),
    (["float16", "float32"], APART, sized(LARGE, 4096)),
    (["mixed"], APART, sized(LARGE, *TARGET_D)),
    ("bfloat16", (*APART, "forward"), sized(MEDIUM, 4096)),
    ("bfloat16", "forward", sized(LARGE, *TARGET_D)),
    ("bfloat16", APART, sized(LARGE, 768, 32768, 65536)),
    ("bfloat16", TOGETHER, [(1024, 768), (1024, 4096)]),
)
CASES = dict.fromkeys(  # a case of an earlier tier is not repeated
    case for dtypes, timed, sizes in TIERS for case in grid(dtype=dtypes, rows__d=sizes, norm=NORMS, job=timed)
)


def plan(selected: Selection, threads: int = 0) -> list[Case]:
    """Return the cases, the most important first, or the `selected` ones.

    If both d and rows are selected, the result is every combination of the selected values instead, by default with bfloat16 and
    all jobs, so that any size can be measured. The number of threads has no effect.

    Raises:
        ValueError: the plan has no such case.
    """
    if {"d", "rows"} <= selected.keys():
        return grid(**{"dtype": "bfloat16", "d": (), "rows": (), "norm": NORMS, "job": TIMED, **selected})
    return select(CASES, selected)


# -------------------------------------------------------------------------------------------------------------- one case


def measure(case: Case, *, rounds: int, variants: Sequence[str] | None = None) -> Results:
    """Return the results of a case: times of the correct variants in turns, failures, and the bandwidth of a copy.

    Args:
        case: the case to time.
        rounds: number of samples for each variant.
        variants: names of the variants to time; None: all.
    """
    results = _time_variants(case, rounds, choose(case, variants))
    timing.free()
    # `copy_rate` raises if a failure has made the device unusable.
    return {**results, "copies": [{"bytes_per_second": copy_rate(case.device)}]}


def _time_variants(case: Case, rounds: int, names: Sequence[str]) -> Results:
    """Check every variant and time the variants in turns. A variant that fails is left out."""
    tensors = cache(partial(jobs.inputs, case, case.device))  # for all variants; too large tensors fail in each
    makers = {name: lambda name=name: check_variant(case, name, tensors()) for name in names}
    # A GPU's backward runs in another thread, where this setting does not apply; there the first backward retains its graph
    # too. The setting here keeps such graphs apart from the others in the compiler's cache.
    job = JOBS[case.job]
    with keep_donated_buffers(job.retained), torch.set_grad_enabled(job.backward):  # one mode, one compilation
        calls, failures = timing.attempt(case, makers, makers)  # any error of a peer is reported
        samples = interleave(
            {name: partial(sample, case.device, call) for name, call in calls.items()}, range(rounds),
            failed=lambda name, error: failures.append(timing.failure(case, name, error)),
        )  # fmt: skip
    rows = []
    for name, some in samples.items():
        on_device, call_us = zip(*some, strict=True)
        times = {**timing.spread(on_device), "call_us": statistics.median(call_us)}
        rows.append(case.row(variant=name, **times, bytes=moved_bytes(case)))
    return {"failures": failures, "rows": rows}


def check_variant(case: Case, name: str, tensors: jobs.Set) -> Call:
    """Check the results of a variant, and return the function to time, which runs the job."""
    forward = VARIANTS[name].make(case)
    exactness.check(case, forward, tensors)
    # With `retained` the graph is made now. At its first run `torch.compile` decides whether the backward may overwrite saved
    # tensors.
    return jobs.timed(forward, tensors, retained=JOBS[case.job].retained)


def sample(device: str, call: Call) -> tuple[float, float]:
    """Return the microseconds of a call on the device and by the wall clock. On a CPU both are wall-clock times."""
    # Another number of threads would compile a graph again.
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    wall = 1e6 * float(timer.timeit(REPEATS).mean)
    if device != "cuda":
        return wall, wall
    from triton.testing import do_bench

    return 1e3 * do_bench(call, WARM_UP_MS, SAMPLE_MS, return_mode="median"), wall


@cache
def _copy(device: str) -> Call:
    """Return a function that copies a large tensor within the device, by a kernel.

    On an H200 the driver's copy reached two thirds of the bandwidth (https://github.com/NVIDIA/cccl/issues/1672), so a share of
    the driver's bandwidth would be too high.
    """
    source = torch.randint(-(2**31), 2**31, (COPY_BYTES[device] // 4,), dtype=torch.int32, device=device)
    return partial(torch.bitwise_not, source, out=torch.empty_like(source))


def copy_rate(device: str) -> float:
    """Return the bytes a second that a large copy reads and writes: the median of a few rounds."""
    return 2e6 * COPY_BYTES[device] / statistics.median(sample(device, _copy(device))[0] for _ in range(COPY_ROUNDS))


# ----------------------------------------------------------------------------------------------------------- the device


def describe(cases: Sequence[Case]) -> Document:
    """Return the facts that head the results: the device, and the versions of the kernel libraries.

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
    return {"peers": list_versions(), "device": environment.device(kind)}


def finish(results: Results, head: Document) -> Document:
    """Return the parts of the document. Each row gets its bandwidth as a share of the bandwidth of a large copy."""
    rates = [row["bytes_per_second"] for row in results["copies"]]
    copied = statistics.median(rates) if rates else math.nan
    for row in results["rows"]:
        row["share_of_copy"] = row["bytes"] / row["median_us"] * 1e6 / copied
    wrong = sum(row["variant"] == "addnorm" for row in results["failures"])
    fact = Target("cases in which addnorm is wrong or fails", "==", 0).row(wrong)
    return {"copy": copied, "facts": [fact], **results}


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
)  # fmt: skip


def targets(document: Document) -> list[Target]:
    """Return the targets by norm. For a document of a CPU they have no bounds."""
    on_gpu = document["device"]["type"] == "cuda"
    return [target._replace(by=("norm",), bound=target.bound if on_gpu else None) for target in TARGETS]


# ------------------------------------------------------------------------------------------------------------- Markdown


def section(document: Document) -> str:
    """Return the section of the page: the device, the targets, the table of the times, missing variants, failures.

    Raises:
        ValueError: the document is not of a GPU.
    """
    device, cases = document["device"], BENCHMARK.by_case(document)
    if device["type"] != "cuda":
        raise ValueError(
            f"the document is of {device['name']}, expected one of a GPU: run "
            "python benchmarks/bench_gpu.py on a machine with one"
        )
    where = (
        f"{device['name']}, {device['multiprocessors']} multiprocessors, CUDA {device['cuda']}, driver {device['driver']}, "
        f"triton {document['versions']['triton']}; copies at {digits(document['copy'] / 1e9)} GB/s; {pages.headline(document)}."
    )
    return "\n\n".join(filter(None, [
        where, markdown(target_lines(document["summary"])),
        markdown(_line(case, rows) for case, rows in cases if "addnorm" in rows),
        " ".join(f"{NAMES[name]} was not installed." for name, version in document["peers"].items() if version is None),
        "\n".join(f"- {failure}" for failure in BENCHMARK.failures(document)), unfinished(document),
    ]))  # fmt: skip


def _line(case: Case, rows: Rows) -> Line:
    """Return the table line of a case: addnorm's times, its share of the copy's bandwidth, the ratios to the peers' times."""
    ours = rows["addnorm"]
    line = {
        "norm": NORMS[case.norm], **size_columns(case), "job": JOBS[case.job].title,
        "share of the copy": f"{ours['share_of_copy']:.0%}",
    }  # fmt: skip
    for part, key in (("device", "median_us"), ("call", "call_us")):
        line[f"{part}, us"] = digits(ours[key])
        line |= {f"{part} / {NAMES[peer]}": f"**{rows[peer][key] / ours[key]:.2f}**" for peer in NAMES if peer in rows}
    return line


BENCHMARK = Benchmark(
    "gpu", plan, measure, str, targets, ("copies", "failures", "rows"),
    {"repeats": REPEATS, "warm_up_ms": WARM_UP_MS, "sample_ms": SAMPLE_MS},
    {"variants": tuple(VARIANTS)}, describe, finish, {"docs/performance.md#gpu": section},
    fields=("norm", "job", "rows", "d", "dtype", "device"), threads=0, rounds=11, budget=540.0, idle=False,
    device="cuda",
)  # fmt: skip
