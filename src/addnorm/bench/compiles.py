"""Under torch.compile: the operator, its formulas fused by Inductor, and torch alone, beside the eager call.

`op` and `formula` are the same functions of addnorm, compiled under `addnorm.set_compile_mode`; `torch` is F.layer_norm(x + s).
What stands around the call is there to be fused with it: that is all that an opaque operator can lose. `choice` is the rule that
turns a document into a line of `ops.compile_mode.DEFAULT_MODES`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from addnorm import reference, set_compile_mode
from addnorm.bench import frame
from addnorm.bench.frame import Document, Found, Progress, document
from addnorm.bench.jobs import DROPOUT, DTYPES
from addnorm.bench.summary import claim
from addnorm.bench.timing import ROUNDS, Row, interleaved, spread
from addnorm.bench.ways import EPS, JOBS, LAYERS, WAYS, Outputs
from addnorm.ops.compile_mode import Mode

__all__ = ["JOBS", "VARIANTS", "Cell", "by_cell", "cells", "choice", "measure", "ratio", "run", "summarize", "title"]

SCHEMA = 1
FASTER = 1.1  # as many times as fast the formula must be to count
UNIT = 2.0**-24  # of float32
VARIANTS = ("op", "formula", "torch", "eager")
COMPILED = VARIANTS[:-1]
FORMS: dict[str, Mode] = {"op": "op", "formula": "formula"}  # what `set_compile_mode` is told; nothing for the others
PARTS = ("errors", "bits", "failures", "rows")
SMALL, MIDDLE, LARGE = (1, 768), (512, 768), (4096, 1024)
BITS = ("layer", *MIDDLE)  # where bits are compared: three compilations a variant


# job, norms, dtypes, sizes
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


class Cell(NamedTuple):
    """One job at one size."""

    norm: str
    job: str
    rows: int
    d: int
    dtype: str
    device: str
    threads: int


def cells(device: str = "cpu", *, threads: int | None = None) -> list[Cell]:
    """The matrix; threads None is what torch has."""
    threads = threads or torch.get_num_threads()
    return [
        Cell(norm, job, rows, d, dtype, device, threads)
        for job, norms, dtypes, sizes in LINES
        for norm, dtype, (rows, d) in itertools.product(norms, dtypes, sizes)
    ]


def title(cell: Cell) -> str:
    """A cell in words."""
    return f"{cell.norm}, {JOBS[cell.job].title}, {cell.rows} x {cell.d} {cell.dtype}"


def inputs(cell: Cell, rows: int | None = None) -> list[Tensor]:
    """(x, s, weight, bias) and what else the job reads, the same every time; `rows` of them only, if given."""
    rng = torch.Generator().manual_seed(0)
    big = [torch.randn(cell.rows, cell.d, generator=rng)[:rows] for _ in range(2)]
    vectors = [torch.rand(cell.d, generator=rng) + 0.5 for _ in range(2)]
    extra = [
        torch.randn(cell.d, generator=rng),
        *(torch.randn(*shape, generator=rng) / math.sqrt(shape[1]) for shape in ((4 * cell.d, cell.d), (cell.d, 4 * cell.d))),
    ]  # fmt: skip
    job = JOBS[cell.job]
    made = [*big, *vectors, *extra[: job.extra]]
    return [t.to(cell.device, DTYPES[cell.dtype]).requires_grad_(job.backward) for t in made]


def cotangents(cell: Cell, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Random gradients of the outputs, the same every time; of fewer rows than the cell's, those of the first."""
    rng = torch.Generator().manual_seed(1)
    return [(torch.randn(cell.rows, cell.d, generator=rng)[: len(t)] + 0.2).to(t) for t in outputs]


def calls(cell: Cell) -> dict[str, Callable[..., Any]]:
    """The variants as functions of `inputs`; each returns when the device is done."""
    job = JOBS[cell.job]

    def made(variant: str) -> Callable[..., Any]:
        way = WAYS[cell.norm, "torch" if variant == "torch" else "addnorm"]

        def plain(*tensors: Tensor) -> Outputs:
            return job.function(way, *tensors)

        function = torch.compile(plain, fullgraph=True) if variant in COMPILED else plain
        form = FORMS.get(variant)

        def call(*tensors: Tensor) -> Any:
            set_compile_mode(form)
            with torch.set_grad_enabled(job.backward):
                outputs = function(*tensors)
                if not job.backward:
                    return outputs
                wanted = tensors if cell.norm == "layer" else (*tensors[:3], *tensors[4:])  # RMSNorm has no bias
                return outputs, torch.autograd.grad(outputs, wanted, given(outputs))

        return call

    kept: dict[tuple[torch.Size, ...], list[Tensor]] = {}

    def given(outputs: Sequence[Tensor]) -> list[Tensor]:  # made once for each size, not in the time
        sizes = tuple(t.shape for t in outputs)
        return kept.get(sizes) or kept.setdefault(sizes, cotangents(cell, outputs))

    return {name: made(name) for name in VARIANTS}


