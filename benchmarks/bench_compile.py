"""Add & Norm under torch.compile: the operator, its formulas fused by Inductor, and torch alone. Writes results/compile.json.

`op` and `formula` are the same functions of addnorm, compiled under `addnorm.set_compile_mode`; `torch` is F.layer_norm(x +
s). The operations around the call are there to be fused with it: that is what an opaque operator loses. The targets are for the
form that a call has by default, `addnorm.ops.compile_mode.form`. README.md in this folder has the protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import torch
from compile_jobs import JOBS, LAYERS, cast, implementation
from torch import Tensor

from addnorm import set_compile_mode
from addnorm.bench import jobs, timing
from addnorm.bench.case import Case, Document, Results, Rows, Selection, by_case, grid, has, select
from addnorm.bench.harness import Benchmark
from addnorm.bench.jobs import DTYPES, NORMS, Call, Set
from addnorm.bench.pages import digits, headline, markdown, quotient
from addnorm.bench.script import main
from addnorm.bench.targets import Number, Target, ratio
from addnorm.ops import compile_mode
from addnorm.ops.compile_mode import Mode

FIELDS = ("norm", "job", "rows", "d", "dtype", "device", "threads")
VARIANTS = ("op", "formula", "torch", "eager")
COMPILED = VARIANTS[:-1]
MODES: dict[str, Mode] = {"op": "op", "formula": "formula"}
BOTH, LAYER, RMS = ("float32", "bfloat16"), ("layer",), ("rms",)
SMALL, MIDDLE, LARGE = (1, 768), (512, 768), (4096, 1024)

# job of `JOBS`, norms, dtypes, shapes
LINES: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[tuple[int, int], ...]], ...] = (
    ("y", LAYER, BOTH, (SMALL, MIDDLE, LARGE)),
    ("y", RMS, BOTH, (MIDDLE,)),
    ("stream", LAYER, BOTH[:1], (SMALL, MIDDLE, LARGE)),
    ("training", LAYER, BOTH, (SMALL, MIDDLE, LARGE)),
    ("training", RMS, BOTH, (MIDDLE,)),
    ("dropout", LAYER, BOTH[:1], (MIDDLE,)),
    ("around", LAYER + RMS, BOTH, (MIDDLE,)),
    ("around_training", LAYER, BOTH, (MIDDLE,)),
    ("around_training", LAYER, BOTH[:1], (LARGE,)),
    ("chain", LAYER, BOTH[:1], (MIDDLE,)),
    ("chain_training", LAYER, BOTH, (MIDDLE,)),
    ("stack", LAYER, BOTH[:1], (MIDDLE,)),
    ("stack", RMS, BOTH[1:], (MIDDLE,)),
    ("stack_training", LAYER, BOTH[:1], (MIDDLE,)),
    ("stack_training", RMS, BOTH[1:], (MIDDLE,)),
)


def cases(selected: Selection, threads: int) -> list[Case]:
    """Return one job at one shape for each combination of `LINES`."""
    device = selected.get("device", ["cpu"])
    return select(
        [
            case for job, norms, dtypes, shapes in LINES
            for case in grid(norm=norms, job=[job], rows__d=shapes, dtype=dtypes, device=device)
        ],
        selected,
    )  # fmt: skip


def title(case: Case) -> str:
    """Return a case in words."""
    return f"{case.norm}, {JOBS[case.job].title}, {case.rows} x {case.d} {case.dtype}"


# ------------------------------------------------------------------------------------------------------------- one case


def inputs(case: Case) -> Set:
    """Return (x, s, weight, bias) and the job's further inputs, the same in every call."""
    rng, job, d = torch.Generator().manual_seed(0), JOBS[case.job], case.d
    alone = case.but(job="forward_backward" if job.backward else "forward_stream")
    args, cotangents = jobs.inputs(alone, case.device)
    drawn = [
        torch.randn(d, generator=rng),
        *(torch.randn(*shape, generator=rng) / math.sqrt(shape[1]) for shape in ((4 * d, d), (d, 4 * d))),
    ]  # fmt: skip
    more = (t.to(case.device, DTYPES[case.dtype].branch).requires_grad_(job.backward) for t in drawn[: job.extra])
    if cotangents and case.job.startswith("around"):  # y is cast
        cotangents = (cast(cotangents[0]), *cotangents[1:])
    return Set((*args, *more), cotangents)


def forward(case: Case, name: str) -> Call:
    """Return a variant as a function of the tensors."""
    op, job = implementation(case, plain=name == "torch"), JOBS[case.job]

    def plain(*tensors: Tensor) -> tuple[Tensor, ...]:
        return job.function(op, *tensors)

    function = torch.compile(plain, fullgraph=True) if name in COMPILED else plain

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        set_compile_mode(MODES.get(name))
        return function(*tensors)

    return call


