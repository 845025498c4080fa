"""Differences of tensors, and how large they may be: in the proof of a whole model, and in that of each fused call by itself.

A model's tensors may differ by twice the error of the model itself against float64. The results of a fused call may have only
slightly more round-off than those of the operators that it replaced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from addnorm._util.jsonio import Document
from addnorm._util.numbers import format_number
from addnorm.fusion.fused_call import LOW_PRECISION, agree
from addnorm.fusion.match import SUM
from addnorm.fusion.runs import Tensors

TIMES = 2  # two results that are equally exact differ by at most the sum of both errors
# Without float64 it is not known how round-off accumulates in a model. In 46 small models in float32 with perturbed parameters,
# tensors differed by 3 eps of their magnitude, one in a hundred by more than 15, one by 93. A missing bias, or another dropout
# mask, makes a difference of a million eps.
ROUNDINGS = 256
MAX_SHARE = 0.1  # of the magnitude: in bfloat16, ROUNDINGS alone would allow any difference

# Tolerances of one fused call.
ORDERS = 64  # in eps of float64 (times the root of the width) or float32: between two orders of computing
GROWTH = 1.1  # of the root mean square of the operators' errors, plus half an eps; documented is a factor of 1.02
# Over the root of the number of elements, added to TIMES and GROWTH: few errors say less about the errors of another result.
SAMPLING = 4
SUMS = 4  # in eps of the dtype in which sums over rows are accumulated
ROUNDED = 2  # without a float64 result, in eps: root mean square of the difference of two roundings
USUAL = 8  # at most, the largest feature of a row of random numbers in standard deviations
FEW = 8  # features: with so few, the two components that LayerNorm removes from a gradient are most of the gradient
VERY_FEW = 3  # features: with so few, LayerNorm gives nearly all rows the same numbers, and its gradient is round-off
FLIPS = 2  # elements of y in low precision that may be rounded the other way, besides the usual share
FLOAT32, FLOAT64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Difference(Document):
    """Difference of one tensor between the model before and after.

    Attributes:
        name: name of the parameter, or place of the output ("logits", "past_key_values.layers.0.keys", "[0]", "output").
        max_abs: largest |after - before|. Infinite if shape, dtype, NaN or integers differ.
        eager_error: largest |before - float64|, the error of the model itself; None if there is no float64 result. If `prove` has
            drawn the error several times, the largest of these.
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

    PROPERTIES = ("holds",)

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.max_abs <= self.tolerance

    @property
    def tolerance_share(self) -> float:
        """The difference divided by the tolerance."""
        return self.max_abs / self.tolerance if self.tolerance else math.inf if self.max_abs else 0.0

    def __str__(self) -> str:
        difference, tolerance = (format_number(number, 2) for number in (self.max_abs, self.tolerance))
        return f"{self.name} differs by {difference}, tolerance {tolerance}"


def failure(name: str) -> Difference:
    """Return a difference that no tolerance accepts."""
    return Difference(name, math.inf, None, 0.0, 0.0)


def worst(differences: Sequence[Difference]) -> Difference | None:
    """Return the difference with the largest share of its tolerance; None if there are none."""
    return max(differences, key=lambda difference: difference.tolerance_share, default=None)


# Of a model.


def compare(
    before: Tensors, after: Tensors, errors: Mapping[str, float], eps: float, *, gradients: bool = False,
    perturbed: Mapping[str, float] | None = None,
) -> list[Difference]:  # fmt: skip
    """Return the difference of each tensor, infinite for one that is new or missing.

    Args:
        before: the tensors of the original model.
        after: those of the fused model.
        errors: the largest errors of the original model against float64, where known.
        eps: distance of adjacent numbers at 1 in the dtype in which the model computes.
        gradients: whether these are gradients.
        perturbed: the changes when the parameters are perturbed by one rounding: a tensor may differ by twice that, if float64
            confirms such an error.
    """
    magnitudes = {name: _magnitude(t) for name, t in before.items()}
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
        if error is not None and perturbed is not None:
            tolerance = max(tolerance, TIMES * min(error, perturbed.get(name, 0.0)))
        has_numbers = magnitude > 0 or bool(before[name].to_dense().isfinite().any()) or not before[name].numel()
        change = _max_abs(before[name], after.get(name))
        differences.append(Difference(name, change, error, magnitude, tolerance, has_numbers))
    return differences + [failure(name) for name in after if name not in before]


def _lost_share(eps: float) -> float:
    """Return eps**0.25, the relative error at which three quarters of the digits are wrong; round-off is smaller."""
    return math.sqrt(math.sqrt(eps))


def mostly_unrelated(outputs: Tensors, errors: Mapping[str, float], eps: float) -> bool:
    """Return whether most outputs differ from those in float64 by more than round-off explains."""
    lost = [error > _lost_share(eps) * _magnitude(outputs[name]) for name, error in errors.items()]
    return sum(lost) > len(lost) / 2


def has_finite_numbers(outputs: Tensors) -> bool:
    """Return whether any output has an ordinary number: not only NaN, infinities and the large numbers of masks."""
    return any(bool(_ordinary(t).any()) for t in outputs.values())


def largest_errors(before: Tensors, exact: Tensors) -> dict[str, float]:
    """Return the largest error of each tensor against float64, where both have numbers.

    A tensor is left out if its float64 result has a NaN where the tensor has none.
    """
    pairs = {n: (t, exact[n]) for n, t in before.items() if _is_inexact(t) and n in exact and exact[n].shape == t.shape}
    pairs = {n: (t, truth) for n, (t, truth) in pairs.items() if not (_wide(truth).isnan() & ~_wide(t).isnan()).any()}
    return {
        n: _largest((_wide(t) - _wide(truth)).where(_ordinary(t) & _ordinary(truth), 0))
        for n, (t, truth) in pairs.items()
    }


