"""Check of a variant before it is timed: y, z and every gradient against float64.

With dropout each variant has its own mask, which is read off its z, since no element of the branch is small. The share of
kept elements must be 1 - p, and everything else follows from the mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from addnorm import reference
from addnorm.bench.cases import EPS, Call
from addnorm.bench.gpu.cases import DTYPES, JOBS, Set, gradients
from addnorm.bench.harness import Case

# Relative L2 errors: a correct variant stays far below them, whatever its order of rounding; a wrong formula does not.
LIMITS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
SIGMAS = 6.0  # allowed deviation of the share of kept elements
GRADIENTS = ("dresidual", "dbranch", "dweight", "dbias")


def limits(case: Case) -> dict[str, float]:
    """Return the tolerance of each output and gradient: that of its dtype.

    With dropout it is that of the coarsest dtype, since unfused variants round the branch after dropout to the branch's dtype.
    """
    dtypes = DTYPES[case.dtype]
    of_stream, of_branch, of_parameters = (LIMITS[dtype] for dtype in dtypes[1:])
    most = [of_branch, of_stream, of_stream, of_branch, of_parameters, of_parameters]
    if JOBS[case.job].dropout:
        most = [max(most)] * len(most)
    return dict(zip(("y", "z", *GRADIENTS), most, strict=True))


def errors(case: Case, forward: Call, tensors: Set) -> tuple[dict[str, float], str | None]:
    """Return the relative L2 error of each output and gradient of one call, and a sentence with what is wrong, or None."""
    job, dtypes = JOBS[case.job], DTYPES[case.dtype]
    outputs = forward(*tensors.args)
    y, z = outputs if job.stream else (outputs, None)
    for name, t, dtype in (("y", y, dtypes.branch), ("z", z, dtypes.stream)):
        if t is not None and (t.dtype != dtype or tuple(t.shape) != (case.rows, case.d)):
            return {}, f"{name} is {t.dtype} {tuple(t.shape)}, expected {dtype} {(case.rows, case.d)}"
    results = {"y": y.detach()} | ({} if z is None else {"z": z.detach()})
    if job.backward:
        results |= dict(zip(GRADIENTS, gradients(job, outputs, tensors), strict=False))  # RMSNorm has no bias
    with torch.no_grad():
        mask, problem = _kept(case, tensors, results)
        want = truth(case, tensors, mask)
        relative = {name: _error(t, want[name]) for name, t in results.items()}
    most = limits(case)
    wrong = [
        f"{name} differs by {value:.2g}, tolerance {most[name]:g}"
        for name, value in relative.items()
        if not value <= most[name]  # NaN is wrong too
    ]
    if wrong:
        problem = f"{'; '.join(wrong)} (relative, against float64)"
    return relative, problem


def truth(case: Case, tensors: Set, mask: Tensor | float = 1.0) -> dict[str, Tensor]:
    """Return y, z and the gradients in float64, by the written-out derivatives; `kept` is the dropout mask divided by 1 - p."""
    x, s, w, b = (None if t is None else t.detach().double() for t in tensors.args)
    assert x is not None
    assert s is not None
    z = x + mask * s
    results = {"y": reference.normalize(z, w, b, norm=case.norm, eps=EPS[case.norm]), "z": z}
    if tensors.cotangents:
        dy, dz = (t.double() for t in tensors.cotangents)
        stats = reference.statistics(z, case.norm, EPS[case.norm])
        grads = reference.normalize_backward(dy, z, w, stats, norm=case.norm)
        dx = grads.z + dz
        results |= {"dresidual": dx, "dbranch": mask * dx, "dweight": grads.weight, "dbias": grads.bias}
    return results


def _kept(case: Case, tensors: Set, results: dict[str, Tensor]) -> tuple[Tensor | float, str | None]:
    """Return the mask that a variant's z shows, divided by 1 - p, and a sentence if the share of kept elements is wrong."""
    p = JOBS[case.job].dropout
    if not p:
        return 1.0, None
    x, s, z = (t.detach().double() for t in (tensors.wanted[0], tensors.wanted[1], results["z"]))
    mask = (z - x - s / (1 - p)).abs() < (z - x).abs()
    share, n = mask.double().mean().item(), mask.numel()
    sigma = math.sqrt(p * (1 - p) / n)
    wrong = abs(share - (1 - p)) > SIGMAS * sigma
    return mask / (1 - p), f"dropout {p:g} kept {share:.3f} of the elements" if wrong else None


def _error(got: Tensor, want: Tensor) -> float:
    """Return the relative L2 error; infinite where the shapes differ."""
    if got.shape != want.shape:
        return math.inf
    return float((got.double() - want).norm() / want.norm())