def timed(case: Case, call: Call, tensors: Set) -> Callable[[], Any]:
    """Return the call that is timed: the outputs, or the gradients; it waits for the device."""

    def once() -> None:
        with torch.set_grad_enabled(JOBS[case.job].backward):
            outputs = call(*tensors.args)
            if tensors.cotangents:
                tensors.gradients(outputs)
        if case.device != "cpu":
            torch.accelerator.synchronize()

    return once


def measure(case: Case, *, rounds: int) -> Results:
    """Return a row for each variant, and the variants that did not compile."""
    torch.compiler.reset()  # only this case's graphs, without the guards of earlier ones
    tensors = inputs(case)
    calls = {name: timed(case, forward(case, name), tensors) for name in VARIANTS}
    config: Any = torch.compiler.config
    try:
        with config.patch(force_disable_caches=True):  # they may have graphs of an earlier state of this library
            return timing.measure(case, calls, rounds, may_fail=COMPILED)
    finally:
        set_compile_mode(None)


# ------------------------------------------------------------------------------------------------------ the default form


def default_form(case: Case) -> Mode:
    """Return the form of a case's call where the caller has not chosen one."""
    residual = torch.empty(1, device=case.device).expand(case.rows, case.d)
    return compile_mode.form(residual, plain=case.job != "dropout") or "op"


def speed(variant: str) -> Number:
    """Return the function that tells how many times as fast a variant is as torch alone; "default" is the default form."""

    def number(rows: Rows) -> float | None:
        case = Case.of(next(iter(rows.values())), FIELDS)
        return ratio(default_form(case) if variant == "default" else variant, "torch")(rows)

    return number


def versus(variant: str, table: Mapping[Case, Rows]) -> list[float]:
    """Return how many times as fast a variant is as torch alone, a number a case."""
    return [*filter(None, map(speed(variant), table.values()))]


TARGETS = [
    Target("default form: lowest (x torch.compile)", ">=", 0.95, speed("default"),
           why="torch.compile alone compiles the same formula; 0.05 is the noise of a case"),
    Target("default form: mean (x torch.compile)", ">=", 1.0, speed("default"), geometric_mean,
           why="the same formula, and noise has no mean"),
    *(
        Target(f"{form}, {job}: times as fast as torch alone", ">=", None, speed(form), geometric_mean, has(job=job))
        for job in JOBS for form in compile_mode.MODES
    ),
]  # fmt: skip


def describe(chosen: Sequence[Case]) -> Document:
    """Return the device and its name."""
    device = chosen[0].device
    return {"device": device, "gpu": torch.cuda.get_device_name() if device == "cuda" else None}


# ------------------------------------------------------------------------------------------------ tables of the pages


NAMES = {"op": "operator", "formula": "formula"}
PEERS = {"torch": "torch alone", "op": "the operator", "formula": "the formula", "eager": "eager addnorm"}


def line(case: Case, rows: Rows) -> dict[str, str]:
    """Return the line of a case: the default form's time, and how many times as fast it is as the others."""
    form = default_form(case)
    ratios = {peer: quotient(rows, peer, form).replace("*", "") if peer != form else "" for peer in PEERS}
    return {
        "compiled expression": JOBS[case.job].title, "norm": NORMS[case.norm], "rows x d": f"{case.rows} x {case.d}",
        "dtype": case.dtype, "default": NAMES[form], "us": digits(rows[form]["median_us"]) if form in rows else "failed",
        **{f"x {name}": ratios[peer] for peer, name in PEERS.items()},
    }  # fmt: skip


def times_section(document: Document) -> str:
    """Return the table of times, and a summary."""
    text = "Medians, ± from quartile to quartile; how many times as fast the default form is, above 1, or how much slower, below:"
    table = markdown(line(*item) for item in by_case(document["rows"], FIELDS).items())
    return f"{text}\n\n{table}\n\n{verdict(document)} {headline(document)}."


def verdict(document: Document) -> str:
    """Return how the default form and the operator compare with torch alone."""
    table = by_case(document["rows"], FIELDS)
    return " ".join(
        f"{name} is {geometric_mean(values):.2f} times as fast as torch alone in the mean and {min(values):.2f} times in the "
        f"slowest of {len(values)} cases."
        for variant, name in {"default": "The default form", "op": "The operator"}.items()
        if (values := versus(variant, table))
    )


BENCHMARK = Benchmark(
    "compile", FIELDS, cases, measure, title, TARGETS, protocol={"layers": LAYERS, "dropout": jobs.DROPOUT}, describe=describe,
    sections={"docs/performance.md#compile": times_section},
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
