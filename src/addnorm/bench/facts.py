"""What is true on every machine, measured: exactness and memory, of addnorm and of plain PyTorch side by side."""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from addnorm import reference
from addnorm.bench import parity
from addnorm.bench.accuracy import COLUMNS, distance
from addnorm.bench.expressions import EPS, expressions, inputs, learned
from addnorm.bench.jobs import DROPOUT, DTYPES, NORMS
from addnorm.bench.summary import claim
from addnorm.bench.timing import Row
from addnorm.reference import Norm

ONES = (16384, 64)
SAVED = (512, 768)
KEPT = {  # job: its name here; how many tensors of rows x d are kept; and how many bytes besides 8 a token
    "forward_stream": ("", 1, 0),  # z
    "dropout": (f", dropout {DROPOUT}", 1, 8),  # and the seed
    "everything": (", all options", 2, 8),  # and the branch, which the gradient of layer_scale needs
}
# Relative errors in roundings of the dtype: one, where the arithmetic is wider than the dtype, a few where it is not.
ROUNDINGS = {"bfloat16": 1, "float16": 1, "float32": 8, "float64": 8}
LIMITS = {"float32": ("<", 1e-6), "bfloat16": ("<=", 2e-3)}  # of a parameter's gradient, by the parameter's dtype


class Errors(NamedTuple):
    """Relative L2 errors against float64 over the same z; NaN where there is no bias."""

    y: float
    dresidual: float
    dweight: float
    dbias: float
    same_stream: bool  # z is residual + branch to the bit


def errors(
    norm: Norm, dtype: torch.dtype, parameters: torch.dtype | None = None, rows: int = 4096, d: int = 768
) -> dict[str, Errors]:
    """Of `eager` and `addnorm`, on random tensors with random gradients of both outputs."""
    args, (dy, dz) = inputs("forward_stream", rows, d, dtype, parameters, grad=True)
    x, s, w, b = (t.detach() for t in args)
    z = (x + s).double()
    stats = reference.statistics(z, norm, EPS[norm])
    y = reference.normalize(z, w.double(), b.double() if norm == "layer" else None, norm=norm, eps=EPS[norm])
    exact = reference.normalize_backward(dy.double(), z, w.double(), stats, norm=norm)
    truths = (y, exact.z + dz.double(), exact.weight, exact.bias)
    found = {}
    for name, call in expressions(norm, "forward_stream", d).items():
        with warnings.catch_warnings():
            # PyTorch's RMSNorm warns that it is slow where the parameters' dtype is not that of the input.
            warnings.filterwarnings("ignore", message="Mismatch dtype")
            outputs = call(*args)
        dx, _, *dparameters = torch.autograd.grad(outputs, learned(norm, args), (dy.to(outputs[0].dtype), dz))
        off = [distance(*pair) for pair in zip((outputs[0], dx, *dparameters), truths, strict=False)]
        y_off, dx_off, dweight_off, dbias_off = [*off, math.nan][:4]
        same = torch.equal(outputs[1], x + s)
        found[name] = Errors(y_off, dx_off, dweight_off, dbias_off, same)
    return found


def bias_gradient_of_ones(rows: int = ONES[0], d: int = ONES[1]) -> dict[str, float]:
    """The bias gradient in bfloat16 where every gradient of y is one: the number of rows. Of d, that furthest off."""
    args, (dy, dz) = inputs("forward_stream", rows, d, torch.bfloat16, grad=True)
    found = {}
    for name, call in expressions("layer", "forward_stream", d).items():
        (dbias,) = torch.autograd.grad(call(*args), args[3:], (torch.ones_like(dy), dz))
        found[name] = float(dbias[(dbias - rows).abs().argmax()])
    return found


def saved_bytes(
    norm: Norm, dtype: torch.dtype, job: str = "forward_stream", rows: int = SAVED[0], d: int = SAVED[1]
) -> dict[str, int]:
    """What autograd keeps for the backward besides the parameters."""
    args, _ = inputs(job, rows, d, dtype, grad=True)
    found = {}
    for name, call in expressions(norm, job, d).items():
        saved: dict[int, int] = {}

        def pack(t: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[t.data_ptr()] = t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            kept = call(*args)  # alive while it is counted: freed memory would be handed out, and counted, again
        found[name] = sum(saved[pointer] for pointer in saved.keys() - {t.data_ptr() for t in args[2:]})
        del kept
    return found


def facts(norms: Sequence[Norm] = tuple(NORMS), dtypes: Sequence[str] = tuple(DTYPES)) -> list[Row]:
    """All of them as claims; `torch` is the same number of plain PyTorch (of another order of rounding, beside a model's)."""
    ones = bias_gradient_of_ones()
    name = f"dbias of {ONES[0]} bfloat16 rows of ones"
    found = [claim(name, "layer", ones["addnorm"], "==", ONES[0], torch=ones["eager"])]
    for norm, dtype, parameters in itertools.product(norms, dtypes, LIMITS):
        if parameters not in (dtype, "float32"):
            continue
        off = errors(norm, DTYPES[dtype], DTYPES[parameters])
        for field in ("dweight", "dbias")[: 2 if norm == "layer" else 1]:
            ours, theirs = (getattr(off[who], field) for who in ("addnorm", "eager"))
            name = f"{field} {parameters}, z {dtype}: relative error"
            found.append(claim(name, norm, ours, *LIMITS[parameters], torch=theirs))
    if "rms" in norms and "bfloat16" in dtypes:
        for model in parity.MODELS:
            right, other = parity.unlike(model)
            name = f"share of elements unlike {model}'s formula, bfloat16"
            found.append(claim(name, "rms", right, "<", 1e-4, torch=other))
    rows, d = SAVED
    for norm, dtype, (job, (options, tensors, more)) in itertools.product(norms, dtypes, KEPT.items()):
        saved = saved_bytes(norm, DTYPES[dtype], job)
        name = f"saved bytes, {rows} x {d} {dtype}{options}"
        expected = tensors * rows * d * DTYPES[dtype].itemsize + 8 * rows + more
        found.append(claim(name, norm, saved["addnorm"], "==", expected, torch=saved["eager"]))
    return found


def of_accuracy(errors: Sequence[Row]) -> list[Row]:
    """That the errors of `accuracy.table` are roundings: the largest of each norm, in roundings of the dtype."""
    largest = {
        (one["norm"], one["dtype"], one["variant"]): max(one[name] for name in COLUMNS if name in one)
        / (torch.finfo(getattr(torch, one["dtype"])).eps / 2)
        for one in errors
    }
    return [
        claim(f"all options, {dtype}: error in roundings", norm, value, "<=", ROUNDINGS[dtype],
              torch=largest[norm, dtype, "eager"])
        for (norm, dtype, variant), value in largest.items() if variant == "addnorm"
    ]  # fmt: skip


def import_ms(times: int = 3) -> float:
    """What `import addnorm` adds to `import torch`, in a fresh process; the median of a few."""
    code = "import torch, time; t = time.perf_counter(); import addnorm; print(1000 * (time.perf_counter() - t))"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, check=True) for _ in range(times)]
    return statistics.median(float(run.stdout) for run in runs)
