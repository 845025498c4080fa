"""Add & Norm under torch.compile: the operator, its formulas fused by Inductor, and torch alone. Writes results/compile.json.

`op` and `formula` are the same functions of addnorm, compiled under `addnorm.set_compile_mode`; `torch` is F.layer_norm(x +
s). The operations around the call are there to be fused with it: that is what an opaque operator loses. The targets are for the
form that a call has by default, `addnorm.ops.compile_mode.form`. README.md in this folder has the protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm import set_compile_mode
from addnorm._util.timing import synchronize
from addnorm.bench import environment, jobs, timing
from addnorm.bench.case import Call, Case, Document, Results, Rows, Target, grid, ratio
from addnorm.bench.harness import Benchmark, main
from addnorm.bench.jobs import DTYPES, NORMS, Set
from addnorm.bench.pages import Line, digits, markdown, quotient, size_columns, targets_section
from addnorm.ops import compile_mode
from addnorm.ops.compile_mode import Mode

Outputs = tuple[Tensor, ...]
Op = Callable[..., Outputs]

VARIANTS = ("op", "formula", "torch", "eager")
LAYERS = 2  # of the stack
COMPILED = VARIANTS[:-1]
BOTH = ("float32", "bfloat16")
SHAPES = ((1, 768), (512, 768), (4096, 1024))
MIDDLE = SHAPES[1:2]


# ------------------------------------------------------------------------------------------------------------- the jobs


def cast(t: Tensor) -> Tensor:
    """Return a tensor in the other one of float32 and bfloat16."""
    return t.to(torch.float32 if t.dtype == torch.bfloat16 else torch.bfloat16)


def around(op: Op, x: Tensor, s: Tensor, w: Tensor, b: Tensor, gate: Tensor) -> Outputs:
    """Return y and z, with a gelu and a gate before, a scale and a cast after."""
    y, z = op(x, F.gelu(s) * gate, w, b)
    return cast(0.5 * y), z


def chain(op: Op, x: Tensor, s: Tensor, w: Tensor, b: Tensor, gate: Tensor) -> Outputs:
    """Return y and z of two Add & Norms in a row."""
    y, z = op(x, s, w, b)
    return op(z, F.gelu(y) * gate, w, b)


def stack(op: Op, x: Tensor, s: Tensor, w: Tensor, b: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Outputs:
    """Return y and z of a pre-LN stack of feed-forward sublayers."""
    y, z = op(x, s, w, b)
    for _ in range(LAYERS):
        y, z = op(z, F.linear(F.gelu(F.linear(y, up)), down) * gate, w, b)
    return y, z


class Job(NamedTuple):
    """Compiled computation.

    Attributes:
        title: name in tables.
        function: function of an Add & Norm and the tensors that returns the outputs.
        op: job of `addnorm.bench.jobs` that the Add & Norm is.
        extra: inputs besides (x, s, w, b).
        backward: whether gradients are computed.
    """

    title: str
    function: Callable[..., Outputs] = lambda op, *tensors: op(*tensors)
    op: str = "forward_stream"
    extra: int = 0
    backward: bool = False

    def trained(self) -> Job:
        """Return the job with gradients."""
        return self._replace(title=f"{self.title}, with backward", backward=True)


STREAM = Job("y and the stream")
AROUND = Job("gelu, gate, add & norm, scale, cast", around, extra=1)
CHAIN = Job("add & norm, gelu, gate, add & norm", chain, extra=1)
STACK = Job("pre-LN stack", stack, extra=3)
JOBS = {
    "y": Job("y", op="forward"), "stream": STREAM, "training": STREAM.trained(),
    "dropout": Job("dropout", op="dropout").trained(), "around": AROUND,
    "around_training": AROUND.trained(), "chain": CHAIN, "chain_training": CHAIN.trained(), "stack": STACK,
    "stack_training": STACK.trained(),
}  # fmt: skip
PLAN = (  # jobs, norms, sizes, dtypes
    (("y", "training"), "layer", SHAPES, BOTH),
    (("y", "training"), "rms", MIDDLE, BOTH),
    ("stream", "layer", SHAPES, "float32"),
    (("dropout", "chain", "stack", "stack_training"), "layer", MIDDLE, "float32"),
    ("around", NORMS, MIDDLE, BOTH),
    (("around_training", "chain_training"), "layer", MIDDLE, BOTH),
    ("around_training", "layer", SHAPES[2:], "float32"),
    (("stack", "stack_training"), "rms", MIDDLE, "bfloat16"),
)
CASES = [case for job, norm, sizes, dtype in PLAN for case in grid(job=job, norm=norm, rows__d=sizes, dtype=dtype)]


# ------------------------------------------------------------------------------------------------------------- one case


def inputs(case: Case) -> Set:
    """Return (x, s, weight, bias) and the job's further inputs, the same in every call."""
    rng, job, d = torch.Generator().manual_seed(0), JOBS[case.job], case.d
    plain = case.but(job="forward_backward" if job.backward else "forward_stream")
    args, cotangents = jobs.inputs(plain, case.device)
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
    job = JOBS[case.job]
    op = (jobs.eager if name == "torch" else jobs.ours)(case.but(job=job.op, dtype="float32"))  # y has the dtype of z

    def plain(*tensors: Tensor) -> Outputs:
        return job.function(op, *tensors)

    function = torch.compile(plain, fullgraph=True) if name in COMPILED else plain

    mode: Any = name if name in compile_mode.MODES else None

    def call(*tensors: Tensor) -> Outputs:
        set_compile_mode(mode)
        return function(*tensors)

    return call


