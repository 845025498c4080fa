"""Add & Norm under torch.compile: the operator, its formulas fused by Inductor, and torch alone. Writes results/compile.json.

`op` and `formula` are the same functions of addnorm, compiled under `addnorm.set_compile_mode`; `torch` is F.layer_norm(x +
s). The operations around the call are there to be fused with it: that is what an opaque operator loses. The targets are for the
form that a call has by default, `addnorm.ops.compile_mode.mode`. README.md in this folder has the protocol.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import geometric_mean
from typing import Any

import harness
import torch
from compile_jobs import EPS, JOBS, LAYERS, Outputs, implementation
from harness import Case, Column, Document, Results, Row, by_case, digits, headline, markdown, quotient, right
from torch import Tensor

from addnorm import reference, set_compile_mode
from addnorm.bench.cases import DROPOUT, DTYPES, NORMS
from addnorm.bench.targets import Target, ratio
from addnorm.bench.timing import interleaved
from addnorm.ops import compile_mode
from addnorm.ops.compile_mode import Mode
from addnorm.reference import Norm

FIELDS = ("norm", "job", "rows", "d", "dtype", "device", "threads")
UNIT = 2.0**-24  # round-off of float32
VARIANTS = ("op", "formula", "torch", "eager")
COMPILED = VARIANTS[:-1]
MODES: dict[str, Mode] = {"op": "op", "formula": "formula"}
PARTS = ("errors", "bits", "failures", "rows")
SMALL, MIDDLE, LARGE = (1, 768), (512, 768), (4096, 1024)
BITS: tuple[Norm, int, int] = ("layer", *MIDDLE)  # where bits are compared: three compilations a variant

# job of `JOBS`, norms, dtypes, shapes
LINES: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[tuple[int, int], ...]], ...] = (
    ("y", ("layer",), ("float32", "bfloat16"), (SMALL, MIDDLE, LARGE)),
    ("y", ("rms",), ("float32", "bfloat16"), (MIDDLE,)),
    ("stream", ("layer",), ("float32",), (SMALL, MIDDLE, LARGE)),
    ("training", ("layer",), ("float32", "bfloat16"), (SMALL, MIDDLE, LARGE)),
    ("training", ("rms",), ("float32", "bfloat16"), (MIDDLE,)),
    ("dropout", ("layer",), ("float32",), (MIDDLE,)),
    ("around", ("layer", "rms"), ("float32", "bfloat16"), (MIDDLE,)),
    ("around_training", ("layer",), ("float32", "bfloat16"), (MIDDLE,)),
    ("around_training", ("layer",), ("float32",), (LARGE,)),
    ("chain", ("layer",), ("float32",), (MIDDLE,)),
    ("chain_training", ("layer",), ("float32", "bfloat16"), (MIDDLE,)),
    ("stack", ("layer",), ("float32",), (MIDDLE,)),
    ("stack", ("rms",), ("bfloat16",), (MIDDLE,)),
    ("stack_training", ("layer",), ("float32",), (MIDDLE,)),
    ("stack_training", ("rms",), ("bfloat16",), (MIDDLE,)),
)


def cases(threads: int, device: str = "cpu") -> list[Case]:
    """Return one job at one shape for each combination of `LINES`."""
    return [
        Case(norm=norm, job=job, rows=rows, d=d, dtype=dtype, device=device, threads=threads)
        for job, norms, dtypes, shapes in LINES
        for norm, dtype, (rows, d) in itertools.product(norms, dtypes, shapes)
    ]


def title(case: Case) -> str:
    """Return a case in words."""
    return f"{case.norm}, {JOBS[case.job].title}, {case.rows} x {case.d} {case.dtype}"


# ------------------------------------------------------------------------------------------------------------- one case


def inputs(case: Case, rows: int | None = None) -> list[Tensor]:
    """Return (x, s, weight, bias) and the job's further inputs, the same in every call; with `rows`, the first rows only."""
    rng = torch.Generator().manual_seed(0)
    big = [torch.randn(case.rows, case.d, generator=rng)[:rows] for _ in range(2)]
    vectors = [torch.rand(case.d, generator=rng) + 0.5 for _ in range(2)]
    extra = [
        torch.randn(case.d, generator=rng),
        *(torch.randn(*shape, generator=rng) / math.sqrt(shape[1]) for shape in ((4 * case.d, case.d), (case.d, 4 * case.d))),
    ]  # fmt: skip
    job = JOBS[case.job]
    tensors = [*big, *vectors, *extra[: job.extra]]
    return [t.to(case.device, DTYPES[case.dtype]).requires_grad_(job.backward) for t in tensors]


