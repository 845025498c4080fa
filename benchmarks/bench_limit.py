"""The forward beside the fastest that the machine moves its rows, and training beside eager. Writes results/limit.json.

Beside the operation into given memory: `torch.add(out=)`, which moves the same bytes once, and a loop in C++ with the operation's
loads and stores and no arithmetic (loads_and_stores.cpp, built with g++). With gradients: eager PyTorch, compared round by round.
README.md in this folder has the protocol.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from addnorm.bench import timing
from addnorm.bench.case import Case, Document, Results, Target, grid, has, ratio, value
from addnorm.bench.harness import Benchmark, main
from addnorm.bench.jobs import EPS, NORMS, inputs
from addnorm.bench.operation import DTYPES, FIFTEEN_TENSORS, SHAPES, variants
from addnorm.bench.pages import digits, headline, interval, markdown, merge, quotient, size_columns
from addnorm.functional import FUNCTIONS

JOBS = {"y": "y alone", "stream": "y and the stream"}
TRAINING = "forward_backward"
SIZES = {"in cache": SHAPES[2:5], "from memory": SHAPES[5:]}
SOURCE = Path(__file__).parent / "loads_and_stores.cpp"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Wno-ignored-attributes")
# By job and size: the bound, and why.
BOUNDS = {
    ("y", "in cache"): (1.35, "the add moves as many tensors; the arithmetic of the norm counts in the caches"),
    ("stream", "in cache"): (1.8, "four tensors instead of the add's three, and the arithmetic of the norm"),
    ("y", "from memory"): (1.15, "the bytes of the add, and the noise of memory"),
}
PEERS = {"add": "torch.add", "loop": "equal loads and stores"}
CASES = [
    *grid(rows__d=SHAPES[2:], dtype=DTYPES, norm=NORMS, job=JOBS),
    *grid(norm=NORMS, job=TRAINING, rows__d=SHAPES, dtype=DTYPES),
]


@cache
def build() -> Any:
    """Return the compiled loop."""
    with tempfile.TemporaryDirectory() as folder:
        object_file, library = f"{folder}/loop.o", f"{folder}/loop.so"
        # Linked without -fopenmp: OpenMP's runtime is torch's.
        for step in (
            [*FLAGS, "-fopenmp", "-c", str(SOURCE), "-o", object_file],
            ["-shared", object_file, "-o", library],
        ):
            subprocess.run(["g++", *step], check=True)
        function = ctypes.CDLL(library).loads_and_stores
    function.argtypes = [*[ctypes.c_void_p] * 6, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    function.restype = None
    return function


def loop_of(tensors: Sequence[Tensor | None], y: Tensor, z: Tensor | None, threads: int) -> Any:
    """Return the loop as a function without arguments. It writes y, and z unless it is None."""
    pointers = [None if t is None else t.data_ptr() for t in (*tensors, y, z)]
    return partial(build(), *pointers, y.shape[0], y.shape[1] * y.element_size(), threads)


def measure(case: Case, *, rounds: int) -> Results:
    """Return a row for the operation, the add and the loop; with gradients for the operation and eager PyTorch."""
    if case.job == TRAINING:
        makers = variants(case)
        return timing.compare(case, {name: makers[name] for name in ("eager", "addnorm")}, rounds, peer="eager")
    args: Any = inputs(case.but(job="forward_stream")).args
    stream = case.job == "stream"
    y, z = (torch.empty_like(args[1]) for _ in range(2))
    op: Any = FUNCTIONS[case.norm][1]
    out: Any = (y, z) if stream else y
    calls = {
        "addnorm": partial(op, *args, EPS[case.norm], out=out, return_residual=stream),
        "add": partial(torch.add, *args[:2], out=y),
        "loop": loop_of(args, y, z if stream else None, case.threads),
    }
    with torch.no_grad():
        return {"rows": timing.measure(case, calls, rounds)}


TARGETS = [
    Target(f"{JOBS[job]}, {where}: highest (x the time of {name})", "<=", bound, ratio(peer, "addnorm"), max,
           has(job=job, rows=[rows for rows, _ in SIZES[where]]), why=why)
    for (job, where), (bound, why) in BOUNDS.items() for peer, name in PEERS.items()
] + [
    Target("with gradients: lowest bound of the interval of the ratio (x eager)", ">=", 1.0, value("addnorm", "paired_low"), min,
           has(job=TRAINING), why="never slower, whatever the noise"),
    Target("with gradients, 128+ rows, LayerNorm: mean (x eager)", ">=", 1.8, value("addnorm", "paired_ratio"),
           geometric_mean, has(job=TRAINING, rows=range(128, 2**31), norm="layer"), why=FIFTEEN_TENSORS),
]  # fmt: skip


def section(document: Document) -> str:
    """Return the page's section: a line a case of the forward."""
    lines = [
        {
            **size_columns(case), "norm": NORMS[case.norm],
            "into given memory": JOBS[case.job], **{f"x {name}": quotient(rows, "addnorm", peer) for peer, name in PEERS.items()},
            **{f"{name}, µs": digits(rows[name]["median_us"]) for name in ("addnorm", "add", "loop")},
        }
        for case, rows in BENCHMARK.by_case(document) if case.job != TRAINING
    ]  # fmt: skip
    return f"{markdown(lines)}\n\n{headline(document)}."


def training_section(document: Document) -> str:
    """Return the ratios with gradients: a line a shape and dtype."""
    lines = merge(
        (size_columns(case), {NORMS[case.norm]: interval(rows["addnorm"])})
        for case, rows in BENCHMARK.by_case(document) if case.job == TRAINING
    )  # fmt: skip
    return f"{markdown(lines)}\n\n{headline(document)}."


BENCHMARK = Benchmark(
    "limit", CASES, measure, targets=TARGETS, protocol={"flags": " ".join(FLAGS)},
    sections={"docs/performance.md#limit": section, "docs/performance.md#limit-training": training_section},
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
