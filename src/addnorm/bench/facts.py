"""Facts that hold on every machine: exactness and memory of addnorm, beside those of plain PyTorch.

RMSNorm is also compared with the formulas of models in bfloat16. The kernels add the squares in another order than torch
does, so now and then an element at the edge of a rounding falls to its other side. Another order of rounding changes a
quarter of the elements.

Source: LlamaRMSNorm, GemmaRMSNorm and T5LayerNorm of transformers.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from addnorm import reference
from addnorm.bench.accuracy import COLUMNS, distance
from addnorm.bench.cases import DROPOUT, DTYPES, EPS, NORMS, differentiable, expressions, inputs
from addnorm.bench.harness import Row
from addnorm.bench.targets import Target
from addnorm.functional import NormOptions, add_rms_norm
from addnorm.reference import Casting, Norm

ONES = (16384, 64)
SAVED = (512, 768)
KEPT = {  # job: its name here, the number of tensors of rows x d that are saved, the bytes besides 8 a token
    "forward_stream": ("", 1, 0),  # z
    "dropout": (f", dropout {DROPOUT}", 1, 8),  # and the seed
    "everything": (", all options", 2, 8),  # and the branch, which the gradient of layer_scale needs
}
# Relative errors in roundings of the dtype: one, where the arithmetic is wider than the dtype, a few where it is not.
ROUNDINGS = {"bfloat16": 1, "float16": 1, "float32": 8, "float64": 8}
LIMITS = {"float32": ("<", 1e-6), "bfloat16": ("<=", 2e-3)}  # of a parameter's gradient, by the parameter's dtype
MODEL_SHAPE = (2048, 768)
MODEL_EPS = 1e-6
OTHER_CASTING: dict[Casting, Casting] = {"float32": "llama", "llama": "float32", "t5": "float32"}


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
    """Return the errors of `eager` and `addnorm` on random tensors, with random gradients of both outputs."""
    args, (dy, dz) = inputs("forward_stream", rows, d, dtype, parameters, grad=True)
    x, s, w, b = (t.detach() for t in args)
    z = (x + s).double()
    stats = reference.statistics(z, norm, EPS[norm])
    y = reference.normalize(z, w.double(), b.double() if norm == "layer" else None, norm=norm, eps=EPS[norm])
    exact = reference.normalize_backward(dy.double(), z, w.double(), stats, norm=norm)
    truths = (y, exact.z + dz.double(), exact.weight, exact.bias)
    errors_by_variant = {}
    for name, call in expressions(norm, "forward_stream", d).items():
        with warnings.catch_warnings():
            # PyTorch's RMSNorm warns that it is slow where the parameters' dtype is not that of the input.
            warnings.filterwarnings("ignore", message="Mismatch dtype")
            outputs = call(*args)
        dx, _, *dparameters = torch.autograd.grad(outputs, differentiable(norm, args), (dy.to(outputs[0].dtype), dz))
        relative = [distance(*pair) for pair in zip((outputs[0], dx, *dparameters), truths, strict=False)]
        y_off, dx_off, dweight_off, dbias_off = [*relative, math.nan][:4]
        same = torch.equal(outputs[1], x + s)
        errors_by_variant[name] = Errors(y_off, dx_off, dweight_off, dbias_off, same)
    return errors_by_variant


def bias_gradient_of_ones(rows: int = ONES[0], d: int = ONES[1]) -> dict[str, float]:
    """Return the bias gradient in bfloat16 where every gradient of y is one; of its features the one furthest from `rows`."""
    args, (dy, dz) = inputs("forward_stream", rows, d, torch.bfloat16, grad=True)
    gradients = {}
    for name, call in expressions("layer", "forward_stream", d).items():
        (dbias,) = torch.autograd.grad(call(*args), args[3:], (torch.ones_like(dy), dz))
        gradients[name] = float(dbias[(dbias - rows).abs().argmax()])
    return gradients


def saved_bytes(
    norm: Norm, dtype: torch.dtype, job: str = "forward_stream", rows: int = SAVED[0], d: int = SAVED[1]
) -> dict[str, int]:
    """Return the bytes that autograd saves for backward, without the parameters."""
    args, _ = inputs(job, rows, d, dtype, grad=True)
    bytes_by_variant = {}
    for name, call in expressions(norm, job, d).items():
        saved: dict[int, int] = {}

        def pack(t: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[t.data_ptr()] = t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            outputs = call(*args)  # alive while the bytes are counted: freed memory would be reused, and counted again
        bytes_by_variant[name] = sum(saved[pointer] for pointer in saved.keys() - {t.data_ptr() for t in args[2:]})
        del outputs
    return bytes_by_variant


def facts(norms: Sequence[Norm] = tuple(NORMS), dtypes: Sequence[str] = tuple(DTYPES)) -> list[Row]:
    """Return a row for each fact; `torch` is the same number of plain PyTorch (beside a model: of another order of rounding)."""
    ones = bias_gradient_of_ones()
    name = f"dbias of {ONES[0]} bfloat16 rows of ones"
    rows_of_facts = [Target(name, "==", ONES[0]).row(ones["addnorm"], "layer", torch=ones["eager"])]
    for norm, dtype, parameters in itertools.product(norms, dtypes, LIMITS):
        if parameters not in (dtype, "float32"):
            continue
        errors_by_variant = errors(norm, DTYPES[dtype], DTYPES[parameters])
        for field in ("dweight", "dbias")[: 2 if norm == "layer" else 1]:
            ours, theirs = (getattr(errors_by_variant[variant], field) for variant in ("addnorm", "eager"))
            name = f"{field} {parameters}, z {dtype}: relative error"
            rows_of_facts.append(Target(name, *LIMITS[parameters]).row(ours, norm, torch=theirs))
    if "rms" in norms and "bfloat16" in dtypes:
        for model in MODELS:
            right, other = unlike(model)
            name = f"share of elements unlike {model}'s formula, bfloat16"
            rows_of_facts.append(Target(name, "<", 1e-4).row(right, "rms", torch=other))
    rows, d = SAVED
    for norm, dtype, (job, (options, tensors, more)) in itertools.product(norms, dtypes, KEPT.items()):
        saved = saved_bytes(norm, DTYPES[dtype], job)
        name = f"saved bytes, {rows} x {d} {dtype}{options}"
        expected = tensors * rows * d * DTYPES[dtype].itemsize + 8 * rows + more
        rows_of_facts.append(Target(name, "==", expected).row(saved["addnorm"], norm, torch=saved["eager"]))
    return rows_of_facts


def of_accuracy(errors: Sequence[Row]) -> list[Row]:
    """Return the largest error of `accuracy.table` for each norm and dtype, in roundings of the dtype."""
    largest = {
        (row["norm"], row["dtype"], row["variant"]): max(row[name] for name in COLUMNS if name in row)
        / (torch.finfo(getattr(torch, row["dtype"])).eps / 2)
        for row in errors
    }
    return [
        Target(f"all options, {dtype}: error in roundings", "<=", ROUNDINGS[dtype]).row(
            value, norm, torch=largest[norm, dtype, "eager"]
        )
        for (norm, dtype, variant), value in largest.items() if variant == "addnorm"
    ]  # fmt: skip


def import_ms(times: int = 3) -> float:
    """Return what `import addnorm` adds to `import torch` in a new process, the median of a few.

    The first process, which is not counted, writes the bytecode files, as pip does: without them Python compiles the package.
    """
    code = "import torch, time; t = time.perf_counter(); import addnorm; print(1000 * (time.perf_counter() - t))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, check=True, env=environment) for _ in range(times + 1)]
    return statistics.median(float(run.stdout) for run in runs[1:])


class Model(NamedTuple):
    """Formula of a model's RMSNorm as a function of (x, weight), and the options that make `add_rms_norm` equal to it."""

    formula: Callable[[Tensor, Tensor], Tensor]
    casting: Casting
    weight_offset: float


def _llama(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + MODEL_EPS)).to(x.dtype)


def _gemma(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + MODEL_EPS) * (1.0 + weight.float())).type_as(x)


def _t5(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + MODEL_EPS)).to(weight.dtype)


MODELS = {
    "Llama": Model(_llama, "llama", 0.0),
    "Gemma": Model(_gemma, "float32", 1.0),
    "T5": Model(_t5, "t5", 0.0),
}


def unlike(name: str) -> tuple[float, float]:
    """Return the share of elements that differ from the model's: with its order of rounding, and with another."""
    formula, casting, offset = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    x, branch = (torch.randn(MODEL_SHAPE, generator=generator).bfloat16() for _ in range(2))
    weight = torch.randn(MODEL_SHAPE[1:], generator=generator).bfloat16()
    want = formula(x + branch, weight)
    options: NormOptions = {"weight_offset": offset}
    outputs = (
        add_rms_norm(x, branch, weight, eps=MODEL_EPS, casting=option, **options)
        for option in (casting, OTHER_CASTING[casting])
    )
    right, other = (float((y != want).double().mean()) for y in outputs)
    return right, other
