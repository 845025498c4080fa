"""Add & Norm under torch.compile: the operator, its formulas fused by Inductor, and torch alone. Writes results/compile.json.

`op` and `formula` are the same functions of addnorm, compiled under `addnorm.set_compile_mode`; `torch` is F.layer_norm(x +
s). The operations around the call are there to be fused with it: that is all that an opaque operator can lose. `choose` turns a
document into an entry of `addnorm.ops.compile_mode.DEFAULT_MODES`. README.md in this folder has the protocol.
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
from addnorm.bench.targets import Goal, Target, ratio
from addnorm.bench.timing import interleaved
from addnorm.ops.compile_mode import Mode
from addnorm.reference import Norm

FIELDS = ("norm", "job", "rows", "d", "dtype", "device", "threads")
FASTER = 1.1  # a formula counts as faster if it is this many times as fast
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


# ------------------------------------------------------------------------------------------------------------- the rule


def choose(results: Results) -> Row:
    """Return the entry for `DEFAULT_MODES`: the operator, unless the formula is faster in most cases and keeps the contract.

    The contract is that of docs/numerics.md: every error within its limit, and the same bits whatever the run, the threads and
    the other rows. A contract that was not compared counts as broken.
    """
    ratios = [ratio("formula", "op")(rows) for rows in by_case(results["rows"], FIELDS).values()]
    fast = sum(value is not None and value > FASTER for value in ratios)
    compared = {part: [row for row in results[part] if row["variant"] == "formula"] for part in ("errors", "bits")}
    within = sum(row["error"] <= row["limit"] for row in compared["errors"])
    same = sum(row["run"] and row["threads_kept"] and row["rows_kept"] for row in compared["bits"])
    keeps = len(compared["errors"]) == within > 0 and len(compared["bits"]) == same > 0
    return {
        "form": "formula" if 2 * fast > len(ratios) and keeps else "op",
        "faster": FASTER,
        "cells": len(ratios),
        "cells_faster": fast,
        "errors": len(compared["errors"]),
        "errors_within": within,
        "bits": len(compared["bits"]),
        "bits_kept": same,
    }


def summarize(results: Results) -> list[Row]:
    """Return for each job the mean ratio of the operator to the other variants. There are no targets: `choose` follows."""
    table, summary = by_case(results["rows"], FIELDS), []
    for job, peer in itertools.product(JOBS, VARIANTS[1:]):
        target = Target(f"op, {job}: times as fast as {peer}", ">=", None)
        of_job = {case: rows for case, rows in table.items() if case.job == job}
        if values := [*Goal(target, ratio("op", peer), geometric_mean).numbers(of_job).values()]:
            summary.append(
                target.row(geometric_mean(values), job=job, peer=peer, cells=len(values), lowest=min(values))
            )
    return summary


def extra(results: Results) -> Document:
    """Return the device, its name and the choice, for the document."""
    device = results["rows"][0]["device"] if results["rows"] else None
    return {
        "device": device,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "choice": choose(results),
    }


BENCHMARK = harness.Benchmark(
    "compile", "Add & Norm under torch.compile", FIELDS, cases, measure, summarize, title, PARTS,
    {"layers": LAYERS, "dropout": DROPOUT, "eps": EPS, "faster": FASTER}, extra,
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


PEERS = {"formula": "the formula", "torch": "torch alone", "eager": "eager addnorm"}
RESULTS = ("y", "z", "residual", "branch", "weight", "bias")


def times_section(document: Document) -> str:
    """Return the table of times: the operator's, and how many times as fast it is as the others; then the choice."""
    lines = []
    for case, rows in by_case(document["rows"], FIELDS).items():
        shown = [quotient(rows, peer, "op").replace("*", "") if {peer, "op"} <= {*rows} else "" for peer in PEERS]
        time = digits(rows["op"]["median_us"]) if "op" in rows else "failed"
        lines.append([JOBS[case.job].title, NORMS[case.norm], f"{case.rows} x {case.d}", case.dtype, time, *shown])
    head: list[str | Column] = [
        "compiled expression", "norm", *right("rows x d"), "dtype",
        *right("the operator, us", *(f"x {name}" for name in PEERS.values())),
    ]  # fmt: skip
    text = "Medians, ± from quartile to quartile; how many times as fast the operator is, above 1, or how much slower, below:"
    return f"{text}\n\n{markdown(head, lines)}\n\n{verdict(document)} {headline(document)}."


def ratios_to_torch(document: Document) -> list[float]:
    """Return for each case how many times as fast the operator is as torch alone, both compiled."""
    ratios = [ratio("op", "torch")(rows) for rows in by_case(document["rows"], FIELDS).values()]
    return [one for one in ratios if one is not None]


def verdict(document: Document) -> str:
    """Return how the operator compares with torch alone, and the choice."""
    made, ratios = document["choice"], ratios_to_torch(document)
    form = {"op": "the operator", "formula": "the formula"}[made["form"]]
    against = (
        f"The operator is slower than torch alone in {sum(one < 1 for one in ratios)} of {len(ratios)} cases: "
        f"{geometric_mean(ratios):.2f} times as fast in the mean, {min(ratios):.2f} at worst. "
        if ratios else ""
    )  # fmt: skip
    return against + (
        f"On {document['device']} a compiled call is **{form}**: the formula is more than {made['faster']:g} times as "
        f"fast as the operator in {made['cells_faster']} of {made['cells']} cases, {made['errors_within']} of its "
        f"{made['errors']} errors are within the contract, and it keeps its bits in {made['bits_kept']} of {made['bits']} cases."
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
