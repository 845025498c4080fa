"""Differences of tensors, and their tolerance: twice the error of the model itself against float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from addnorm.fusion.runs import Tensors

__all__ = [
    "Difference", "compare", "has_finite_numbers", "largest_errors", "magnitude_of", "mostly_unrelated", "tolerances",
    "widen_tolerance", "worst",
]  # fmt: skip

TIMES = 2  # two results that are equally exact differ by at most the sum of both errors
# Without float64 it is not known how round-off accumulates in a model. In 46 small models in float32 with perturbed parameters,
# tensors differed by 3 eps of their magnitude, one in a hundred by more than 15, one by 93. A missing bias, or another dropout
# mask, makes a difference of a million eps.
ROUNDINGS = 256
MAX_SHARE = 0.1  # of the magnitude: in bfloat16, ROUNDINGS alone would allow any difference


@dataclass(frozen=True)
class Difference:
    """Difference of one tensor between the model before and after.

    Attributes:
        name: of a parameter; or the place in the outputs ("logits", "past_key_values.layers.0.keys", "[0]", "output").
        max_abs: largest |after - before|. Infinite if shape, dtype, NaN or integers differ.
        eager_error: largest |before - float64|, the error of the model itself; None if there is no float64 result. The largest of
            several where it had to be drawn again.
        magnitude: largest |before|.
        tolerance: largest `max_abs` that is accepted.
        is_compared: whether the tensor of the original model has a finite number. Otherwise only the places of NaN are compared.
    """

    name: str
    max_abs: float
    eager_error: float | None
    magnitude: float
    tolerance: float
    is_compared: bool = True

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.max_abs <= self.tolerance

    @property
    def tolerance_share(self) -> float:
        """The difference divided by the tolerance."""
        return self.max_abs / self.tolerance if self.tolerance else math.inf if self.max_abs else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes for JSON, with null for infinity."""
        numbers = {
            name: value if not isinstance(value, float) or math.isfinite(value) else None
            for name, value in dataclasses.asdict(self).items()
        }
        return {**numbers, "holds": self.holds}


def worst(differences: Sequence[Difference]) -> Difference | None:
    """Return the difference with the largest share of its tolerance; None if there are none."""
    return max(differences, key=lambda difference: difference.tolerance_share, default=None)


def tolerances(before: Tensors, errors: Mapping[str, float], eps: float, gradients: bool = False) -> list[Difference]:
    """Return the tolerance of each tensor, as differences that are still zero.

    Args:
        before: the tensors of the original model.
        errors: their largest errors against float64, where known.
        eps: distance of adjacent numbers at 1 in the dtype in which the model computes.
        gradients: whether these are gradients.
    """
    magnitudes = {name: magnitude_of(t) for name, t in before.items()}
    inexact = {name: max(eps, torch.finfo(t.dtype).eps) for name, t in before.items() if _is_inexact(t)}
    largest = max((magnitudes[name] for name in inexact), default=0.0) if gradients else 0.0
    # A tensor of few elements may by chance have almost no error. So each may differ, relative to its magnitude, by as much as
    # nine of ten tensors do; the tensors with the largest errors are no evidence about the others.
    shares = sorted(
        errors[n] / magnitudes[n]
        for n in inexact
        if n in errors and errors[n] <= _lost_share(inexact[n]) * magnitudes[n] > 0
    )
    typical = shares[math.ceil(0.9 * (len(shares) - 1))] if shares else 0.0
    differences = []
    for name, magnitude in magnitudes.items():
        own_eps, error = inexact.get(name, 0.0), errors.get(name)
        # A gradient is a sum of many terms. Where they cancel, their round-off remains: it is all of the gradient of the bias of
        # attention's keys, which is zero in exact arithmetic, and a part of others. The terms are about as large as the largest
        # gradient of all.
        round_off = own_eps * largest
        is_noise = gradients and error is not None and error >= magnitude / 8 and magnitude <= 64 * round_off
        if error is None or (error > _lost_share(own_eps) * magnitude and not is_noise):
            tolerance = min(ROUNDINGS * own_eps, MAX_SHARE) * magnitude + round_off
        else:
            remainder = round_off if is_noise else min(round_off, magnitude / 128)
            tolerance = TIMES * max(error, typical * magnitude) + own_eps * magnitude + remainder
        has_numbers = magnitude > 0 or bool(before[name].to_dense().isfinite().any()) or not before[name].numel()
        differences.append(Difference(name, 0.0, error, magnitude, tolerance, has_numbers))
    return differences


