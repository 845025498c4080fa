"""Exactness and memory of addnorm beside plain PyTorch: the `facts` of a document, which hold on every machine.

RMSNorm is also compared with the formulas of models in bfloat16. The kernels add the squares in another order than torch
does, so now and then an element at the edge of a rounding falls to its other side. Another order of rounding changes a
quarter of the elements.

Source: LlamaRMSNorm, GemmaRMSNorm and T5LayerNorm of transformers.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from addnorm.bench import proofs
from addnorm.bench.case import Case, Row, Target
from addnorm.bench.jobs import DROPOUT, DTYPES, Call, eager, inputs, ours
from addnorm.functional import add_rms_norm
from addnorm.fusion.benchmark import saved_bytes
from addnorm.reference import Casting, Norm

T = TypeVar("T")

ONES = (16384, 64)
SAVED = (512, 768)
KEPT = {  # job: its name here, the number of tensors of rows x d that are saved, the bytes besides 8 a token
    "forward_backward": ("", 1, 0),  # z
    "dropout": (f", dropout {DROPOUT}", 1, 8),  # and the seed
    "everything": (", all options", 2, 8),  # and the branch, which the gradient of layer_scale needs
}
# Relative errors in roundings of the dtype: one, where the arithmetic is wider than the dtype, a few where it is not.
ROUNDINGS = {"float32": 8, "bfloat16": 1, "float16": 1, "float64": 8}
LIMITS = {"float32": ("<", 1e-6), "bfloat16": ("<=", 2e-3)}  # of a parameter's gradient, by the parameter's dtype
PARAMETERS = {"float32": ["float32"], "bfloat16": ["bfloat16", "wide parameters"]}  # dtypes of cases, by that of z
SHAPE = (2048, 768)
SEED = 2026
MODEL_EPS = 1e-6
COLUMNS = ("z", "y", *proofs.GRADIENTS)


def _both(case: Case, number: Callable[[Call], T]) -> dict[str, T]:
    return {"addnorm": number(ours(case)), "eager": number(eager(case))}


def errors(
    norm: Norm, dtype: str, rows: int = 4096, d: int = 768, job: str = "forward_backward"
) -> dict[str, dict[str, float]]:
    """Return the relative L2 errors of `addnorm` and `eager` against float64 by output and gradient, with random tensors.

    The float64 values of y and of the gradients are computed from the z that the variant returned.
    """
    case = Case(norm=norm, job=job, rows=rows, d=d, dtype=dtype)
    tensors = inputs(case)
    torch.manual_seed(SEED)  # of the dropout masks
    with warnings.catch_warnings():
        # PyTorch's RMSNorm warns that it is slow where the parameters' dtype is not that of the input.
        warnings.filterwarnings("ignore", message="Mismatch dtype")
        return _both(case, lambda call: proofs.errors(case, tensors, proofs.results(case, call, tensors)))


def bias_gradient_of_ones(rows: int = ONES[0]) -> dict[str, float]:
    """Return for "eager" and "addnorm" the bfloat16 bias gradient of one feature, the furthest from the exact value, `rows`.

    The gradient of every element of y is one, so each feature of the bias gradient is the number of rows.
    """
    case = Case(norm="layer", job="forward_backward", rows=rows, d=ONES[1], dtype="bfloat16")
    tensors = inputs(case)
    dy, dz = tensors.cotangents
    ones = tensors._replace(cotangents=(torch.ones_like(dy), dz))

    def furthest(call: Call) -> float:
        dbias = proofs.results(case, call, ones)["dbias"]
        return float(dbias[(dbias - rows).abs().argmax()])

    return _both(case, furthest)


def bytes_saved(norm: Norm, dtype: str, job: str) -> dict[str, int]:
    """Return the bytes that autograd saves for backward by variant, without the parameters."""
    case = Case(norm=norm, job=job, rows=SAVED[0], d=SAVED[1], dtype=dtype)
    tensors = inputs(case)
    parameters = nn.ParameterList(nn.Parameter(t) for t in tensors.args[2:] if t is not None)
    return _both(case, lambda call: saved_bytes(lambda: call(*tensors.args), parameters))


def _fact(name: str, compare: str, bound: float, norm: Norm, both: Mapping[str, float]) -> Row:
    """Return the row of a fact: addnorm's number beside its bound, and eager PyTorch's."""
    return Target(name, compare, bound).row(both["addnorm"], norm=norm, torch=both["eager"])


def facts(norm: Norm, dtype: str, by_variant: Mapping[str, Mapping[str, float]]) -> Iterable[Row]:
    """Yield a result row for each fact about a norm in a dtype.

    `torch` is PyTorch's number, or for a model's formula that of another rounding order.

    Args:
        norm: the norm.
        dtype: the dtype of the stream.
        by_variant: the `errors` with all options. Their largest is a fact, in roundings of the dtype.
    """
    rounding = torch.finfo(DTYPES[dtype].stream).eps / 2
    worst = {name: max(relative.values()) / rounding for name, relative in by_variant.items()}
    yield _fact(f"all options, {dtype}: error in roundings", "<=", ROUNDINGS[dtype], norm, worst)
    if dtype not in PARAMETERS:
        return
    for case_dtype in PARAMETERS[dtype]:
        by_parameter, parameters = errors(norm, case_dtype), str(DTYPES[case_dtype].parameters).removeprefix("torch.")
        for field in ("dweight", "dbias")[: 2 if norm == "layer" else 1]:
            relative = {name: one[field] for name, one in by_parameter.items()}
            yield _fact(f"{field} {parameters}, z {dtype}: relative error", *LIMITS[parameters], norm, relative)
    rows, d = SAVED
    for job, (options, tensors, more) in KEPT.items():
        name = f"saved bytes, {rows} x {d} {dtype}{options}"
        expected = tensors * rows * d * DTYPES[dtype].branch.itemsize + 8 * rows + more
        yield _fact(name, "==", expected, norm, bytes_saved(norm, dtype, job))
    if dtype != "bfloat16":
        return
    if norm == "layer":
        yield _fact(f"dbias of {ONES[0]} bfloat16 rows of ones", "==", ONES[0], norm, bias_gradient_of_ones())
    for model in MODELS if norm == "rms" else ():
        yield _fact(f"share of elements unlike {model}'s formula, bfloat16", "<", 1e-4, norm, unlike(model))


def import_ms() -> float:
    """Return the milliseconds that `import addnorm` adds to `import torch`, the median of three new processes.

    The first process, which is not counted, writes the bytecode files, as pip does: without them Python compiles the package.
    """
    code = "import torch, time; t = time.perf_counter(); import addnorm; print(1000 * (time.perf_counter() - t))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, check=True, env=environment) for _ in range(4)]
    return statistics.median(float(run.stdout) for run in runs[1:])


class Model(NamedTuple):
    """Formula of a model's RMSNorm as a function of (x, weight), and the options that make `add_rms_norm` equal to it."""

    formula: Callable[[Tensor, Tensor], Tensor]
    casting: Casting
    weight_offset: float


def _rstd(x: Tensor) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + MODEL_EPS)


MODELS = {
    "Llama": Model(lambda x, weight: weight * (x.float() * _rstd(x)).to(x.dtype), "llama", 0.0),
    "Gemma": Model(lambda x, weight: (x.float() * _rstd(x) * (1.0 + weight.float())).type_as(x), "float32", 1.0),
    "T5": Model(lambda x, weight: weight * (x * _rstd(x)).to(weight.dtype), "t5", 0.0),
}


def unlike(name: str) -> dict[str, float]:
    """Return the shares of elements that differ between `add_rms_norm` and model `name`.

    "addnorm" is with the model's `casting`, "eager" with another.
    """
    formula, casting, offset = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    x, branch = (torch.randn(SHAPE, generator=generator).bfloat16() for _ in range(2))
    weight = torch.randn(SHAPE[1:], generator=generator).bfloat16()
    want = formula(x + branch, weight)

    def share(option: Casting) -> float:
        y = add_rms_norm(x, branch, weight, eps=MODEL_EPS, casting=option, weight_offset=offset)
        return float((y != want).double().mean())

    return {"addnorm": share(casting), "eager": share("llama" if casting == "float32" else "float32")}