def measure(cell: Cell, *, rounds: int = ROUNDS) -> Found:
    """Rows, one a variant; of training without options the errors and, at one size, the bits; what did not compile."""
    torch.compiler.reset()  # this cell's graphs alone, without the guards of those before it
    tensors, variants = inputs(cell), calls(cell)
    found: Found = {part: [] for part in PARTS}
    try:
        for name in VARIANTS:
            try:
                variants[name](*tensors)
            except Exception as error:  # of what this machine cannot compile
                if name == "eager":
                    raise
                found["failures"].append({**told(cell, name), "error": f"{type(error).__name__}: {error}"[:300]})
                del variants[name]
        timed = {name: _finished(cell, call) for name, call in variants.items()}
        for name, (samples, repeats) in interleaved(timed, tensors, rounds).items():
            found["rows"].append({**told(cell, name), **spread(samples), "repeats": repeats})
        if cell.job == "training":
            found["errors"] = errors(cell, variants, tensors)
            if (cell.norm, cell.rows, cell.d) == BITS:
                found["bits"] = [{**told(cell, name), **bits(cell, call)} for name, call in variants.items()]
    finally:
        set_compile_mode(None)
    return found


def _finished(cell: Cell, call: Callable[..., Any]) -> Callable[..., Any]:
    if cell.device == "cpu":
        return call

    def wait(*tensors: Tensor) -> None:
        call(*tensors)
        torch.accelerator.synchronize()

    return wait


def told(cell: Cell, variant: str) -> Row:
    """Which row it is."""
    return {**cell._asdict(), "variant": variant}


def named(cell: Cell, result: tuple[Outputs, Outputs]) -> dict[str, Tensor]:
    """What a call of `training` returned, by name."""
    names = ("residual", "branch", "weight", "bias")
    (y, z), grads = result
    return {"y": y.detach(), "z": z.detach(), **dict(zip(names, grads, strict=False))}


def errors(cell: Cell, variants: dict[str, Callable[..., Any]], tensors: Sequence[Tensor]) -> list[Row]:
    """Relative errors (L2) against float64 at the z that was returned, beside the limits of docs/numerics.md."""
    plain = WAYS[cell.norm, "torch"].both
    outputs = plain(*tensors[:4])
    wanted = tensors[:4] if cell.norm == "layer" else tensors[:3]
    eager = named(cell, (outputs, torch.autograd.grad(outputs, wanted, cotangents(cell, outputs))))
    beside = _off(cell, tensors, eager)
    rows = []
    for name, call in variants.items():
        for what, (off, rounded, noise) in _off(cell, tensors, named(cell, call(*tensors))).items():
            limit = 1.02 * max(beside[what][0], rounded) + noise
            rows.append({**told(cell, name), "what": what, "error": off, "torch": beside[what][0], "limit": limit})
    return rows


def _off(cell: Cell, tensors: Sequence[Tensor], got: dict[str, Tensor]) -> dict[str, tuple[float, float, float]]:
    """For each result its error, that of the truth once rounded, and one rounding of float32 of the terms of its sum."""
    x, s, w, b = (t.detach().double() for t in tensors[:4])
    dy, dz = (t.double() for t in cotangents(cell, (got["y"], got["z"])))
    z = got["z"].double()
    norm: reference.Norm = "layer" if cell.norm == "layer" else "rms"
    stats = reference.statistics(z, norm, EPS)
    grads = reference.normalize_backward(dy, z, w, stats, norm=norm)
    terms = {"weight": (dy * (z - stats.mean) * stats.rstd).abs().sum(0), "bias": dy.abs().sum(0)}
    total = grads.z + dz
    y = reference.normalize(z, w, b if norm == "layer" else None, norm=norm, eps=EPS)
    truth = {"z": x + s, "y": y, "residual": total, "branch": total, "weight": grads.weight, "bias": grads.bias}
    found = {}
    for name, t in got.items():
        exact = truth[name]
        size = exact.norm()
        noise = UNIT * float(terms.get(name, exact).norm() / size)
        found[name] = (
            float((t.double() - exact).norm() / size),
            float((exact.to(t.dtype).double() - exact).norm() / size),
            noise,
        )
    return found


