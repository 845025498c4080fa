"""The proof of a row: the equation computed in float64 from what the sublayer read and returned, against what the model has."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from addnorm.stream.find.adds import Add, Path
from addnorm.stream.find.chain import Found
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.replay import replay, views
from addnorm.stream.find.sites import Branch

__all__ = ["TOLERANCE", "closure_of", "operand", "relative", "summed", "tolerance", "total_of"]

# Relative errors of a whole tensor. Eight roundings of the dtype, and what the project's own issue asks for in float32.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 8 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 8 * torch.finfo(torch.bfloat16).eps,
}


def tolerance(*dtypes: torch.dtype) -> float:
    """What the coarsest of them allows."""
    return max(TOLERANCE.get(dtype, 1e-5) for dtype in dtypes)


def relative(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact|, in float64; infinite where one is not finite and the other is, or where no number is finite."""
    found, exact = found.double(), exact.double()
    if not exact.isfinite().any():
        return float("inf")
    same = (found == exact) | (found.isnan() & exact.isnan())
    off = torch.where(same, 0.0, found - exact)
    size = torch.where(exact.isfinite(), exact, 0.0).square().sum().sqrt().clamp_min(1e-30)
    value = float(off.square().sum().sqrt() / size)
    return value if value == value else float("inf")


def operand(path: Path, source: Tensor) -> Tensor:
    """What arrives at the add, from what the source holds."""
    value = source
    for op in reversed(path.ops):
        value = replay(op, value)
    for term in (*path.sums[::-1], path.term):
        value = value * term.factor
        if term.scale is not None:
            value = value * term.scale.tensor.detach().double()
    return value


def summed(add: Add, branches: list[Branch]) -> Tensor:
    """a * x + b * N_branch(raw) + ..., in float64."""
    total = operand(add.kept, add.x.tensor.detach().double())
    for branch in branches:
        raw = branch.raw.tensor.detach().double()
        if branch.norm is not None:
            raw = branch.norm(raw).reshape(branch.path.source.shape)
        total = total + operand(branch.path, raw)
    return total.reshape(add.out.shape)


def total_of(found: Found) -> float | None:
    """The relative error of x_L == x_0 + all writes; None where more than views lies between the adds."""
    if any(add.early or add.late or add.retokened for add in found.adds[1:]):
        return None
    with torch.no_grad():
        total = found.adds[0].x.tensor.detach().double()
        for k, (parts, add) in enumerate(zip(found.branches, found.adds, strict=True)):
            way = views(add.x, found.adds[k - 1].out) if k else []
            if way is None:
                return None
            for op in way:
                total = replay(op, total)
            total = operand(add.kept, total)
            for branch in parts:
                total = total + operand(branch.path, branch.path.source.tensor.detach().double())
            total = total.reshape(add.out.shape)
        return relative(found.adds[-1].out.tensor.detach(), total)


def closure_of(add: Add, branches: list[Branch], norm_out: Norm | None) -> float:
    """The largest relative error of the row: of the sum or of its norm, and of every norm with which a sublayer reads."""
    if not add.out.tensor.numel():
        return math.inf
    with torch.no_grad():
        z = summed(add, branches)
        errors = [relative(add.out.tensor.detach(), z)]
        if norm_out is not None:
            errors.append(_of_norm(norm_out))
        for branch in branches:
            errors += [_of_norm(norm) for norm in branch.reads.norms]
        return max(errors)


def _of_norm(norm: Norm) -> float:
    y = norm.y.tensor.detach()
    return relative(y, norm(norm.x.tensor.detach().double()).reshape(y.shape))
