"""Add & Norm under torch.compile: the operator, its formulas fused by Inductor, and torch alone. Writes results/compile.json.

`op` and `formula` are the same functions of addnorm, compiled under `addnorm.set_compile_mode`; `torch` is F.layer_norm(x +
s). The operations around the call are there to be fused with it: that is what an opaque operator loses. The targets are for the
form that a call has by default, `addnorm.ops.compile_mode.mode`. README.md in this folder has the protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import torch
from compile_jobs import JOBS, LAYERS, implementation
from torch import Tensor

from addnorm import reference, set_compile_mode
from addnorm._util.numbers import format_number
from addnorm.bench import proofs, timing
from addnorm.bench.case import Case, Document, Results, Row, Selection, by_case, grid, select
from addnorm.bench.harness import Benchmark
from addnorm.bench.jobs import DROPOUT, DTYPES, EPS, NORMS, Call, Set
from addnorm.bench.pages import digits, headline, markdown, merge, quotient
from addnorm.bench.script import main
from addnorm.bench.targets import Number, Target, has, ratio
from addnorm.ops import compile_mode
from addnorm.ops.compile_mode import Mode

FIELDS = ("norm", "job", "rows", "d", "dtype", "device", "threads")
UNIT = 2.0**-24  # round-off of float32
VARIANTS = ("op", "formula", "torch", "eager")
COMPILED = VARIANTS[:-1]
MODES: dict[str, Mode] = {"op": "op", "formula": "formula"}
BOTH, LAYER, RMS = ("float32", "bfloat16"), ("layer",), ("rms",)
SMALL, MIDDLE, LARGE = (1, 768), (512, 768), (4096, 1024)
BITS = {"norm": "layer", "rows": MIDDLE[0], "d": MIDDLE[1]}  # where bits are compared: three compilations a variant

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


def inputs(case: Case, rows: int | None = None) -> Set:
    """Return (x, s, weight, bias) and the job's further inputs, the same in every call; with `rows`, the first rows only."""
    rng, job, dtype = torch.Generator().manual_seed(0), JOBS[case.job], DTYPES[case.dtype].branch
    x, s, dy, dz = (torch.randn(case.rows, case.d, generator=rng)[:rows].to(case.device, dtype) for _ in range(4))
    vectors = [torch.rand(case.d, generator=rng) + 0.5 for _ in range(2)]
    extra = [
        torch.randn(case.d, generator=rng),
        *(torch.randn(*shape, generator=rng) / math.sqrt(shape[1]) for shape in ((4 * case.d, case.d), (case.d, 4 * case.d))),
    ]  # fmt: skip
    weight, bias, *more = [t.to(case.device, dtype) for t in (*vectors, *extra[: job.extra])]
    args = (x, s, weight, bias if case.norm == "layer" else None, *more)
    for t in args:
        if t is not None:
            t.requires_grad_(job.backward)
    if case.job.startswith("around"):  # y is cast
        dy = dy.to(torch.float32 if dtype == torch.bfloat16 else torch.bfloat16)
    return Set(args, (dy + 0.2, dz + 0.2) if job.backward else ())


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
    """Return a row for each variant; for training the errors and, at one shape, the bits; the variants that did not compile."""
    torch.compiler.reset()  # only this case's graphs, without the guards of earlier ones
    tensors, calls = inputs(case), {name: forward(case, name) for name in VARIANTS}
    config: Any = torch.compiler.config
    try:
        with config.patch(force_disable_caches=True):  # they may have graphs of an earlier state of this library
            results: Results = timing.measure(
                case, {name: timed(case, call, tensors) for name, call in calls.items()}, rounds, may_fail=COMPILED
            )
            if case.job == "training":
                calls = {row["variant"]: calls[row["variant"]] for row in results["rows"]}
                results["errors"] = errors(case, calls, tensors)
                if has(**BITS)(case):
                    results["bits"] = [case.row(variant=name, **bits(case, call)) for name, call in calls.items()]
    finally:
        set_compile_mode(None)
    return results


# ----------------------------------------------------------------------------------------------------- errors and bits


def errors(case: Case, calls: Mapping[str, Call], tensors: Set) -> list[Row]:
    """Return relative errors (L2) against float64 at the returned z, beside the limits of docs/numerics.md."""
    alone = case.but(job="forward_backward")
    torch_alone = JOBS[case.job].function
    theirs = distances(alone, lambda *args: torch_alone(implementation(case, plain=True), *args), tensors)
    rows = []
    for name, call in calls.items():
        for what, (error, rounded, noise) in distances(alone, call, tensors).items():
            limit = 1.02 * max(theirs[what][0], rounded) + noise
            row = case.row(variant=name, what=what.removeprefix("d"), error=error, torch=theirs[what][0], limit=limit)
            rows.append(row)
    return rows


def distances(case: Case, call: Call, tensors: Set) -> dict[str, tuple[float, float, float]]:
    """Return for each result its error, that of the truth rounded once, and one float32 round-off of the terms of its sum."""
    named = proofs.results(case, call, tensors)
    truth, z, dy = proofs.truth(case, tensors, named["z"]), named["z"].double(), tensors.cotangents[0].double()
    stats = reference.statistics(z, case.norm, EPS[case.norm])
    terms = {"dweight": (dy * (z - stats.mean) * stats.rstd).abs().sum(0), "dbias": dy.abs().sum(0)}
    results = {}
    for name, t in named.items():
        exact = truth[name]
        noise = UNIT * float(terms.get(name, exact).norm() / exact.norm())
        results[name] = (proofs.distance(t, exact), proofs.distance(exact.to(t.dtype), exact), noise)
    return results