def bits(cell: Cell, call: Callable[..., Any]) -> Row:
    """Whether another run, another number of threads, and fewer rows give the same bits."""
    torch.compiler.reset()  # each of these is a compilation of its own, of which there may be eight
    tensors = inputs(cell)
    first = named(cell, call(*tensors))
    again = named(cell, call(*tensors))
    few = named(cell, call(*inputs(cell, cell.rows // 2 + 3)))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        other = named(cell, call(*tensors))
    finally:
        torch.set_num_threads(threads)
    of_rows = ("y", "z", "residual", "branch")
    return {
        "run": _equal(first, again, first),
        "threads_kept": _equal(first, other, first),
        "rows_kept": _equal({name: first[name][: len(few[name])] for name in of_rows}, few, of_rows),
    }


def _equal(a: dict[str, Tensor], b: dict[str, Tensor], names: Iterable[str]) -> bool:
    return all(a[name].equal(b[name]) for name in names)


def by_cell(rows: Sequence[Row]) -> dict[Cell, dict[str, Row]]:
    """The rows of a document: cell -> variant -> row."""
    return frame.by_cell(rows, Cell)


def ratio(variants: dict[str, Row], variant: str, peer: str) -> float | None:
    """How many times as fast as a peer; None where one was not measured."""
    if variant not in variants or peer not in variants:
        return None
    return float(variants[peer]["median_us"] / variants[variant]["median_us"])


def choice(found: Found) -> Row:
    """The rule: the operator, unless the formula is `FASTER` in more than half of the cells and keeps the contract.

    The contract is that of docs/numerics.md: every error within its limit, and the same bits whatever the run, the threads and
    the other rows. What was not compared is not kept.
    """
    ratios = [ratio(variants, "formula", "op") for variants in by_cell(found["rows"]).values()]
    fast = sum(value is not None and value > FASTER for value in ratios)
    of_formula = {part: [row for row in found[part] if row["variant"] == "formula"] for part in ("errors", "bits")}
    within = sum(row["error"] <= row["limit"] for row in of_formula["errors"])
    same = sum(row["run"] and row["threads_kept"] and row["rows_kept"] for row in of_formula["bits"])
    counts = {
        "errors": len(of_formula["errors"]),
        "errors_within": within,
        "bits": len(of_formula["bits"]),
        "bits_kept": same,
    }
    keeps = counts["errors"] == within > 0 and counts["bits"] == same > 0
    most = 2 * fast > len(ratios)
    return {
        "form": "formula" if most and keeps else "op",
        "faster": FASTER,
        "cells": len(ratios),
        "cells_faster": fast,
        **counts,
    }


def summarize(rows: Sequence[Row]) -> list[Row]:
    """For each job the mean ratio of the operator to the other variants. No targets: `choice` is what follows."""
    table, summary = by_cell(rows), []
    for job, peer in itertools.product(JOBS, VARIANTS[1:]):
        ratios = [ratio(found, "op", peer) for cell, found in table.items() if cell.job == job]
        if there := [value for value in ratios if value is not None]:
            more = {"job": job, "peer": peer, "cells": len(there), "lowest": min(there)}
            summary.append(
                claim(f"op, {job}: times as fast as {peer}", None, geometric_mean(there), ">=", None, **more)
            )
    return summary


def run(
    chosen: Sequence[Cell] | None = None, *, rounds: int = ROUNDS, before: Document | None = None,
    progress: Progress | None = None,
) -> Document:  # fmt: skip
    """Measures the cells (None: all) and returns the document; an interrupt ends it early, `complete` is then False.

    What `before`, a document that was ended early, has of a cell is not measured again, if its protocol is the same.
    """
    protocol = {"rounds": rounds, "layers": LAYERS, "dropout": DROPOUT, "eps": EPS, "faster": FASTER}
    kept: dict[Cell, Found] = {}
    if before is not None and {name: before["protocol"].get(name) for name in protocol} == protocol:
        for part in PARTS:
            for row in before[part]:
                cell = Cell._make(row[name] for name in Cell._fields)
                kept.setdefault(cell, {name: [] for name in PARTS})[part].append(row)
    made = document(
        cells() if chosen is None else chosen,
        lambda cell: kept.get(cell) or measure(cell, rounds=rounds),
        lambda found: summarize(found["rows"]),
        parts=PARTS, protocol=protocol, schema=SCHEMA, title=title, progress=progress,
    )  # fmt: skip
    device = made["rows"][0]["device"] if made["rows"] else None
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {**{key: value for key, value in made.items() if key not in PARTS}, "device": device, "gpu": gpu,
            "choice": choice(made), **{part: made[part] for part in PARTS}}  # fmt: skip
