"""Stacks of one stream beside the same before wirings had several: did the loop that runs them all cost them time?

python benchmarks/bench_loop.py [--threads 1] [--rounds 201] [--quick]

`before` is `addnorm.nn` and `addnorm.wirings` as they were at the commit before the loop, read from git and imported under
another name. Both call the same operation and the same sublayers, so they differ in the loop alone. `alone` are sublayers that
return what they read: nothing else takes time. Outputs and gradients must be equal bit for bit. The ratio is taken round by
round. README.md in this folder has the protocol.
"""

from __future__ import annotations

import atexit
import importlib
import io
import itertools
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import harness
import torch
from harness import Benchmark, Case, Column, Document, Results, Row, by_case, headline, markdown, right
from torch import Tensor, nn

import addnorm
from addnorm._util.numbers import format_number
from addnorm.bench.targets import Target
from addnorm.bench.timing import interleaved

BEFORE = "f6a1493a28a8cf3c8d6bf080604bbc418ddc15ee"  # the last commit at which a stack had one loop for each flow
NAME = "addnorm_before"
FIELDS = ("wiring", "job", "sublayers", "tokens", "d", "threads")
LAYERS = 4
HEAD_DIM = 64
LEAST = 0.97
JOBS = {"inference": "inference", "training": "forward + backward"}
WIRINGS = ("pre_ln", "post_ln", "sandwich", "layer_scale", "parallel")
SIZES = (("alone", 1, 64), ("attention and feed-forward", 1, 64), ("attention and feed-forward", 128, 256))  # tokens, d
SECONDS = 8.0  # of all rounds of a cell


def cases(threads: int) -> list[Case]:
    """Return a stack of `LAYERS` layers over `(1, tokens, d)` for each wiring, job and kind of sublayers, the smallest last."""
    return [
        Case(wiring=wiring, job=job, sublayers=sublayers, tokens=tokens, d=d, threads=threads)
        for (sublayers, tokens, d), wiring, job in itertools.product(reversed(SIZES), WIRINGS, JOBS)
    ]


@cache
def before() -> Any:
    """Return `addnorm.nn` of the commit `BEFORE`, as a module beside today's.

    Raises:
        RuntimeError: git has no such commit, as in a shallow clone.
    """
    parts = ["src/addnorm/nn", "src/addnorm/wirings"]
    git = ["git", "-C", str(Path(__file__).parent.parent), "archive", BEFORE, *parts]
    try:
        archive = subprocess.run(git, check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"git cannot read the commit {BEFORE[:7]}: {error}. Run `git fetch --unshallow`.") from error
    folder = Path(tempfile.mkdtemp(prefix="addnorm-"))
    atexit.register(shutil.rmtree, folder)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    package = folder / NAME
    (folder / "src" / "addnorm").rename(package)
    (package / "__init__.py").write_text("")
    for path in package.rglob("*.py"):
        text = re.sub(r"\baddnorm\.(nn|wirings)\b", rf"{NAME}.\1", path.read_text())
        path.write_text(text.replace("from addnorm import wirings", f"from {NAME} import wirings"))
    sys.path.append(str(folder))
    return importlib.import_module(f"{NAME}.nn")