def _max_abs(before: Tensor, after: Tensor | None) -> float:
    """Return the largest difference; infinite if only one of two elements is a number, or if shape, dtype or integers differ."""
    if after is None or before.shape != after.shape or before.dtype != after.dtype:
        return math.inf
    if not _is_inexact(before):
        return 0.0 if torch.equal(before, after) else math.inf
    a, b = _wide(after), _wide(before)
    same = (a == b) | (a.isnan() & b.isnan())
    return _largest((a - b).where(~same, 0), math.inf)  # the difference of equal infinities is NaN


def _magnitude(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor, without masks and infinities."""
    return _largest(_wide(tensor).where(_ordinary(tensor), 0))


def _largest(tensor: Tensor, infinite: float | None = None) -> float:
    """Return the largest absolute value, infinite if there is a NaN.

    An infinity becomes `infinite`, or for None the largest number of the dtype.
    """
    return float(tensor.abs().nan_to_num(nan=math.inf, posinf=infinite).max()) if tensor.numel() else 0.0


def _ordinary(tensor: Tensor) -> Tensor:
    """Return the mask of a tensor's ordinary numbers, without those near the dtype's limit, which belong to masks."""
    dense = tensor.to_dense()
    if not _is_inexact(tensor):
        return torch.ones_like(dense, dtype=torch.bool)
    return dense.isfinite() & (dense.abs() < torch.finfo(tensor.dtype).max / 4)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    """Return a dense tensor in float64 or complex128."""
    return tensor.to_dense().to(torch.complex128 if tensor.is_complex() else torch.float64)


# Of one call.


def condition_of(z: Tensor, kind: str, eps: float) -> float:
    """Return the factor by which a norm magnifies round-off in z.

    For LayerNorm it is the largest |z| / std of a row, at least 1; for other norms 1.
    """
    if kind != "layer":
        return 1.0
    few = z.shape[-1] <= VERY_FEW
    ratio = z.abs().amax(-1) / z.var(-1, correction=0).add(eps).sqrt()
    return max(1.0, float(ratio.nan_to_num(1.0).max()) * (USUAL if few else 1 / USUAL)) if z.numel() else 1.0


def compare_exactly(name: str, before: Tensor, after: Tensor | None, width: int, condition: float) -> Difference:
    """Compare two float64 results of a call whose norm has `width` features and the condition number `condition`.

    The tolerance is the difference that another order of summation explains.
    """
    bound = ORDERS * FLOAT64 * math.sqrt(width) * condition
    size = max(_largest(before), 1.0)
    error = _largest(before - after) if after is not None and before.shape == after.shape else math.inf
    return Difference(f"{name}, in float64", error, None, size, bound * size)


def compare_round_off(
    name: str, before: Tensor | None, after: Tensor | None, exact: Tensor | None, condition: float, kind: str
) -> Iterator[tuple[str, Difference]]:
    """Compare a result before and after fusing, in its dtype.

    `exact` is the float64 result, None if there is none; `condition` is `condition_of` the norm, and `kind` the norm's kind.

    Yield a suffix for the name ("" for the largest error, " (RMS)" for the root mean square, " (casting)" if the roundings
    differ) and a `Difference` whose tolerance is what round-off explains.
    """
    if before is None or after is None or before.shape != after.shape or before.dtype != after.dtype:
        yield "", failure(name)
        return
    largest, change = max(_largest(before), 1.0), before.double() - after.double()
    eps = torch.finfo(before.dtype).eps
    if name.startswith(SUM):  # its bits are the original's
        yield "", Difference(name, _largest(change), None, largest, 0.0)
        return
    has_castings = name.startswith("y") and kind == "rms" and before.dtype in LOW_PRECISION
    if has_castings and not agree(before, after, before.dtype, FLIPS):
        yield " (casting)", failure(name)
    floor = 0.1 if before.shape[-1] > FEW else 1.0
    if exact is None:
        size = max(_root_mean_square(before), floor)
        yield "", Difference(name, _largest(change), None, largest, (2 * TIMES * eps + ORDERS * FLOAT32) * largest)
        yield (
            " (RMS)",
            Difference(name, _root_mean_square(change), None, size, (ROUNDED * eps + ORDERS * FLOAT32) * size),
        )
        return
    errors = [tensor.double() - exact for tensor in (before, after)]
    sums = SUMS * FLOAT32 * condition
    if before.dtype == torch.float64:  # so is the exact result, and the operators have no error
        sums = ORDERS * FLOAT64 * math.sqrt(before.shape[-1]) * condition
    sampling = SAMPLING / math.sqrt(max(before.numel(), 1))
    own, error = map(_largest, errors)
    yield "", Difference(name, error, own, largest, (TIMES + sampling) * own + (2 * eps + sums) * largest)
    own, error = map(_root_mean_square, errors)
    size = max(_root_mean_square(exact), floor)
    yield " (RMS)", Difference(name, error, own, size, (GROWTH + sampling) * own + (eps / 2 + sums) * size)


def same_special(first: Tensor, second: Tensor) -> bool:
    """Return whether NaN and each infinity are in the same places of both tensors."""
    return all(torch.equal(test(first), test(second)) for test in (torch.isnan, torch.isposinf, torch.isneginf))


def _root_mean_square(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt().nan_to_num(nan=math.inf)) if tensor.numel() else 0.0
