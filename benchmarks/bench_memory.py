"""Whole models under other allocators and their settings. Writes results/memory.json.

An allocator is chosen when a process starts. So each setting has a process of its own, which computes a step whenever asked;
the steps of all settings are timed in turns, as the variants of every benchmark. README.md in this folder has the protocol.
"""

from __future__ import annotations

import ctypes.util
import itertools
import os
import resource
import statistics
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
from stacks import JOBS, LAYERS, Plain, encoder

from addnorm.bench import timing
from addnorm.bench.case import Call, Case, Document, Results, grid
from addnorm.bench.harness import Benchmark, main
from addnorm.bench.pages import digits, headline, markdown, merge, quotient

Usage = tuple[int, int]  # page faults, and the largest memory, of a process so far

SECONDS = 60.0  # of all rounds of a case
MODELS = {"addnorm": "addnorm.nn.Encoder", "plain": "plain PyTorch"}
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
SETTINGS = {
    "glibc": {}, "glibc, memory kept": KEPT, "glibc, huge pages": HUGE, "glibc, memory kept, huge pages": KEPT | HUGE,
    "PyTorch's huge pages": {"THP_MEM_ALLOC_ENABLE": "1"}, "jemalloc": {}, "tcmalloc": {},
}  # fmt: skip
CASES = grid(model=MODELS, job=JOBS, batch=8, tokens=128, d=768)
LIBRARIES = {"jemalloc": ("jemalloc",), "tcmalloc": ("tcmalloc", "tcmalloc_minimal")}


def environment(setting: str) -> dict[str, str]:
    """Return the environment variables of a setting.

    Raises:
        FileNotFoundError: the allocator is not installed.
    """
    if setting not in LIBRARIES:
        return SETTINGS[setting]
    for name in LIBRARIES[setting]:
        if path := ctypes.util.find_library(name):
            return {"LD_PRELOAD": path}
    raise FileNotFoundError(f"{setting} is not installed")


@cache
def build(case: Case) -> Call:
    """Return a step of a case's model, after three calls: an inference, or a forward, a backward and a step of AdamW."""
    torch.manual_seed(0)
    torch.set_num_threads(case.threads)
    model: Any = encoder(case.d, "pre_ln")
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

    for _ in range(3):
        step()
    return step


def work(case: Case) -> Usage:
    """Compute a step, and return the page faults and the largest memory of this process so far."""
    build(case)()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_maxrss


def start(case: Case, setting: str, usages: list[Usage], stack: ExitStack) -> Call:
    """Start the process of a setting, and return a function that computes a step in it and adds its usage to `usages`."""
    pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))

    def step() -> None:
        usages.append(pool.submit(work, case).result())

    with mock.patch.dict(os.environ, environment(setting)):
        step()  # starts the process
    return step


def measure(case: Case, *, rounds: int) -> Results:
    """Return a row for each setting, with the faults of a step and the most memory that the process had."""
    usages: dict[str, list[Usage]] = {name: [] for name in SETTINGS}
    with ExitStack() as stack:
        makers = {name: partial(start, case, name, some, stack) for name, some in usages.items()}
        results = timing.compare(case, makers, rounds, LIBRARIES, seconds=SECONDS, peer="glibc")
    for row in results["rows"]:
        faults, peaks = zip(*usages[row["variant"]], strict=True)
        row |= {
            "faults": statistics.median(b - a for a, b in itertools.pairwise(faults)), "peak_bytes": peaks[-1] * 1024,
        }  # fmt: skip
    return results


def section(document: Document) -> str:
    """Return the page's section: a line a setting and job, both models side by side."""
    lines = merge(
        (
            {"step": JOBS[case.job], "setting": setting},
            {
                f"{name}: times as fast as with glibc": quotient(rows, "glibc", setting),
                f"{name}: ms": digits(row["median_us"] / 1e3), f"{name}: faults": f"{row['faults']:,.0f}",
                f"{name}: peak, MB": f"{row['peak_bytes'] / 1e6:,.0f}",
            },
        )
        for case, rows in BENCHMARK.by_case(document) for name in [MODELS[case.model]] for setting, row in rows.items()
    )  # fmt: skip
    return f"{markdown(lines)}\n\n{headline(document)}."


BENCHMARK = Benchmark(
    "memory", CASES, measure, protocol={"layers": LAYERS, "optimizer": "AdamW", "cell_seconds": SECONDS, "settings": SETTINGS},
    sections={"docs/performance.md#memory": section}, rounds=31,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
