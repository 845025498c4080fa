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
    """Return z, y and the gradients in float64, by the written-out derivatives.

    Args:
        case: the case.
        tensors: the inputs of the case.
        z: the stream that an implementation returned, from which y and the gradients are computed; None: the exact stream.
        mask: dropout mask divided by 1 - p.
    """
    wide: list[Any] = [None if t is None else t.detach().double() for t in tensors.args]
    x, s, w, b, *more = wide
    g, c = more if JOBS[case.job].dropout and more else (1.0, 0.0)
    kept = mask * (s + c)
    exact = x + g * kept
    at = exact if z is None else z.detach().double()
    named = {"z": exact, "y": reference.normalize(at, w, b, norm=case.norm, eps=EPS[case.norm])}
    if tensors.cotangents:
        dy, dz = (t.double() for t in tensors.cotangents)
        stats = reference.statistics(at, case.norm, EPS[case.norm])
        grads = reference.normalize_backward(dy, at, w, stats, norm=case.norm)
        dx = grads.z + dz
        dbranch = mask * g * dx
        named |= {"dresidual": dx, "dbranch": dbranch, "dweight": grads.weight, "dbias": grads.bias}
        named |= {"dlayer_scale": (dx * kept).sum(0), "dbranch_bias": dbranch.sum(0)}
    return named


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
