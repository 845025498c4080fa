"""The forward beside the fastest that the machine moves its rows, and training beside eager. Writes results/limit.json.

python benchmarks/bench_limit.py [--threads 2] [--rounds 21] [--quick]

Beside the operation into given memory: `torch.add(out=)`, which moves the same bytes once, and a loop in C++ with the operation's
loads and stores and no arithmetic (loads_and_stores.cpp, built with g++). With gradients: eager PyTorch, compared round by round.
README.md in this folder has the protocol.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import harness
import torch
from harness import Benchmark, Case, Results, Row, by_case, digits, markdown, right
from torch import Tensor

from addnorm import add_layer_norm, add_rms_norm
from addnorm.bench import timing
from addnorm.bench.cases import DTYPES, EPS, NORMS, matrix
from addnorm.bench.operation import variants
from addnorm.bench.targets import Goal, Target, ratio

JOBS = {"y": "y alone", "stream": "y and the stream"}
TRAINING = "forward_backward"
FIELDS = ("norm", "job", "threads", "rows", "d", "dtype")
IN_CACHE = ((128, 768), (512, 768), (2048, 1024))
LARGE = ((8192, 768), (4096, 4096))
SOURCE = Path(__file__).parent / "loads_and_stores.cpp"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Wno-ignored-attributes")
TARGETS = {("y", True): 1.35, ("stream", True): 1.8, ("y", False): 1.15}  # by job, and whether the case fits the cache


def cases(threads: int) -> list[Case]:
    """Return all cases, those in cache first."""
    return [
        Case(norm=norm, job=job, threads=threads, rows=rows, d=d, dtype=dtype)
        for rows, d in (*IN_CACHE, *LARGE) for dtype in DTYPES for norm in NORMS for job in JOBS
    ] + matrix(jobs=(TRAINING,), threads=threads)  # fmt: skip


@functools.cache
def build() -> Any:
    """Return the compiled loop."""
    with tempfile.TemporaryDirectory() as folder:
        object_file, library = Path(folder) / "loop.o", Path(folder) / "loop.so"
        subprocess.run(["g++", *FLAGS, "-fopenmp", "-c", str(SOURCE), "-o", str(object_file)], check=True)
        subprocess.run(
            ["g++", "-shared", str(object_file), "-o", str(library)], check=True
        )  # OpenMP's runtime is torch's
        function = ctypes.CDLL(str(library)).loads_and_stores
    function.argtypes = [*[ctypes.c_void_p] * 6, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    function.restype = None
    return function


def loop_of(inputs: list[Tensor | None], outputs: tuple[Tensor, Tensor | None], threads: int) -> Any:
    """Return the loop as a function without arguments."""
    function, residual = build(), inputs[0]
    assert residual is not None
    pointers = [None if t is None else t.data_ptr() for t in (*inputs, *outputs)]
    rows, row_bytes = residual.shape[0], residual.shape[1] * residual.element_size()
    return functools.partial(function, *pointers, rows, row_bytes, threads)


def measure(case: Case, *, rounds: int) -> Results:
    """Return a row for the operation, the add and the loop; with gradients for the operation and eager PyTorch."""
    if case.job == TRAINING:
        calls, arguments = variants(case, compiled=False)
        del calls["add"]
        times = timing.interleaved(calls, arguments, rounds=rounds, peer="eager")
        return {"rows": [case.row(variant=name, **row) for name, row in times.items()]}
    dtype = DTYPES[case.dtype]
    residual, branch = (torch.randn(case.rows, case.d).to(dtype) for _ in range(2))
    weight, bias = (torch.rand(case.d).add_(0.5).to(dtype) for _ in range(2))
    y, z = torch.empty_like(residual), torch.empty_like(residual)
    layer, stream = case.norm == "layer", case.job == "stream"
    parameters = (weight, bias) if layer else (weight, None)
    function: Any = add_layer_norm if layer else add_rms_norm
    out: Any = (y, z) if stream else y
    inputs = (residual, branch, *parameters, EPS[case.norm])
    calls = {
        "addnorm": lambda: function(*inputs, out=out, return_residual=stream),
        "add": lambda: torch.add(residual, branch, out=y),
        "loop": loop_of([residual, branch, *parameters], (y, z if stream else None), case.threads),
    }
    with torch.no_grad():
        times = timing.interleaved(calls, rounds=rounds)
    return {"rows": [case.row(variant=name, **row) for name, row in times.items()]}


def in_cache(case: Case) -> bool:
    """Return whether a case is one of those in cache."""
    return (case.rows, case.d) in IN_CACHE


def summarize(results: Results) -> list[Row]:
    """Return the highest ratio to the add and to the loop, for each job in cache and from memory."""
    table, summary = by_case(results["rows"], FIELDS), []
    for (job, cached), bound in TARGETS.items():
        for peer, name in (("add", "torch.add"), ("loop", "equal loads and stores")):
            place = "in cache" if cached else "from memory"
            target = Target(f"{JOBS[job]}, {place}: highest (x the time of {name})", "<=", bound)
            goal = Goal(
                target, lambda rows, peer=peer: ratio(peer, "addnorm")(rows), max,  # type: ignore[misc]  # the default binds it
                lambda case, job=job, cached=cached: case.job == job and in_cache(case) == cached,  # type: ignore[misc]  # as above
            )  # fmt: skip
            if values := [*goal.numbers(table).values()]:
                summary.append(target.row(max(values), cells=len(values)))
    training = {case: rows["addnorm"] for case, rows in table.items() if case.job == TRAINING}
    many = [row["paired_ratio"] for case, row in training.items() if case.rows >= 128 and case.norm == "layer"]
    if many:
        lowest = min(row["paired_low"] for row in training.values())
        target = Target("with gradients: lowest 95 % bound of the ratio (x eager)", ">=", 0.97)
        summary.append(target.row(lowest, cells=len(training)))
        target = Target("with gradients, 128+ rows, LayerNorm: mean (x eager)", ">=", 2.0)
        summary.append(target.row(geometric_mean(many), cells=len(many)))
    return summary


def section(document: harness.Document) -> str:
    """Return the page's section: a line a case of the forward."""
    lines = []
    for case, rows in by_case(document["rows"], FIELDS).items():
        if case.job == TRAINING:
            continue
        ratios = [harness.quotient(rows, "addnorm", peer) for peer in ("add", "loop")]
        times = [digits(rows[name]["median_us"]) for name in ("addnorm", "add", "loop")]
        lines.append([f"{case.rows} x {case.d}", case.dtype, NORMS[case.norm], JOBS[case.job], *ratios, *times])
    head: list[Any] = [
        *right("rows x d"), "dtype", "norm", "into given memory",
        *right("x torch.add", "x equal loads and stores", "addnorm, µs", "torch.add, µs", "loop, µs"),
    ]  # fmt: skip
    return f"{markdown(head, lines)}\n\n{harness.headline(document)}."


def training_section(document: harness.Document) -> str:
    """Return the ratios with gradients: a line a shape and dtype."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for case, rows in by_case(document["rows"], FIELDS).items():
        if case.job == TRAINING:
            row = rows["addnorm"]
            text = f"**{row['paired_ratio']:.2f}** ({row['paired_low']:.2f} to {row['paired_high']:.2f})"
            lines.setdefault((f"{case.rows} x {case.d}", case.dtype), {})[case.norm] = text
    table = markdown(
        [*right("rows x d"), "dtype", *right(*NORMS.values())],
        [[*size, *(by.get(norm, "") for norm in NORMS)] for size, by in lines.items()],
    )
    return f"{table}\n\n{harness.headline(document)}."


def title(case: Case) -> str:
    """Return a case in words."""
    return f"{NORMS[case.norm]}, {JOBS.get(case.job, 'with gradients')}, {case.rows} x {case.d} {case.dtype}"


BENCHMARK = Benchmark(
    name="limit", about="the forward beside the fastest that its rows can be read and written", fields=FIELDS, cases=cases,
    measure=measure, summarize=summarize, protocol={"flags": " ".join(FLAGS)},
    title=title,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