def timed(case: Case, call: Call, tensors: Set) -> Call:
    """Return the call that is timed: the outputs, or the gradients; it waits for the device."""
    run = jobs.timed(call, tensors)

    def synchronized() -> None:
        run()
        synchronize()

    return run if case.device == "cpu" else synchronized


def measure(case: Case, *, rounds: int) -> Results:
    """Return a row for each variant, and the variants that did not compile."""
    torch.compiler.reset()  # only this case's graphs, without the guards of earlier ones
    tensors = inputs(case)
    makers = {name: lambda name=name: timed(case, forward(case, name), tensors) for name in VARIANTS}
    config: Any = torch.compiler.config
    try:
        with config.patch(force_disable_caches=True):  # they may have graphs of an earlier state of this library
            return timing.compare(case, makers, rounds, COMPILED)
    finally:
        set_compile_mode(None)


# ------------------------------------------------------------------------------------------------------ the default form


def default_form(case: Case) -> Mode:
    """Return the form of a case's call where the caller has not chosen one."""
    residual = torch.empty(1, device=case.device).expand(case.rows, case.d)
    return compile_mode.form(residual, plain=case.job != "dropout") or "op"


def default_speed(rows: Rows) -> float | None:
    """Return how many times as fast the default form of a case is as torch alone."""
    return ratio(default_form(Case(**next(iter(rows.values())))), "torch")(rows)


TARGETS = [
    Target("default form: lowest (x torch.compile)", ">=", 0.95, default_speed,
           why="torch.compile alone compiles the same formula; 0.05 is the noise of a case"),
    Target("default form: mean (x torch.compile)", ">=", 1.0, default_speed, geometric_mean,
           why="the same formula, and noise has no mean"),
    Target("operator: lowest (x torch.compile)", ">=", None, ratio("op", "torch")),
    Target("operator: mean (x torch.compile)", ">=", None, ratio("op", "torch"), geometric_mean),
]  # fmt: skip


# ------------------------------------------------------------------------------------------------ tables of the pages


PEERS = {"torch": "torch alone", "op": "the operator", "formula": "the formula", "eager": "eager addnorm"}


def line(case: Case, rows: Rows) -> Line:
    """Return the line of a case: the default form's time, and how many times as fast it is as the others."""
    form = default_form(case)
    return {
        "compiled expression": JOBS[case.job].title, "norm": NORMS[case.norm], **size_columns(case),
        "default": PEERS[form].removeprefix("the "), "us": digits(rows[form]["median_us"]) if form in rows else "failed",
        **{
            f"x {name}": quotient(rows, peer, form).replace("*", "") if peer != form else ""
            for peer, name in PEERS.items()
        },
    }  # fmt: skip


def times_section(document: Document) -> str:
    """Return the table of times, and how the default form and the operator compare with torch alone."""
    text = "Medians, ± from quartile to quartile; how many times as fast the default form is, above 1, or how much slower, below:"
    table = markdown(line(*item) for item in BENCHMARK.by_case(document))
    return f"{text}\n\n{table}\n\n{targets_section(document)}"


BENCHMARK = Benchmark(
    "compile", CASES, measure, targets=TARGETS, fields=("norm", "job", "rows", "d", "dtype", "device", "threads"),
    protocol={"layers": LAYERS, "dropout": jobs.DROPOUT},
    describe=lambda cases: {"device": environment.device(cases[0].device)},
    sections={"docs/performance.md#compile": times_section},
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