def bits(case: Case, call: Call) -> Row:
    """Return whether another run, another number of threads, and fewer rows give the same bits."""
    torch.compiler.reset()  # each of these is a separate compilation; the limit is eight

    def run(rows: int | None = None) -> dict[str, Tensor]:
        return proofs.results(case.but(job="forward_backward"), call, inputs(case, rows))

    def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor], names: Iterable[str]) -> bool:
        return all(a[name].equal(b[name]) for name in names)

    first, again, few = run(), run(), run(case.rows // 2 + 3)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        other = run()
    finally:
        torch.set_num_threads(threads)
    cut = {name: t[: len(few["y"])] for name, t in first.items()}
    return {
        "run": equal(first, again, first), "threads_kept": equal(first, other, first),
        "rows_kept": equal(cut, few, ("y", "z", "dresidual", "dbranch")),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the default form


def default_form(case: Case) -> Mode:
    """Return the form of a case's call where the caller has not chosen one."""
    residual = torch.empty(1, device=case.device).expand(case.rows, case.d)
    return compile_mode.mode(residual, plain=case.job != "dropout")


def speed(variant: str, peer: str = "torch") -> Number:
    """Return the function that tells how many times as fast a variant is as its peer; "default" is the default form."""

    def number(rows: Mapping[str, Row]) -> float | None:
        case = Case.of(next(iter(rows.values())), FIELDS)
        return ratio(default_form(case) if variant == "default" else variant, peer)(rows)

    return number


def versus(variant: str, table: Mapping[Case, Mapping[str, Row]]) -> list[float]:
    """Return how many times as fast a variant is as torch alone, a number a case."""
    return [value for value in map(speed(variant), table.values()) if value is not None]


def describe_forms(document: Document) -> Document:
    """Return how often each form is the default, and how much of the operator's contract the formula keeps.

    The contract is that of docs/numerics.md: every error within its limit, and the same bits whatever the run, the threads and
    the other rows.
    """
    forms = [default_form(case) for case in by_case(document["rows"], FIELDS)]
    compared = {part: [row for row in document[part] if row["variant"] == "formula"] for part in ("errors", "bits")}
    return {"default": {
        **{form: forms.count(form) for form in compile_mode.MODES},
        "errors": len(compared["errors"]),
        "errors_within": sum(row["error"] <= row["limit"] for row in compared["errors"]),
        "bits": len(compared["bits"]),
        "bits_kept": sum(row["run"] and row["threads_kept"] and row["rows_kept"] for row in compared["bits"]),
    }}  # fmt: skip


TARGETS = [
    Target("default form: lowest (x torch.compile)", ">=", 0.95, speed("default")),
    Target("default form: mean (x torch.compile)", ">=", 1.0, speed("default"), geometric_mean),
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


def line(case: Case, rows: Mapping[str, Row]) -> dict[str, str]:
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
    """Return how each form compares with torch alone, and what the formula keeps of the contract."""
    table, default = by_case(document["rows"], FIELDS), document["default"]
    sentences = [
        f"{name} is {geometric_mean(values):.2f} times as fast as torch alone in the mean and {min(values):.2f} times in the "
        f"slowest of {len(values)} cases."
        for variant, name in {"default": "The default form", "op": "The operator"}.items()
        if (values := versus(variant, table))
    ]
    return (
        f"{' '.join(sentences)} Of the formula's {default['errors']} errors {default['errors_within']} are within the contract, "
        f"and it keeps its bits in {default['bits_kept']} of {default['bits']} cases."
    )


def contract_section(document: Document) -> str:
    """Return the tables of errors, those over their limit marked, and of bits."""
    lines = merge(
        {Case.of(row, (*FIELDS, "variant", "what")): {"": row} for row in document["errors"] if row["variant"] in COMPILED},
        lambda case: {
            "norm": NORMS[case.norm], "rows x d": f"{case.rows} x {case.d}", "dtype": case.dtype, "variant": case.variant,
        },
        lambda case, row: {case.what: f"{format_number(row['']['error'], 2)}{' (over)' * (row['']['error'] > row['']['limit'])}"},
    )  # fmt: skip
    columns = {"run": "another run", "threads_kept": "another number of threads", "rows_kept": "fewer rows"}
    same = [
        {"dtype": row["dtype"], "variant": row["variant"],
         **{name: "the same" if row[key] else "others" for key, name in columns.items()}}
        for row in document["bits"] if row["variant"] in COMPILED
    ]  # fmt: skip
    size = f"{NORMS['layer']}, {BITS['rows']} x {BITS['d']}"
    return (
        "Relative errors against float64 at the returned z, y and the stream with backward; over: more than the bounds of "
        f"[numerics.md](numerics.md) allow:\n\n{markdown(lines)}\n\nBits of the results, {size}:\n\n{markdown(same)}"
    )


BENCHMARK = Benchmark(
    "compile", FIELDS, cases, measure, title, TARGETS, ("errors", "bits", "failures", "rows"),
    {"layers": LAYERS, "dropout": DROPOUT}, describe=describe, verdicts=describe_forms,
    sections={"docs/performance.md#compile": times_section, "docs/performance.md#compile-contract": contract_section},
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
