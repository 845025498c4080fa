"""Errors of the operation against float64, and the facts of a document, which hold on every machine.

By contract y is the norm of the rounded z, and the gradients are those at the rounded z. So the float64 reference of each
implementation is computed from the z that the implementation returned. With dropout each implementation has its own mask, which
is computed from its z.

RMSNorm is also compared with the formulas of models in bfloat16. The kernels add the squares in another order than torch
does, so now and then an element rounds to the neighbouring value. Another order of rounding changes a quarter of the
elements. Source: LlamaRMSNorm, GemmaRMSNorm and T5LayerNorm of transformers.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from addnorm import reference
from addnorm.bench.case import Call, Case, Row, Target
from addnorm.bench.jobs import DROPOUT, DTYPES, EPS, JOBS, Set, Tensors, eager, inputs, ours
from addnorm.functional import add_rms_norm
from addnorm.fusion.benchmark import saved_bytes
from addnorm.reference import Casting, Norm
from addnorm.stream.dataflow.replay import relative_error
from addnorm.stream.dataflow.snapshot import StateSnapshot

Numbers = Mapping[str, float]
# In the order of the arguments.
GRADIENTS = ("dresidual", "dbranch", "dweight", "dbias", "dlayer_scale", "dbranch_bias")
# Relative L2 errors: a correct variant stays far below them, whatever its order of rounding; a wrong formula does not.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2, torch.float64: 1e-10}
SIGMAS = 6.0  # allowed deviation of the share of kept elements


def results(case: Case, call: Call, tensors: Set) -> Tensors:
    """Return y, z and the gradients of one call by name, without z if the call does not return z."""
    outputs = call(*tensors.args)
    if not JOBS[case.job].stream:
        outputs = (outputs,)
    named = {name: t.detach() for name, t in zip("yz", outputs, strict=False)}
    if tensors.cotangents:
        cotangents = [g.to(t.dtype) for g, t in zip(tensors.cotangents, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, tensors.leaves, cotangents, retain_graph=JOBS[case.job].retained)
        names = [name for name, t in zip(GRADIENTS, tensors.args, strict=False) if t is not None]
        named |= dict(zip(names, gradients, strict=True))
    return named


def truth(case: Case, tensors: Set, named: Tensors) -> Tensors:
    """Return the exact y, z and gradients of a case, by autograd of the formula in float64.

    Args:
        case: the case.
        tensors: the inputs of the case.
        named: results of an implementation, from whose z the dropout mask, y and the gradients are computed. Without z there is
            no dropout, and the stream is exact.
    """
    job, z = JOBS[case.job], named.get("z")
    mask = dropout_mask(tensors, z) / (1 - DROPOUT) if job.dropout and z is not None else 1.0

    def formula(*args: Any) -> Any:
        exact = _stream(args, mask)
        at = exact if z is None else exact + (z.double() - exact).detach()
        y = reference.normalize(at, *args[2:4], norm=case.norm, eps=EPS[case.norm])
        return (y, exact) if job.stream else y

    with torch.set_grad_enabled(job.backward):
        return results(case, formula, tensors._replace(args=_widen(tensors, job.backward)))


def _widen(tensors: Set, backward: bool = False) -> tuple[Tensor | None, ...]:
    """Return the arguments in float64."""
    return tuple(None if t is None else t.detach().double().requires_grad_(backward) for t in tensors.args)


def _stream(args: Any, mask: Tensor | float) -> Tensor:
    """Return x + g m (s + c), the stream of a dropout mask m; g and c are 1 and 0 where the job has none."""
    x, s, _, _, *more = args
    scale, bias = more or (1.0, 0.0)
    z: Tensor = x + scale * (mask * (s + bias))
    return z


def dropout_mask(tensors: Set, z: Tensor) -> Tensor:
    """Return the dropout mask of the call that returned z: 1 where an element of the branch was kept, 0 where it was dropped."""
    args = _widen(tensors)
    kept, dropped = ((z.double() - _stream(args, mask)).abs() for mask in (1 / (1 - DROPOUT), 0.0))
    return (kept < dropped).double()


def errors_of(case: Case, tensors: Set, named: Tensors) -> Numbers:
    """Return the relative L2 error of each result: of z against the exact stream, of the others given this z."""
    exact = truth(case, tensors, named)
    return {name: relative_error(t.detach(), exact[name]) for name, t in named.items()}


def tolerances(case: Case) -> Numbers:
    """Return the tolerance of each output and gradient, by its dtype.

    With dropout all have the largest of these tolerances, since unfused variants round the branch after dropout to its dtype.
    """
    of_stream, of_branch, of_parameters = (TOLERANCES[dtype] for dtype in DTYPES[case.dtype])
    most = dict.fromkeys(GRADIENTS, of_parameters) | {
        "y": of_branch, "z": of_stream, "dresidual": of_stream, "dbranch": of_branch,
    }  # fmt: skip
    return dict.fromkeys(most, max(most.values())) if JOBS[case.job].dropout else most


class WrongError(ValueError):
    """Error for an implementation whose results are wrong."""


def check(case: Case, call: Call, tensors: Set) -> Numbers:
    """Return the relative L2 error of each output and gradient of one call.

    The errors of y and of the gradients are those given z, from which the dropout mask is computed too. The error of z shows
    whether the stream was rounded too coarsely.

    Raises:
        WrongError: an output has another dtype or shape, an error exceeds its tolerance, or dropout keeps a wrong share.
    """
    named, dtypes, most = results(case, call, tensors), DTYPES[case.dtype], tolerances(case)
    for name, dtype in (("y", dtypes.branch), ("z", dtypes.stream)):
        t = named.get(name)
        if t is not None and (t.dtype != dtype or tuple(t.shape) != (case.rows, case.d)):
            raise WrongError(f"{name} is {t.dtype} {tuple(t.shape)}, expected {dtype} {(case.rows, case.d)}")
    relative = errors_of(case, tensors, named)
    wrong = [
        f"{name} differs by {value:.2g}, tolerance {most[name]:g}"
        for name, value in relative.items()
        if not value <= most[name]  # NaN is wrong too
    ]
    if wrong:
        raise WrongError(f"{'; '.join(wrong)} (relative, against float64)")
    if JOBS[case.job].dropout:
        share, elements = dropout_mask(tensors, named["z"]).mean().item(), named["z"].numel()
        if abs(share - (1 - DROPOUT)) > SIGMAS * math.sqrt(DROPOUT * (1 - DROPOUT) / elements):
            raise WrongError(f"dropout {DROPOUT:g} kept {share:.3f} of the elements")
    return relative


# ------------------------------------------------------------------------------------------------------------- facts

ROWS_OF_ONES = 16384
SAVED = (512, 768)
KEPT = {  # job: its name here, the number of tensors of rows x d that are saved, the bytes besides 8 a token
    "forward_backward": ("", 1, 0),  # z
    "dropout": (f", dropout {DROPOUT}", 1, 8),  # and the seed
    "everything": (", all options", 2, 8),  # and the branch, which the gradient of layer_scale needs
}
# Bounds of the relative errors, in roundings of the dtype: one if the arithmetic is wider than the dtype, else a few.
ROUNDINGS = {"float32": 8, "bfloat16": 1, "float16": 1, "float64": 8}
LIMITS = {"float32": ("<", 1e-6), "bfloat16": ("<=", 2e-3)}  # of a parameter's gradient, by the parameter's dtype
PARAMETERS = {  # by the dtype of z: the dtypes of the parameters, by the name of a case's dtypes
    "float32": {"float32": "float32"},
    "bfloat16": {"bfloat16": "bfloat16", "wide parameters": "float32"},
}
SHAPE = (2048, 768)
SEED = 2026
MODEL_EPS = 1e-6
COLUMNS = ("z", "y", *GRADIENTS)


def _both(case: Case, number: Callable[[Call], Any]) -> dict[str, Any]:
    return {"addnorm": number(ours(case)), "eager": number(eager(case))}


def errors(norm: Norm, dtype: str, rows: int = 4096, d: int = 768, job: str = "forward_backward") -> dict[str, Numbers]:
    """Return the relative L2 errors of `addnorm` and `eager` against float64 by output and gradient, with random tensors.

    The float64 values of y and of the gradients are computed from the z that the variant returned.
    """
    case = Case(norm=norm, job=job, rows=rows, d=d, dtype=dtype)
    tensors = inputs(case)
    torch.manual_seed(SEED)  # of the dropout masks
    with warnings.catch_warnings():
        # PyTorch's RMSNorm warns that it is slow where the parameters' dtype is not that of the input.
        warnings.filterwarnings("ignore", message="Mismatch dtype")
        return _both(case, lambda call: errors_of(case, tensors, results(case, call, tensors)))


def bias_gradient_of_ones() -> Numbers:
    """Return, for "eager" and "addnorm", the bfloat16 bias gradient of the feature with the largest error.

    The gradient of every element of y is one, so the exact bias gradient of each feature is the number of rows, `ROWS_OF_ONES`.
    """
    case = Case(norm="layer", job="forward_backward", rows=ROWS_OF_ONES, d=64, dtype="bfloat16")
    tensors = inputs(case)
    tensors = tensors._replace(cotangents=tuple(map(torch.ones_like, tensors.cotangents)))

    def furthest(call: Call) -> float:
        dbias = results(case, call, tensors)["dbias"]
        return float(dbias[(dbias - ROWS_OF_ONES).abs().argmax()])

    return _both(case, furthest)


def bytes_saved(norm: Norm, dtype: str, job: str) -> dict[str, int]:
    """Return the bytes that autograd saves for backward by variant, without the parameters."""
    case = Case(norm=norm, job=job, rows=SAVED[0], d=SAVED[1], dtype=dtype)
    tensors = inputs(case)
    parameters = nn.ParameterList(nn.Parameter(t) for t in tensors.args[2:] if t is not None)
    return _both(case, lambda call: saved_bytes(lambda: call(*tensors.args), StateSnapshot(parameters)))


def facts(norm: Norm, dtype: str, by_variant: dict[str, Numbers]) -> Iterable[Row]:
    """Yield a result row for each fact about a norm in a dtype: addnorm's number beside its bound, and eager PyTorch's.

    The column `torch` has PyTorch's number; for a model's formula it has addnorm's number with another order of rounding.

    Args:
        norm: the norm.
        dtype: the dtype of the stream.
        by_variant: the `errors` with all options. Their largest is a fact, in roundings of the dtype.
    """

    def fact(name: str, compare: str, bound: float, both: Numbers) -> Row:
        return Target(name, compare, bound).row(both["addnorm"], norm=norm, torch=both["eager"])

    rounding = torch.finfo(DTYPES[dtype].stream).eps / 2
    worst = {name: max(relative.values()) / rounding for name, relative in by_variant.items()}
    yield fact(f"all options, {dtype}: error in roundings", "<=", ROUNDINGS[dtype], worst)
    if dtype not in PARAMETERS:
        return
    for case_dtype, parameters in PARAMETERS[dtype].items():
        by_parameter = errors(norm, case_dtype)
        for field in ("dweight", "dbias"):
            if field in by_parameter["addnorm"]:
                relative = {name: one[field] for name, one in by_parameter.items()}
                yield fact(f"{field} {parameters}, z {dtype}: relative error", *LIMITS[parameters], relative)
    rows, d = SAVED
    for job, (options, tensors, more) in KEPT.items():
        expected = tensors * rows * d * DTYPES[dtype].branch.itemsize + 8 * rows + more
        yield fact(f"saved bytes, {rows} x {d} {dtype}{options}", "==", expected, bytes_saved(norm, dtype, job))
    if (norm, dtype) == ("layer", "bfloat16"):
        yield fact(f"dbias of {ROWS_OF_ONES} bfloat16 rows of ones", "==", ROWS_OF_ONES, bias_gradient_of_ones())
    if (norm, dtype) == ("rms", "bfloat16"):
        for model in MODELS:
            yield fact(f"share of elements unlike {model}'s formula, bfloat16", "<", 1e-4, unlike(model))


def import_ms() -> float:
    """Return the milliseconds that `import addnorm` adds to `import torch`, the median of three new processes.

    The first process, which is not counted, writes the bytecode files, as pip does: without them Python compiles the package.
    """
    code = "import torch, time; t = time.perf_counter(); import addnorm; print(1000 * (time.perf_counter() - t))"
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # as if it were not set
    runs = [float(subprocess.check_output([sys.executable, "-c", code], env=environment)) for _ in range(4)]
    return statistics.median(runs[1:])


def _rstd(x: Tensor) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + MODEL_EPS)


# The formula of a model's RMSNorm, and the casting and the offset of the weight that make `add_rms_norm` equal to it.
MODELS: dict[str, tuple[Any, Casting, float]] = {
    "Llama": (lambda x, weight: weight * (x.float() * _rstd(x)).to(x.dtype), "llama", 0.0),
    "Gemma": (lambda x, weight: (x.float() * _rstd(x) * (1.0 + weight.float())).type_as(x), "float32", 1.0),
    "T5": (lambda x, weight: weight * (x * _rstd(x)).to(weight.dtype), "t5", 0.0),
}


def unlike(name: str) -> Numbers:
    """Return the shares of elements that differ between `add_rms_norm` and model `name`.

    "addnorm" is with the model's `casting`, "eager" with another.
    """
    formula, casting, offset = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    x, branch, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in (SHAPE, SHAPE, SHAPE[1:]))
    options: dict[str, Casting] = {"addnorm": casting, "eager": "llama" if casting == "float32" else "float32"}
    wanted, shares = formula(x + branch, weight), {}
    for variant, option in options.items():
        y = add_rms_norm(x, branch, weight, eps=MODEL_EPS, casting=option, weight_offset=offset)
        shares[variant] = float((y != wanted).double().mean())
    return shares
