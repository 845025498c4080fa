"""What an allocator costs a whole model: MiniLM in processes with other settings of malloc. Writes results/memory.json.

Each variant is a process of its own with environment variables that a user can set. The processes of all variants take turns.
A library that is not installed (jemalloc, tcmalloc) is left out, and named in `failures`. README.md has the protocol.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path

import models as real
from stacks import JOBS

from addnorm.bench import timing
from addnorm.bench.case import Case, Document, Results, Row, grid
from addnorm.bench.harness import Benchmark
from addnorm.bench.pages import digits, headline, markdown
from addnorm.bench.script import main

FIELDS = ("job", "batch", "tokens", "threads")
CASES = grid(job__batch__tokens=(("inference", 1, 128), ("inference", 32, 128), ("training", 8, 128)))
PROCESSES, SECONDS = 3, 2.0  # of each variant, and of the calls of each process
LIBRARIES = {"jemalloc": "jemalloc", "tcmalloc": "tcmalloc_minimal"}
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
VARIANTS: dict[str, dict[str, str]] = {
    "glibc": {},
    "glibc that keeps memory": KEEP,
    "huge pages for large tensors": {"THP_MEM_ALLOC_ENABLE": "1"},
    "both": {**KEEP, "THP_MEM_ALLOC_ENABLE": "1"},
    "jemalloc": {"MALLOC_CONF": "oversize_threshold:1,dirty_decay_ms:-1,muzzy_decay_ms:-1"},
    "tcmalloc": {},
}


def measure(case: Case, *, rounds: int) -> Results:
    """Return a row for each variant: the median time of a call over the processes, page faults and the largest memory."""
    found: dict[str, list[Row]] = {}
    failures = []
    for turn in range(min(rounds, PROCESSES)):
        for name, settings in VARIANTS.items():
            variables = dict(settings)
            if name in LIBRARIES:
                path = find_library(LIBRARIES[name])
                if path is None:
                    failures += [case.row(variant=name, error="the library is not installed")] * (turn == 0)
                    continue
                variables["LD_PRELOAD"] = path
            found.setdefault(name, []).append(_run(case, variables))
    rows = [
        case.row(
            variant=name, **timing.spread([row["us"] for row in runs]),
            faults=statistics.median(row["faults"] for row in runs), peak_bytes=max(row["peak_bytes"] for row in runs),
        )
        for name, runs in found.items()
    ]  # fmt: skip
    return {"rows": rows, "failures": failures}


def _run(case: Case, variables: Mapping[str, str]) -> Row:
    """Return what a process with these variables measures."""
    folders = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **variables}
    code = f"import bench_memory; bench_memory.work({json.dumps(vars(case))}, {SECONDS})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    row: Row = json.loads(done.stdout)
    return row


def work(values: Row, seconds: float) -> None:
    """Call the model of a case for some seconds, and print the median time, page faults of a call and the largest memory."""
    import torch

    case = Case(**values)
    torch.set_num_threads(case.threads)
    model, kwargs = real.load_model(case)
    call = (real.training_step if case.job == "training" else real.inference_step)(model, kwargs)
    for _ in range(2):
        call()
    times: list[float] = []
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    faults = (usage.ru_minflt - before) / len(times)
    print(json.dumps({"us": statistics.median(times), "faults": faults, "peak_bytes": usage.ru_maxrss * 1024}))


def section(document: Document) -> str:
    """Return the table: a line a variant, a column a job."""
    cases = BENCHMARK.by_case(document)
    lines = []
    for name, variables in VARIANTS.items():
        cells = {
            title(case): f"**{rows['glibc']['median_us'] / row['median_us']:.2f}** "
            f"({row['faults']:,.0f}; {digits(row['peak_bytes'] / 2**20)})"
            for case, rows in cases.items() if (row := rows.get(name))
        }  # fmt: skip
        settings = " ".join(f"`{key}={value}`" for key, value in variables.items())
        if name in LIBRARIES:
            settings = f"`LD_PRELOAD=lib{LIBRARIES[name]}.so` {settings}".strip()
        lines += [{"malloc": name, "environment": settings or "as it is", **cells}] if cells else []
    text = "Times as fast as without settings (page faults of a call; largest memory of the process, MB):"
    return f"{text}\n\n{markdown(lines)}\n\n{headline(document)}."


def title(case: Case) -> str:
    """Return a case in words."""
    return f"{JOBS[case.job]}, {case.batch} x {case.tokens}"


BENCHMARK = Benchmark(
    "memory", FIELDS, CASES, measure, title, protocol={"processes": PROCESSES, "seconds": SECONDS, "text": real.TEXT},
    sections={"docs/performance.md#memory": section},
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