def _lost_share(eps: float) -> float:
    """Return the relative error at which three of four digits are lost, more than round-off causes."""
    return math.sqrt(math.sqrt(eps))


def widen_tolerance(difference: Difference, perturbed_error: float) -> Difference:
    """Return a difference with a tolerance of at least twice the change by perturbations, if float64 confirms it."""
    least = 0.0 if difference.eager_error is None else TIMES * min(difference.eager_error, perturbed_error)
    return dataclasses.replace(difference, tolerance=max(difference.tolerance, least))


def compare(before: Tensors, after: Tensors, tolerances: Sequence[Difference]) -> list[Difference]:
    """Return the difference of each tensor, infinite for one that is new or missing."""
    new = [Difference(name, math.inf, None, 0.0, 0.0) for name in after if name not in before]
    return [
        dataclasses.replace(difference, max_abs=_max_abs(before[difference.name], after.get(difference.name)))
        for difference in tolerances
    ] + new


def mostly_unrelated(outputs: Tensors, errors: Mapping[str, float], eps: float) -> bool:
    """Return whether most outputs have nothing in common with those in float64."""
    lost = [error > _lost_share(eps) * magnitude_of(outputs[name]) for name, error in errors.items()]
    return sum(lost) > len(lost) / 2


def has_finite_numbers(outputs: Tensors) -> bool:
    """Return whether there is a number to compare: not only NaN, infinity, or nothing at all."""
    return any(bool(_ordinary(t).any()) for t in outputs.values())


def largest_errors(before: Tensors, exact: Tensors) -> dict[str, float]:
    """Return the largest error of each tensor against float64, where both have numbers; none for a tensor with new NaNs there."""
    pairs = {n: (t, exact[n]) for n, t in before.items() if _is_inexact(t) and n in exact and exact[n].shape == t.shape}
    pairs = {n: (t, truth) for n, (t, truth) in pairs.items() if not (_wide(truth).isnan() & ~_wide(t).isnan()).any()}
    return {
        n: _largest((_wide(t) - _wide(truth)).where(_ordinary(t) & _ordinary(truth), 0))
        for n, (t, truth) in pairs.items()
    }


def _max_abs(before: Tensor, after: Tensor | None) -> float:
    """Return the largest difference; infinite if only one of two elements is a number, or if integers differ."""
    if after is None or before.shape != after.shape or before.dtype != after.dtype:
        return math.inf
    if not _is_inexact(before):
        return 0.0 if torch.equal(before, after) else math.inf
    a, b = _wide(after), _wide(before)
    same = (a == b) | (a.isnan() & b.isnan())
    return _largest((a - b).where(~same, 0))  # the difference of equal infinities is NaN


def magnitude_of(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor, without masks and infinities."""
    return _largest(_wide(tensor).where(_ordinary(tensor), 0))


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().nan_to_num(nan=math.inf, posinf=math.inf).max()) if tensor.numel() else 0.0


def _ordinary(tensor: Tensor) -> Tensor:
    """Return where a tensor has ordinary numbers. Numbers near the dtype's limit belong to masks and have no scale."""
    dense = tensor.to_dense()
    if not _is_inexact(tensor):
        return torch.ones_like(dense, dtype=torch.bool)
    return dense.isfinite() & (dense.abs() < torch.finfo(tensor.dtype).max / 4)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    """Return a dense tensor in float64 or complex128."""
    return tensor.to_dense().to(torch.complex128 if tensor.is_complex() else torch.float64)
