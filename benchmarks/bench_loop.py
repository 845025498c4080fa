"""Stacks of one stream beside the same before wirings had several: did the loop that runs them all cost them time?

`before` is `addnorm.nn` and `addnorm.wirings` as they were at the commit before the loop, read from git and imported under
another name. Both call the same operation and the same sublayers, so they differ in the loop alone. `alone` are sublayers that
return what they read: nothing else takes time. Outputs and gradients must be equal bit for bit. The ratio is taken round by
round. README.md in this folder has the protocol.
"""

from __future__ import annotations

import atexit
import importlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from stacks import JOBS, call_of
from torch import Tensor, nn

import addnorm
from addnorm.bench import timing
from addnorm.bench.case import Case, Document, Results, grid
from addnorm.bench.harness import Benchmark
from addnorm.bench.pages import headline, interval, markdown, merge
from addnorm.bench.script import main
from addnorm.bench.targets import Target, has, value

BEFORE = "f6a1493a28a8cf3c8d6bf080604bbc418ddc15ee"  # the last commit at which a stack had one loop for each flow
NAME = "addnorm_before"
LAYERS = 4
HEAD_DIM = 64
LEAST = 0.97
SECONDS = 8.0  # of all rounds of a cell
SUBLAYERS = "attention and feed-forward"
CASES = grid(
    sublayers__tokens__d=(("alone", 1, 64), (SUBLAYERS, 1, 64), (SUBLAYERS, 128, 256)),
    wiring=("pre_ln", "post_ln", "sandwich", "layer_scale", "parallel"), job=JOBS,
)  # fmt: skip


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
            sublayer for _ in range(LAYERS)
            for sublayer in (addnorm.nn.SelfAttention(d, d // HEAD_DIM), addnorm.nn.FeedForward(d, 4 * d))
        ]  # fmt: skip
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


def measure(case: Case, *, rounds: int) -> Results:
    """Return a row for each of both stacks. Their results are compared first.

    Raises:
        ValueError: an output or a gradient differs in a bit.
    """
    modules, x, dy = variants(case)
    calls = {name: call_of(module, case.job, x, dy) for name, module in modules.items()}
    ours, theirs = ([one] if isinstance(one := call(), Tensor) else one for call in calls.values())
    if not all(map(torch.equal, ours, theirs)):
        raise ValueError(f"{case.wiring} gives other bits than at {BEFORE[:7]}, expected the same.")
    return timing.measure(case, calls, rounds, seconds=SECONDS, peer="before")


TARGETS = [
    target for job, name in JOBS.items() for target in (
        Target(f"{name}: lowest bound of the ratio, before / now", ">=", LEAST, value("addnorm", "paired_low"), min,
             has(job=job)),
        Target(f"{name}: mean of the ratio, before / now", ">=", None, value("addnorm", "paired_ratio"), geometric_mean,
               has(job=job)),
    )
]  # fmt: skip


def section(document: Document) -> str:
    """Return the page's table: a line a wiring, a column a job and size, each ratio with its interval."""
    lines = merge(
        BENCHMARK.by_case(document), lambda case: {"wiring": f"`{case.wiring}`"},
        lambda case, rows: {f"{JOBS[case.job]}, {case.sublayers}, {case.tokens} x {case.d}": interval(rows["addnorm"])},
    )  # fmt: skip
    return f"{markdown(lines)}\n\n{headline(document)}."


BENCHMARK = Benchmark(
    "loop", ("wiring", "job", "sublayers", "tokens", "d", "threads"), CASES, measure,
    lambda case: f"{case.wiring} {JOBS[case.job]}, {case.sublayers}, {case.tokens} x {case.d}", TARGETS,
    protocol={"before": BEFORE, "layers": LAYERS, "head_dim": HEAD_DIM, "dtype": "float32", "cell_seconds": SECONDS},
    sections={"docs/performance.md#loop": section}, threads=1, rounds=201,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
