"""Is a variant right? y, z and every gradient against float64, before anything is timed.

Under dropout each variant has a mask of its own, which is read off its z: no element of the branch is small there. The share
of elements that were kept must then be 1 - p, and everything else follows from the mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from addnorm import reference
from addnorm.bench.expressions import EPS, Call
from addnorm.bench.gpu import calls
from addnorm.bench.gpu.calls import Set
from addnorm.bench.gpu.cells import DTYPES, JOBS, Cell

# Relative L2 errors that a right variant stays far below, whatever order it rounds in; a wrong formula does not.
LIMITS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
SIGMAS = 6.0  # of the share that was kept
GRADIENTS = ("dresidual", "dbranch", "dweight", "dbias")


def limits(cell: Cell) -> dict[str, float]:
    """The largest error allowed of each output and gradient: that of its dtype.

    Under dropout that of the coarsest dtype: the branch after it is rounded to the branch's dtype by those who do not fuse.
    """
    dtypes = DTYPES[cell.dtype]
    of_stream, of_branch, of_parameters = (LIMITS[dtype] for dtype in dtypes[1:])
    most = [of_branch, of_stream, of_stream, of_branch, of_parameters, of_parameters]
    if JOBS[cell.job].dropout:
        most = [max(most)] * len(most)
    return dict(zip(("y", "z", *GRADIENTS), most, strict=True))


def errors(cell: Cell, forward: Call, given: Set) -> tuple[dict[str, float], str | None]:
    """The relative L2 error of each output and gradient of one call; and what is wrong, in a sentence, or None.

    Raises:
        Whatever the variant raises.
    """
    job, dtypes = JOBS[cell.job], DTYPES[cell.dtype]
    outputs = forward(*given.args)
    y, z = outputs if job.stream else (outputs, None)
    for name, t, dtype in (("y", y, dtypes.branch), ("z", z, dtypes.stream)):
        if t is not None and (t.dtype != dtype or tuple(t.shape) != (cell.rows, cell.d)):
            return {}, f"{name} is {t.dtype} {tuple(t.shape)}, and {dtype} {(cell.rows, cell.d)} is expected"
    found = {"y": y.detach()} | ({} if z is None else {"z": z.detach()})
    if job.backward:
        found |= dict(zip(GRADIENTS, calls.gradients(job, outputs, given), strict=False))  # RMSNorm has no bias
    with torch.no_grad():
        kept, problem = _kept(cell, given, found)
        want = truth(cell, given, kept)
        off = {name: _error(t, want[name]) for name, t in found.items()}
    most = limits(cell)
    wrong = [
        f"{name} is off by {value:.2g}, {most[name]:g} is allowed"
        for name, value in off.items()
        if not value <= most[name]  # NaN is wrong too
    ]
    if wrong:
        problem = f"{'; '.join(wrong)} (relative, against float64)"
    return off, problem


def truth(cell: Cell, given: Set, kept: Tensor | float = 1.0) -> dict[str, Tensor]:
    """y, z and the gradients in float64, by the written-out derivatives; `kept` is the dropout mask divided by 1 - p."""
    x, s, w, b = (None if t is None else t.detach().double() for t in given.args)
    assert x is not None
    assert s is not None
    z = x + kept * s
    found = {"y": reference.normalize(z, w, b, norm=cell.norm, eps=EPS[cell.norm]), "z": z}
    if given.cotangents:
        dy, dz = (t.double() for t in given.cotangents)
        stats = reference.statistics(z, cell.norm, EPS[cell.norm])
        grads = reference.normalize_backward(dy, z, w, stats, norm=cell.norm)
        dx = grads.z + dz
        found |= {"dresidual": dx, "dbranch": kept * dx, "dweight": grads.weight, "dbias": grads.bias}
    return found


def _kept(cell: Cell, given: Set, found: dict[str, Tensor]) -> tuple[Tensor | float, str | None]:
    """The mask that a variant's z shows, divided by 1 - p; and what is wrong with how many it kept."""
    p = JOBS[cell.job].dropout
    if not p:
        return 1.0, None
    x, s, z = (t.detach().double() for t in (given.wanted[0], given.wanted[1], found["z"]))
    mask = (z - x - s / (1 - p)).abs() < (z - x).abs()
    share, n = mask.double().mean().item(), mask.numel()
    sigma = math.sqrt(p * (1 - p) / n)
    wrong = abs(share - (1 - p)) > SIGMAS * sigma
    return mask / (1 - p), f"dropout {p:g} kept {share:.3f} of the elements" if wrong else None


def _error(got: Tensor, want: Tensor) -> float:
    """The relative L2 error; infinite where the shapes differ."""
    if got.shape != want.shape:
        return math.inf
    return float((got.double() - want).norm() / want.norm())
