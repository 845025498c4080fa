"""Errors of an implementation of the operation against float64, of y, z and every gradient.

By contract y is the norm of the rounded z, and the gradients are those at the rounded z. So the float64 reference of each
implementation is computed from the z that the implementation returned. With dropout each implementation has its own mask, which
is known, or is computed from its z.
"""

from __future__ import annotations

import math
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


def truth(case: Case, tensors: Set, z: Tensor | None = None, mask: Tensor | float = 1.0) -> dict[str, Tensor]:
    """Return y, z and the gradients in float64, by autograd of the formula.

    Args:
        case: the case.
        tensors: the inputs of the case.
        z: the stream that an implementation returned, from which y and the gradients are computed; None: the exact stream.
        mask: dropout mask divided by 1 - p.
    """
    job = JOBS[case.job]

    def formula(x: Tensor, s: Tensor, w: Tensor, b: Tensor | None, *more: Tensor) -> Any:
        g, c = more if job.dropout and more else (1.0, 0.0)
        exact = x + g * (mask * (s + c))
        at = exact if z is None else exact + (z.double() - exact).detach()
        y = reference.normalize(at, w, b, norm=case.norm, eps=EPS[case.norm])
        return (y, exact) if job.stream else y

    wide = (None if t is None else t.detach().double().requires_grad_(job.backward) for t in tensors.args)
    with torch.set_grad_enabled(job.backward):
        return results(case, formula, tensors._replace(args=tuple(wide)))


def distance(value: Tensor, exact: Tensor) -> float:
    """Return the relative error of `value` in the L2 norm, or infinity if the shapes differ."""
    if value.shape != exact.shape:
        return math.inf
    return float((value.detach().double() - exact).norm() / exact.norm())


def errors(case: Case, call: Call, tensors: Set, mask: Tensor | float = 1.0) -> dict[str, float]:
    """Return the relative L2 error of each output and gradient of one call, with this dropout mask."""
    named = results(case, call, tensors)
    exact = truth(case, tensors, named.get("z"), mask)
    return {name: distance(t, exact[name]) for name, t in named.items()}


def limits(case: Case) -> dict[str, float]:
    """Return the tolerance of each output and gradient, by its dtype.

    With dropout all have the largest of these tolerances, since unfused variants round the branch after dropout to its dtype.
    """
    of_stream, of_branch, of_parameters = (LIMITS[dtype] for dtype in DTYPES[case.dtype][1:])
    most = dict.fromkeys(GRADIENTS, of_parameters) | {
        "y": of_branch, "z": of_stream, "dresidual": of_stream, "dbranch": of_branch,
    }  # fmt: skip
    return dict.fromkeys(most, max(most.values())) if JOBS[case.job].dropout else most


def check(case: Case, call: Call, tensors: Set) -> tuple[dict[str, float], str | None]:
    """Return the relative L2 error of each output and gradient of one call, and a sentence with what is wrong, or None.

    The reference does not use the returned z, so a stream that was rounded too coarsely is wrong. The dropout mask comes from z.
    """
    named, dtypes, most = results(case, call, tensors), DTYPES[case.dtype], limits(case)
    for name, dtype in (("y", dtypes.branch), ("z", dtypes.stream)):
        t = named.get(name)
        if t is not None and (t.dtype != dtype or tuple(t.shape) != (case.rows, case.d)):
            return {}, f"{name} is {t.dtype} {tuple(t.shape)}, expected {dtype} {(case.rows, case.d)}"
    mask, problem = _kept(tensors, named["z"]) if JOBS[case.job].dropout else (1.0, None)
    exact = truth(case, tensors, mask=mask)
    relative = {name: distance(t, exact[name]) for name, t in named.items()}
    wrong = [
        f"{name} differs by {value:.2g}, tolerance {most[name]:g}"
        for name, value in relative.items()
        if not value <= most[name]  # NaN is wrong too
    ]
    return relative, f"{'; '.join(wrong)} (relative, against float64)" if wrong else problem


def _kept(tensors: Set, z: Tensor) -> tuple[Tensor, str | None]:
    """Return the dropout mask computed from a variant's z, divided by 1 - p, and an error text if its share of ones is wrong."""
    x, s = (t.detach().double() for t in tensors.args[:2] if t is not None)
    added = z.double() - x
    mask = (added - s / (1 - DROPOUT)).abs() < added.abs()
    share, n = mask.double().mean().item(), mask.numel()
    wrong = abs(share - (1 - DROPOUT)) > SIGMAS * math.sqrt(DROPOUT * (1 - DROPOUT) / n)
    return mask / (1 - DROPOUT), f"dropout {DROPOUT:g} kept {share:.3f} of the elements" if wrong else None
