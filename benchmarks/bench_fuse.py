"""Effect of addnorm.fuse on MiniLM and on decoders with RMSNorm, in inference and in training steps. Writes results/fuse.json.

Each variant is a copy of the model with its own weights. torch.compile's frontend, which runs the captured graphs as they
are, shows what is gained or lost without fusing. README.md in this folder has the protocol.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import models
import torch
from stacks import DECODED, TITLES
from torch import nn

from addnorm import fuse
from addnorm._util.numbers import format_percent
from addnorm.bench import timing
from addnorm.bench.case import Call, Case, Document, Results, Rows, Target, grid, has, ratio
from addnorm.bench.harness import Benchmark, main
from addnorm.bench.pages import Line, digits, headline, markdown, quotient
from addnorm.fusion.benchmark import saved_bytes
from addnorm.fusion.result import Fusion
from addnorm.stream.dataflow.snapshot import StateSnapshot

CASES = [
    case for model, runs in (
        (models.MINILM, (("inference", 1, 16), ("inference", 8, 128), ("inference", 32, 128), ("training", 8, 128))),
        (models.DECODERS, DECODED), (models.STREAMS, DECODED[::2]),
    )
    for case in grid(model=model, job__batch__tokens=runs, dtype=("float32", "bfloat16"))
]  # fmt: skip
# Cases with Inductor, which compiles for a minute.
has_inductor = has(model=models.MINILM, job="inference", batch=8, tokens=128, dtype="float32")
SECONDS = 20.0  # of a case: a step takes long, and differences of a few per cent must show

MAKE: dict[str, Any] = {
    "plain": lambda model, kwargs: None,
    "fused": lambda model, kwargs: fuse(model, benchmark=False, **kwargs),
    "frontend": lambda model, kwargs: model.compile(backend="eager"),
    "inductor": lambda model, kwargs: model.compile(),
    "fused, inductor": lambda model, kwargs: fuse(model, compile=True, benchmark=False, **kwargs),
}  # fmt: skip


def measure(case: Case, *, rounds: int, inductor: bool = True) -> Results:
    """Return a row for each variant, how long fusing took, and the variants that could not be made."""
    torch.compiler.reset()  # only this case's graphs, without the guards of earlier ones
    torch.manual_seed(0)  # the dropout masks of the proof
    training = case.job == "training"
    original, inputs = models.load_model(case)
    original.train(training)
    copies: dict[str, nn.Module] = {}
    fusions: dict[str, tuple[Fusion, float]] = {}  # with the seconds that each took

    def make(name: str) -> Call:
        copies[name], kwargs = copy.deepcopy((original, inputs))  # each variant has a cache of its own
        start = time.perf_counter()
        if (fusion := MAKE[name](copies[name], kwargs)) is not None:
            fusions[name] = fusion, time.perf_counter() - start
        return (models.training_step if training else models.inference_step)(copies[name], kwargs)

    names = [name for name in MAKE if "inductor" not in name or (inductor and has_inductor(case))]
    # A variant may not compile, and a fused one may raise VerificationError.
    makers = {name: partial(make, name) for name in names}
    results = timing.compare(case, makers, rounds, names[1:], seconds=SECONDS)
    measured = {row["variant"]: row for row in results["rows"]}
    for name, row in measured.items():
        if training:
            row["saved_bytes"] = saved_bytes(partial(copies[name], **inputs), StateSnapshot(copies[name], inputs))
    measured["plain"]["share"] = fusions["fused"][0].share if "fused" in measured else None
    took = [case.row(variant=name, seconds=fusions[name][1]) for name in measured if name in fusions]
    return {"fusions": took, **results}


def targets(document: Document) -> list[Target]:
    """Return the speed of each fused model beside its target, and in how many cases the fused model is proven."""
    return [
        Target("fused, {}: times as fast as the model as it was", ">=", 0.95, ratio("fused", "plain"), None,
               why="a fused model is never slower; 0.05 is the noise of a run"),
        Target("cells in which the fused model is proven", "==", len(BENCHMARK.by_case(document)),
               lambda rows: float("fused" in rows), sum, why="no model is fused without proof"),
    ]  # fmt: skip


def title(case: Case) -> str:
    """Return a case in words."""
    return f"{models.NAMES[case.model]}, {TITLES[case.job]}, {case.batch} x {case.tokens} tokens, {case.dtype}"


def line(case: Case, rows: Rows) -> Line:
    """Return the line of a case: the fused model beside the model as it was."""
    both = [rows[name] for name in ("plain", "fused") if name in rows]
    times = [digits(row["median_us"] / 1000) for row in both] + ["not proven"] * (2 - len(both))
    saved = " → ".join(f"{row['saved_bytes'] / 1e6:.1f}" for row in both if "saved_bytes" in row)
    return {
        "model": models.NAMES[case.model],
        "batch x tokens": f"{case.batch} x {case.tokens}", "run": TITLES[case.job], "dtype": case.dtype,
        "original, ms": times[0], "fused, ms": times[1], "original / fused": quotient(rows, "plain", "fused"),
        "original / captured": quotient(rows, "plain", "frontend"), "captured / fused": quotient(rows, "frontend", "fused"),
        "share of Add & Norm": format_percent(rows["plain"]["share"], 2), "saved for backward, MB": saved,
    }  # fmt: skip


def section(document: Document) -> str:
    """Return the table of the fused model beside the model as it was: a line a case."""
    cases, compiled = BENCHMARK.by_case(document), []
    for case, rows in cases:
        names = {"inductor": "torch.compile alone", "fused, inductor": "fused and compiled"}
        if each := [f"{what} {quotient(rows, 'plain', name)}" for name, what in names.items() if name in rows]:
            compiled.append(f"With Inductor, {title(case)}, times as fast: {', '.join(each)}.")
    seconds = [one["seconds"] for one in document["fusions"] if one["variant"] == "fused"] or [0.0]
    took = f"Fusing, with its proof, took {digits(min(seconds))} to {digits(max(seconds))} seconds"
    text = (
        "MiniLM on Python's own documentation, and decoders of eight layers of 512 features with random weights. Times are "
        "medians, ± from quartile to quartile. Each quotient of times says how many times as fast the second model is. "
        "*Original* is the model before `fuse`; *captured* is the same model in graphs of torch.compile's frontend, with nothing "
        "fused. So original / captured is the gain of capture alone, a gain of torch.compile's frontend. Captured / fused is the "
        "gain of fusing alone, 1 / (1 - share of Add & Norm) at most: a quotient beyond this bound is noise. The last column has "
        "what autograd saves for backward in the original and in the fused model."
    )
    table = markdown(line(*item) for item in cases)
    return "\n\n".join([text, table, *compiled, f"{took}. {headline(document)}."])


BENCHMARK = Benchmark(
    "fuse", CASES, measure, title, targets, ("fusions", "failures", "rows"),
    {"cell_seconds": SECONDS, "text": models.TEXT, "decoders": models.SIZES}, {"inductor": True},
    sections={"docs/fusing.md#fuse": section},
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
