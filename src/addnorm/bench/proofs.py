"""Errors of an implementation of the operation against float64, of y, z and every gradient.

By contract y is the norm of the rounded z, and the gradients are those at the rounded z. So the float64 reference of each
implementation is computed from the z that the implementation returned. With dropout each implementation has its own mask, which
is computed from its z.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from addnorm import reference
from addnorm.bench.case import Case
from addnorm.bench.jobs import DROPOUT, DTYPES, EPS, JOBS, Call, Set

GRADIENTS = (
    "dresidual",
    "dbranch",
    "dweight",
    "dbias",
    "dlayer_scale",
    "dbranch_bias",
)  # in the order of the arguments
# Relative L2 errors: a correct variant stays far below them, whatever its order of rounding; a wrong formula does not.
LIMITS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2, torch.float64: 1e-10}
SIGMAS = 6.0  # allowed deviation of the share of kept elements


def results(case: Case, call: Call, tensors: Set) -> dict[str, Tensor]:
    """Return y, z and the gradients of one call by name, without z if the call does not return z."""
    outputs = call(*tensors.args)
    y, z = outputs if JOBS[case.job].stream else (outputs, None)
    named = {"y": y.detach()} | ({} if z is None else {"z": z.detach()})
    if tensors.cotangents:
        cotangents = tuple(g.to(t.dtype) for g, t in zip(tensors.cotangents, outputs, strict=True))
        gradients = tensors._replace(cotangents=cotangents).gradients(outputs, retain=JOBS[case.job].retained)
        names = [name for name, t in zip(GRADIENTS, tensors.args, strict=False) if t is not None]
        named |= dict(zip(names, gradients, strict=True))
    return named


def truth(case: Case, tensors: Set, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return y, z and the gradients in float64, by autograd of the formula.

    Args:
        case: the case.
        tensors: the inputs of the case.
        named: results of an implementation, from whose z the dropout mask, y and the gradients are computed. Without z there is
            no dropout, and the stream is exact.
    """
    job, z = JOBS[case.job], named.get("z")
    mask = dropout_mask(tensors, z) / (1 - DROPOUT) if job.dropout and z is not None else 1.0

    def formula(*args: Any) -> Any:
        _, _, w, b, *_ = args
        exact = _stream(args, mask)
        at = exact if z is None else exact + (z.double() - exact).detach()
        y = reference.normalize(at, w, b, norm=case.norm, eps=EPS[case.norm])
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


def distance(value: Tensor, exact: Tensor) -> float:
    """Return the relative error of `value` in the L2 norm, or infinity if the shapes differ."""
    if value.shape != exact.shape:
        return math.inf
    return float((value.detach().double() - exact).norm() / exact.norm())


def errors(case: Case, tensors: Set, named: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative L2 error of each of an implementation's results, given its z. The error of z is to the exact stream."""
    exact = truth(case, tensors, named)
    return {name: distance(t, exact[name]) for name, t in named.items()}


def limits(case: Case) -> dict[str, float]:
    """Return the tolerance of each output and gradient, by its dtype.

    With dropout all have the largest of these tolerances, since unfused variants round the branch after dropout to its dtype.
    """
    of_stream, of_branch, of_parameters = (LIMITS[dtype] for dtype in DTYPES[case.dtype])
    most = dict.fromkeys(GRADIENTS, of_parameters) | {
        "y": of_branch, "z": of_stream, "dresidual": of_stream, "dbranch": of_branch,
    }  # fmt: skip
    return dict.fromkeys(most, max(most.values())) if JOBS[case.job].dropout else most


def check(case: Case, call: Call, tensors: Set) -> tuple[dict[str, float], str | None]:
    """Return the relative L2 error of each output and gradient of one call, and a sentence with what is wrong, or None.

    A stream that was rounded too coarsely has an error of its own. The dropout mask comes from z.
    """
    named, dtypes, most = results(case, call, tensors), DTYPES[case.dtype], limits(case)
    for name, dtype in (("y", dtypes.branch), ("z", dtypes.stream)):
        t = named.get(name)
        if t is not None and (t.dtype != dtype or tuple(t.shape) != (case.rows, case.d)):
            return {}, f"{name} is {t.dtype} {tuple(t.shape)}, expected {dtype} {(case.rows, case.d)}"
    relative = errors(case, tensors, named)
    wrong = [
        f"{name} differs by {value:.2g}, tolerance {most[name]:g}"
        for name, value in relative.items()
        if not value <= most[name]  # NaN is wrong too
    ]
    if wrong:
        return relative, f"{'; '.join(wrong)} (relative, against float64)"
    if JOBS[case.job].dropout:
        share = dropout_mask(tensors, named["z"]).mean().item()
        if abs(share - (1 - DROPOUT)) > SIGMAS * math.sqrt(DROPOUT * (1 - DROPOUT) / named["z"].numel()):
            return relative, f"dropout {DROPOUT:g} kept {share:.3f} of the elements"
    return relative, None
