"""Whole models under other allocators and their settings. Writes results/memory.json.

An allocator is chosen when a process starts. So each setting has a process of its own, which computes a step whenever asked;
the steps of all settings are timed in turns, as the variants of every benchmark. README.md in this folder has the protocol.
"""

from __future__ import annotations

import ctypes.util
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from stacks import JOBS, Plain

from addnorm import nn as addnorm_nn
from addnorm.bench import timing
from addnorm.bench.case import Case, Document, Results, Rows, grid
from addnorm.bench.harness import Benchmark
from addnorm.bench.pages import digits, headline, markdown, merge, quotient
from addnorm.bench.script import main

LAYERS = 4
SECONDS = 60.0  # of all rounds of a case
MODELS = {"addnorm": "addnorm.nn.Encoder", "plain": "plain PyTorch"}
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
SETTINGS: dict[str, dict[str, str]] = {
    "glibc": {}, "glibc, memory kept": KEPT, "glibc, huge pages": HUGE, "glibc, memory kept, huge pages": KEPT | HUGE,
    "PyTorch's huge pages": {"THP_MEM_ALLOC_ENABLE": "1"}, "jemalloc": {}, "tcmalloc": {},
}  # fmt: skip
CASES = grid(model=MODELS, job=JOBS, batch=(8,), tokens=(128,), d=(768,))
LIBRARIES = {"jemalloc": ("jemalloc",), "tcmalloc": ("tcmalloc", "tcmalloc_minimal")}


def environment(setting: str) -> dict[str, str]:
    """Return the environment variables of a setting.

    Raises:
        FileNotFoundError: the allocator is not installed.
    """
    names = LIBRARIES.get(setting)
    if names is None:
        return SETTINGS[setting]
    found = next(filter(None, map(ctypes.util.find_library, names)), None)
    if found is None:
        raise FileNotFoundError(f"{setting} is not installed")
    return {"LD_PRELOAD": found}


def build(case: Case) -> Any:
    """Return a step of a case's model: an inference, or a forward, a backward and a step of AdamW."""
    torch.manual_seed(0)
    torch.set_num_threads(case.threads)
    model: Any = addnorm_nn.Encoder(
        LAYERS, case.d, case.d // 64, dim_feedforward=4 * case.d, wiring="pre_ln", norm="layer"
    )
    if case.model == "plain":
        model = Plain(model.stack)
    x, training = torch.randn(case.batch, case.tokens, case.d), case.job == "training"
    model.train(training)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        with torch.set_grad_enabled(training):
            y = model(x)
        if training:
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def work(values: str) -> None:
    """Compute a step for each line of stdin, and answer with the page faults and the largest memory so far."""
    step = build(Case(**json.loads(values)))
    for _ in range(3):
        step()
    print(flush=True)
    for _ in sys.stdin:
        step()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps([usage.ru_minflt, usage.ru_maxrss]), flush=True)


class Worker:
    """Process of one setting that computes a step of a case whenever it is called."""

    def __init__(self, case: Case, setting: str) -> None:
        given = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
        code = f"import bench_memory; bench_memory.work({json.dumps(vars(case))!r})"
        process: Any = subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | given | environment(setting), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        process.stdout.readline()  # it is ready
        self.process = process
        self.faults: list[int] = []  # so far, after each step
        self.peak = 0

    def __call__(self) -> None:
        """Compute a step."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        faults, self.peak = json.loads(self.process.stdout.readline())
        self.faults.append(faults)


def measure(case: Case, *, rounds: int) -> Results:
    """Return a row for each setting, with the faults of a step and the most memory that the process had."""
    running: dict[str, Worker] = {}
    failures = []
    with ExitStack() as stack:
        for setting in SETTINGS:
            try:
                running[setting] = Worker(case, setting)
            except FileNotFoundError as error:
                failures.append(timing.failure(case, setting, error))
            else:
                stack.enter_context(running[setting].process)  # it ends when its stdin is closed
        results = timing.measure(case, running, rounds, seconds=SECONDS, peer="glibc")
    for row in results["rows"]:
        worker = running[row["variant"]]
        faults = statistics.median(b - a for a, b in itertools.pairwise(worker.faults))
        row |= {"faults": faults, "peak_bytes": worker.peak * 1024}
    return {**results, "failures": failures}


def section(document: Document) -> str:
    """Return the page's section: a line a setting and job, both models side by side."""

    def cells(case: Case, rows: Rows) -> dict[str, str]:
        name, row = MODELS[case.model], rows[case.setting]
        return {
            f"{name}: times as fast as with glibc": quotient(rows, "glibc", case.setting),
            f"{name}: ms": digits(row["median_us"] / 1e3), f"{name}: faults": f"{row['faults']:,.0f}",
            f"{name}: peak, MB": f"{row['peak_bytes'] / 1e6:,.0f}",
        }  # fmt: skip

    measured = BENCHMARK.by_case(document).items()
    cases = {case.but(setting=setting): rows for case, rows in measured for setting in SETTINGS if setting in rows}
    lines = merge(cases, lambda case: {"step": JOBS[case.job], "setting": case.setting}, cells)
    return f"{markdown(lines)}\n\n{headline(document)}."


BENCHMARK = Benchmark(
    "memory", CASES, measure,
    lambda case: f"{MODELS[case.model]}, {JOBS[case.job]}",
    protocol={"layers": LAYERS, "optimizer": "AdamW", "cell_seconds": SECONDS, "settings": SETTINGS},
    sections={"docs/performance.md#memory": section}, rounds=31,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