def cotangents(case: Case, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return random gradients of the outputs, the same in every call; for fewer rows, those of the first rows."""
    rng = torch.Generator().manual_seed(1)
    return [(torch.randn(case.rows, case.d, generator=rng)[: len(t)] + 0.2).to(t) for t in outputs]


def variants(case: Case) -> dict[str, Callable[..., Any]]:
    """Return the variants as functions of `inputs`."""
    job = JOBS[case.job]
    kept: dict[tuple[torch.Size, ...], list[Tensor]] = {}

    def gradients_of(outputs: Sequence[Tensor]) -> list[Tensor]:  # made once for each shape, outside the time
        shapes = tuple(t.shape for t in outputs)
        return kept.get(shapes) or kept.setdefault(shapes, cotangents(case, outputs))

    def variant(name: str) -> Callable[..., Any]:
        op = implementation(case.norm, "eager" if name == "torch" else "addnorm", case.d)

        def plain(*tensors: Tensor) -> Outputs:
            return job.function(op, *tensors)

        function = torch.compile(plain, fullgraph=True) if name in COMPILED else plain
        mode = MODES.get(name)

        def call(*tensors: Tensor) -> Any:
            set_compile_mode(mode)
            with torch.set_grad_enabled(job.backward):
                outputs = function(*tensors)
                if not job.backward:
                    return outputs
                wanted = tensors if case.norm == "layer" else (*tensors[:3], *tensors[4:])  # RMSNorm has no bias
                return outputs, torch.autograd.grad(outputs, wanted, gradients_of(outputs))

        return call

    return {name: variant(name) for name in VARIANTS}


def measure(case: Case, *, rounds: int) -> Results:
    """Return a row for each variant; for training the errors and, at one shape, the bits; the variants that did not compile."""
    config: Any = torch.compiler.config
    with config.patch(force_disable_caches=True):  # they may have graphs of an earlier state of this library
        return _measure(case, rounds)


def _measure(case: Case, rounds: int) -> Results:
    torch.compiler.reset()  # only this case's graphs, without the guards of earlier ones
    tensors, calls = inputs(case), variants(case)
    results: Results = {part: [] for part in PARTS}
    try:
        for name in VARIANTS:
            try:
                calls[name](*tensors)
            except Exception as error:  # this machine cannot compile it
                if name == "eager":
                    raise
                results["failures"].append(harness.failure(case, name, error))
                del calls[name]
        for name, row in interleaved(
            {name: synchronized(case, call) for name, call in calls.items()}, tensors, rounds
        ).items():
            results["rows"].append(case.row(variant=name, **row))
        if case.job == "training":
            results["errors"] = errors(case, calls, tensors)
            if (case.norm, case.rows, case.d) == BITS:
                results["bits"] = [case.row(variant=name, **bits(case, call)) for name, call in calls.items()]
    finally:
        set_compile_mode(None)
    return results


def synchronized(case: Case, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that waits for the device."""
    if case.device == "cpu":
        return call

    def wait(*tensors: Tensor) -> None:
        call(*tensors)
        torch.accelerator.synchronize()

    return wait


# ----------------------------------------------------------------------------------------------------- errors and bits


def named(result: tuple[Outputs, Outputs]) -> dict[str, Tensor]:
    """Return the results of a call of `training` by name."""
    (y, z), grads = result
    return {
        "y": y.detach(),
        "z": z.detach(),
        **dict(zip(("residual", "branch", "weight", "bias"), grads, strict=False)),
    }


def errors(case: Case, calls: Mapping[str, Callable[..., Any]], tensors: Sequence[Tensor]) -> list[Row]:
    """Return relative errors (L2) against float64 at the returned z, beside the limits of docs/numerics.md."""
    outputs = implementation(case.norm, "eager", case.d).both(*tensors[:4])
    wanted = tensors[:4] if case.norm == "layer" else tensors[:3]
    eager = named((outputs, torch.autograd.grad(outputs, wanted, cotangents(case, outputs))))
    theirs = distances(case, tensors, eager)
    rows = []
    for name, call in calls.items():
        for what, (off, rounded, noise) in distances(case, tensors, named(call(*tensors))).items():
            limit = 1.02 * max(theirs[what][0], rounded) + noise
            rows.append(case.row(variant=name, what=what, error=off, torch=theirs[what][0], limit=limit))
    return rows


def distances(
    case: Case, tensors: Sequence[Tensor], got: Mapping[str, Tensor]
) -> dict[str, tuple[float, float, float]]:
    """Return for each result its error, that of the truth rounded once, and one float32 round-off of the terms of its sum."""
    x, s, w, b = (t.detach().double() for t in tensors[:4])
    dy, dz = (t.double() for t in cotangents(case, (got["y"], got["z"])))
    z = got["z"].double()
    norm: reference.Norm = "layer" if case.norm == "layer" else "rms"
    stats = reference.statistics(z, norm, EPS)
    grads = reference.normalize_backward(dy, z, w, stats, norm=norm)
    terms = {"weight": (dy * (z - stats.mean) * stats.rstd).abs().sum(0), "bias": dy.abs().sum(0)}
    total = grads.z + dz
    y = reference.normalize(z, w, b if norm == "layer" else None, norm=norm, eps=EPS)
    truth = {"z": x + s, "y": y, "residual": total, "branch": total, "weight": grads.weight, "bias": grads.bias}
    results = {}
    for name, t in got.items():
        exact = truth[name]
        size = exact.norm()
        results[name] = (
            float((t.double() - exact).norm() / size),
            float((exact.to(t.dtype).double() - exact).norm() / size),
            UNIT * float(terms.get(name, exact).norm() / size),
        )
    return results


def bits(case: Case, call: Callable[..., Any]) -> Row:
    """Return whether another run, another number of threads, and fewer rows give the same bits."""
    torch.compiler.reset()  # each of these is a separate compilation; the limit is eight
    tensors = inputs(case)
    first, again = named(call(*tensors)), named(call(*tensors))
    few = named(call(*inputs(case, case.rows // 2 + 3)))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        other = named(call(*tensors))
    finally:
        torch.set_num_threads(threads)
    by_row = ("y", "z", "residual", "branch")
    return {
        "run": equal(first, again, first),
        "threads_kept": equal(first, other, first),
        "rows_kept": equal({name: first[name][: len(few[name])] for name in by_row}, few, by_row),
    }


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor], names: Iterable[str]) -> bool:
    """Return whether the named tensors have the same bits."""
    return all(a[name].equal(b[name]) for name in names)


# ------------------------------------------------------------------------------------------------------ the default form


def default_form(case: Case) -> Mode:
    """Return the form of a case's call where the caller has not chosen one."""
    residual = torch.empty(1, device=case.device).expand(case.rows, case.d)
    return compile_mode.mode(residual, plain=case.job != "dropout")


def versus(variant: str, peer: str, table: Mapping[Case, Mapping[str, Row]]) -> list[float]:
    """Return how many times as fast a variant is as its peer, a number a case; "default" is the default form."""
    ratios = (
        ratio(default_form(case) if variant == "default" else variant, peer)(rows) for case, rows in table.items()
    )
    return [value for value in ratios if value is not None]


def describe_forms(results: Results) -> Row:
    """Return how often each form is the default, and how much of the operator's contract the formula keeps.

    The contract is that of docs/numerics.md: every error within its limit, and the same bits whatever the run, the threads and
    the other rows.
    """
    forms = [default_form(case) for case in by_case(results["rows"], FIELDS)]
    compared = {part: [row for row in results[part] if row["variant"] == "formula"] for part in ("errors", "bits")}
    return {
        **{form: forms.count(form) for form in compile_mode.MODES},
        "errors": len(compared["errors"]),
        "errors_within": sum(row["error"] <= row["limit"] for row in compared["errors"]),
        "bits": len(compared["bits"]),
        "bits_kept": sum(row["run"] and row["threads_kept"] and row["rows_kept"] for row in compared["bits"]),
    }


def summarize(results: Results) -> list[Row]:
    """Return the targets of the default form, then for each job the mean ratio of each form to torch alone."""
    table = by_case(results["rows"], FIELDS)
    summary: list[Row] = []
    if values := versus("default", "torch", table):
        numbers = {"lowest": (min(values), 0.95), "mean": (geometric_mean(values), 1.0)}
        for name, (value, bound) in numbers.items():
            target = Target(f"default form: {name} (x torch.compile)", ">=", bound)
            summary.append(target.row(value, job="all", peer="torch", cells=len(values)))
    for job, form in itertools.product(JOBS, compile_mode.MODES):
        target = Target(f"{form}, {job}: times as fast as torch alone", ">=", None)
        if values := versus(form, "torch", {case: rows for case, rows in table.items() if case.job == job}):
            summary.append(
                target.row(geometric_mean(values), job=job, peer="torch", cells=len(values), lowest=min(values))
            )
    return summary


def extra(results: Results) -> Document:
    """Return the device, its name and the default forms, for the document."""
    device = results["rows"][0]["device"] if results["rows"] else None
    return {
        "device": device,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "default": describe_forms(results),
    }


BENCHMARK = harness.Benchmark(
    "compile", "Add & Norm under torch.compile", FIELDS, cases, measure, summarize, title, PARTS,
    {"layers": LAYERS, "dropout": DROPOUT, "eps": EPS}, extra,
)  # fmt: skip


def on_device(given: argparse.Namespace) -> harness.Benchmark:
    """Return the benchmark on a device."""
    if given.device == "cpu":
        return BENCHMARK
    return replace(BENCHMARK, name=f"compile_{given.device}", cases=partial(cases, device=given.device))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


# ------------------------------------------------------------------------------------------------ tables of the pages


NAMES = {"op": "operator", "formula": "formula"}
PEERS = {"torch": "torch alone", "op": "the operator", "formula": "the formula", "eager": "eager addnorm"}
RESULTS = ("y", "z", "residual", "branch", "weight", "bias")


def times_section(document: Document) -> str:
    """Return the table of times: the default form's, and how many times as fast it is as the others; then a summary."""
    lines = []
    for case, rows in by_case(document["rows"], FIELDS).items():
        form = default_form(case)
        shown = [
            quotient(rows, peer, form).replace("*", "") if peer != form and {peer, form} <= {*rows} else ""
            for peer in PEERS
        ]
        time = digits(rows[form]["median_us"]) if form in rows else "failed"
        lines.append(
            [JOBS[case.job].title, NORMS[case.norm], f"{case.rows} x {case.d}", case.dtype, NAMES[form], time, *shown]
        )
    head: list[str | Column] = [
        "compiled expression", "norm", *right("rows x d"), "dtype", "default",
        *right("us", *(f"x {name}" for name in PEERS.values())),
    ]  # fmt: skip
    text = "Medians, ± from quartile to quartile; how many times as fast the default form is, above 1, or how much slower, below:"
    return f"{text}\n\n{markdown(head, lines)}\n\n{verdict(document)} {headline(document)}."


def verdict(document: Document) -> str:
    """Return how each form compares with torch alone, and what the formula keeps of the contract."""
    table, default = by_case(document["rows"], FIELDS), document["default"]
    sentences = []
    for variant, name in {"default": "The default form", "op": "The operator"}.items():
        values = versus(variant, "torch", table)
        if values:
            sentences.append(
                f"{name} is {geometric_mean(values):.2f} times as fast as torch alone in the mean and "
                f"{min(values):.2f} times in the slowest of {len(values)} cases."
            )
    return (
        f"{' '.join(sentences)} Of the formula's {default['errors']} errors {default['errors_within']} are within the contract, "
        f"and it keeps its bits in {default['bits_kept']} of {default['bits']} cases."
    )


def contract_section(document: Document) -> str:
    """Return the tables of errors, those over their limit marked, and of bits."""
    table: dict[Case, dict[str, dict[str, str]]] = {}
    for row in document["errors"]:
        over = "" if row["error"] <= row["limit"] else " (over)"
        by_variant = table.setdefault(Case.of(row, FIELDS), {})
        by_variant.setdefault(row["variant"], {})[row["what"]] = f"{harness.two_digits(row['error'])}{over}"
    lines = [
        [NORMS[case.norm], f"{case.rows} x {case.d}", case.dtype, variant, *(rows[variant].get(name, "") for name in RESULTS)]
        for case, rows in table.items() for variant in COMPILED if variant in rows
    ]  # fmt: skip
    same = [
        [row["dtype"], row["variant"],
         *("the same" if row[name] else "others" for name in ("run", "threads_kept", "rows_kept"))]
        for row in document["bits"] if row["variant"] in COMPILED
    ]  # fmt: skip
    norm, rows, d = BITS
    errors_table = markdown(["norm", *right("rows x d"), "dtype", "variant", *right(*RESULTS)], lines)
    return (
        "Relative errors against float64 at the returned z, y and the stream with backward; over: more than the bounds of "
        f"[numerics.md](numerics.md) allow:\n\n{errors_table}\n\nBits of the results, {NORMS[norm]}, {rows} x {d}:\n\n"
        f"{markdown(['dtype', 'variant', 'another run', 'another number of threads', 'fewer rows'], same)}"
    )


if __name__ == "__main__":
    raise SystemExit(harness.main(on_device, arguments))
