"""How far one tensor is off another, and how far it may be: twice what eager itself is off from float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from addnorm.fusion.measure import Tensors

__all__ = ["Difference", "errors_of", "judged", "limits", "numbers_in", "size_of", "unlike", "widened_by", "worst"]

TIMES = 2  # if fused is as exact as eager is, they differ by at most the sum of both errors
# Without float64 nothing tells how roundings add up in a model. In 46 small ones in float32, rounded otherwise, tensors were
# off by 3 eps of their size, one of a hundred by more than 15, one by 93; a lost bias or another mask is a million.
ROUNDINGS = 256
AT_MOST = 0.1  # of the size: so many roundings of bfloat16 would allow anything


@dataclass(frozen=True)
class Difference:
    """How far one tensor is off.

    Attributes:
        name: where it is in the outputs ("logits", "past_key_values.layers.0.keys", "[0]", "output"), or the parameter's.
        off: the largest |after - before|; infinite where it is another tensor: shape, dtype, NaN, integers.
        error: the largest |before - float64|, which is eager's own; None where float64 has none. The largest of several, where it
            had to be drawn again.
        size: the largest |before|.
        limit: what `off` may be.
    """

    name: str
    off: float
    error: float | None
    size: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether it is off by no more than it may."""
        return self.off <= self.limit

    @property
    def share(self) -> float:
        """What it is off, as a share of the limit."""
        return self.off / self.limit if self.limit else math.inf if self.off else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        numbers = {
            name: value if not isinstance(value, float) or math.isfinite(value) else None
            for name, value in dataclasses.asdict(self).items()
        }
        return {**numbers, "holds": self.holds}


def worst(differences: Sequence[Difference]) -> Difference | None:
    """That which uses most of its limit."""
    return max(differences, key=lambda one: one.share, default=None)


def limits(before: Tensors, errors: Mapping[str, float], eps: float, gradients: bool = False) -> list[Difference]:
    """What each tensor may be off; what it is off is not known yet."""
    sizes = {name: size_of(t) for name, t in before.items()}
    inexact = {name: max(eps, torch.finfo(t.dtype).eps) for name, t in before.items() if _is_inexact(t)}
    whole = max((sizes[name] for name in inexact), default=0.0) if gradients else 0.0
    # A tensor of few elements may by luck have almost no error. So each may be off by as much, beside its size, as nine of
    # ten tensors are: the ones with the largest error tell nothing of the others.
    shares = sorted(
        errors[n] / sizes[n] for n in inexact if n in errors and errors[n] <= _lost(inexact[n]) * sizes[n] > 0
    )
    typical = shares[math.ceil(0.9 * (len(shares) - 1))] if shares else 0.0
    found = []
    for name, size in sizes.items():
        fine, error = inexact.get(name, 0.0), errors.get(name)
        # A gradient is a sum of many terms. Where these cancel their rounding stays: wholly in the gradient of the bias of
        # attention's keys, which is zero, and noise in floating point; else in part. The terms are about as large as the
        # largest gradient of all.
        left = fine * whole
        noise = gradients and error is not None and error >= size / 8 and size <= 64 * left
        if error is None or (error > _lost(fine) * size and not noise):
            limit = min(ROUNDINGS * fine, AT_MOST) * size + left
        else:
            limit = TIMES * max(error, typical * size) + fine * size + (left if noise else min(left, size / 128))
        found.append(Difference(name, 0.0, error, size, limit))
    return found


def _lost(eps: float) -> float:
    """The share of its size by which a tensor is off when three of four digits are lost: roundings do not do that."""
    return math.sqrt(math.sqrt(eps))


def widened_by(one: Difference, sway: float) -> Difference:
    """What a tensor may be off that eager computes only up to `sway`, where float64 says no less."""
    least = 0.0 if one.error is None else TIMES * min(one.error, sway)
    return dataclasses.replace(one, limit=max(one.limit, least))


def judged(before: Tensors, after: Tensors, limits: Sequence[Difference]) -> list[Difference]:
    """What each is off. What there was not before, or is not any more, is off by infinity."""
    new = [Difference(name, math.inf, None, 0.0, 0.0) for name in after if name not in before]
    return [dataclasses.replace(one, off=_off(before[one.name], after.get(one.name))) for one in limits] + new


def unlike(outputs: Tensors, errors: Mapping[str, float], eps: float) -> bool:
    """Whether most outputs have nothing in common with float64's."""
    lost = [error > _lost(eps) * size_of(outputs[name]) for name, error in errors.items()]
    return sum(lost) > len(lost) / 2


def numbers_in(outputs: Tensors) -> bool:
    """Whether there is any number to compare: not only NaN and infinities, or nothing at all."""
    return any(bool(_ordinary(t).any()) for t in outputs.values())


def errors_of(before: Tensors, truth: Tensors) -> dict[str, float]:
    """What eager is off from float64, where both have numbers; of a tensor that became NaN there it is not known."""
    pairs = {n: (t, truth[n]) for n, t in before.items() if _is_inexact(t) and n in truth and truth[n].shape == t.shape}
    pairs = {n: (t, exact) for n, (t, exact) in pairs.items() if not (_wide(exact).isnan() & ~_wide(t).isnan()).any()}
    return {
        n: _largest((_wide(t) - _wide(exact)).where(_ordinary(t) & _ordinary(exact), 0))
        for n, (t, exact) in pairs.items()
    }


def _off(before: Tensor, after: Tensor | None) -> float:
    """The largest difference; infinite where one has a number and the other none, or what should be equal is not."""
    if after is None or before.shape != after.shape or before.dtype != after.dtype:
        return math.inf
    if not _is_inexact(before):
        return 0.0 if torch.equal(before, after) else math.inf
    a, b = _wide(after), _wide(before)
    same = (a == b) | (a.isnan() & b.isnan())
    return _largest((a - b).where(~same, 0))  # of equal infinities the difference is no number


def size_of(tensor: Tensor) -> float:
    """The largest of its numbers."""
    return _largest(_wide(tensor).where(_ordinary(tensor), 0))


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().nan_to_num(nan=math.inf, posinf=math.inf).max()) if tensor.numel() else 0.0


def _ordinary(tensor: Tensor) -> Tensor:
    """Where a tensor has numbers. One at the end of what its dtype can hold is a mask's, and says nothing of the others' size."""
    dense = tensor.to_dense()
    if not _is_inexact(tensor):
        return torch.ones_like(dense, dtype=torch.bool)
    return dense.isfinite() & (dense.abs() < torch.finfo(tensor.dtype).max / 4)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    """In float64, or complex128."""
    return tensor.to_dense().to(torch.complex128 if tensor.is_complex() else torch.float64)