def variants(case: Case) -> tuple[dict[str, nn.Module], Tensor, Tensor]:
    """Return both stacks with equal weights, an input, and a gradient of the output."""
    torch.manual_seed(0)
    d = case.d
    sublayers: list[nn.Module] = [nn.Identity() for _ in range(2 * LAYERS)]
    if case.sublayers != "alone":
        sublayers = [
            addnorm.nn.FeedForward(d, 4 * d) if index % 2 else addnorm.nn.SelfAttention(d, d // HEAD_DIM)
            for index in range(2 * LAYERS)
        ]
    # The sublayers are the same modules: copies lie elsewhere in memory, which alone makes a percent.
    modules: dict[str, nn.Module] = {
        "addnorm": addnorm.ResidualStack(sublayers, d, case.wiring),
        "before": before().ResidualStack(sublayers, d, case.wiring),
    }
    state = {name: torch.rand_like(value) - 0.5 for name, value in modules["before"].state_dict().items()}
    for module in modules.values():
        module.load_state_dict(state)
        module.train(case.job == "training")
    shape = (1, case.tokens, d)
    return modules, torch.randn(shape, requires_grad=case.job == "training"), torch.randn(shape)


def call_of(module: nn.Module, job: str, dy: Tensor) -> Callable[[Tensor], Any]:
    """Return the function that is timed."""
    if job == "inference":
        return torch.no_grad()(module)
    parameters = list(module.parameters())
    return lambda x: torch.autograd.grad(module(x), [x, *parameters], dy)


def measure(case: Case, *, rounds: int) -> Results:
    """Return a row for each of both stacks. Their results are compared first.

    Raises:
        ValueError: an output or a gradient differs in a bit.
    """
    modules, x, dy = variants(case)
    calls = {name: call_of(module, case.job, dy) for name, module in modules.items()}
    ours, theirs = ([one] if isinstance(one := call(x), Tensor) else one for call in calls.values())
    if not all(map(torch.equal, ours, theirs)):
        raise ValueError(f"{case.wiring} gives other bits than at {BEFORE[:7]}, expected the same.")
    times = interleaved(calls, [x], rounds, seconds=SECONDS, peer="before")
    return {"rows": [case.row(variant=name, **row) for name, row in times.items()]}


def summarize(results: Results) -> list[Row]:
    """Return for each job the mean ratio, and the lowest bound of a 95 % interval, which has a target."""
    summary: list[Row] = []
    for job, name in JOBS.items():
        rows = [rows["addnorm"] for case, rows in by_case(results["rows"], FIELDS).items() if case.job == job]
        if rows:
            bound = Target(f"{name}: lowest bound of the ratio, before / now", ">=", LEAST)
            met = sum(bool(bound.met(row["paired_low"])) for row in rows)
            summary += [
                bound.row(min(row["paired_low"] for row in rows), job=job, cells=len(rows), cells_met=met),
                Target(f"{name}: mean of the ratio, before / now", ">=", None).row(
                    geometric_mean(row["paired_ratio"] for row in rows), job=job, cells=len(rows)
                ),
            ]
    return summary


def section(document: Document) -> str:
    """Return the page's table: a line a wiring, a column a job and size, each ratio with its interval."""
    results = {case: rows["addnorm"] for case, rows in by_case(document["rows"], FIELDS).items()}
    columns = [(job, size) for job in JOBS for size in SIZES]
    lines = []
    for wiring in dict.fromkeys(case.wiring for case in results):
        cells = {
            (c.job, (c.sublayers, c.tokens, c.d)): "{} ({} to {})".format(
                *(format_number(row[key], 3) for key in ("paired_ratio", "paired_low", "paired_high"))
            )
            for c, row in results.items()
            if c.wiring == wiring
        }
        lines.append([f"`{wiring}`", *(cells.get(column, "") for column in columns)])
    titles = (f"{JOBS[job]}, {sublayers}, {tokens} x {d}" for job, (sublayers, tokens, d) in columns)
    head: list[str | Column] = ["wiring", *right(*titles)]
    return f"{markdown(head, lines)}\n\n{headline(document)}."


BENCHMARK = Benchmark(
    "loop", "Stacks of one stream beside the loop before several streams", FIELDS, cases, measure, summarize,
    lambda case: f"{case.wiring} {JOBS[case.job]}, {case.sublayers}, {case.tokens} x {case.d}",
    protocol={"before": BEFORE, "layers": LAYERS, "head_dim": HEAD_DIM, "dtype": "float32", "cell_seconds": SECONDS},
    threads=1, rounds=201,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(harness.main(BENCHMARK))
