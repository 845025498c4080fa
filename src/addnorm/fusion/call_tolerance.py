"""Tolerances of the proof of a fused call: how much round-off explains, and what its results may share and write."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from addnorm.fusion.fused_call import LOW_PRECISION, agree
from addnorm.fusion.tolerance import Difference
from addnorm.fusion.wiring import failure

__all__ = ["SUM", "VERY_FEW", "condition_of", "effects_of", "in_float64", "round_off", "same_special", "same_strides"]

ROUNDINGS = 64  # in eps of float64, times the root of the width: between two orders of computing
GROWTH = 1.1  # of the root mean square of the operators' errors, plus half an eps; documented is a factor of 1.02
SAMPLING = (
    4  # over the root of the number of elements, in addition: few errors say less about the errors of another result
)
TIMES = 2  # the largest error may be that many times the operators' largest, plus two eps
SUMS = 4  # in eps of the dtype in which sums over rows are accumulated
ROUNDED = 2  # without a float64 result, in eps: root mean square of the difference of two roundings
USUAL = 8  # at most, the largest feature of a row of random numbers in standard deviations
FEW = 8  # features: of so few, the two that LayerNorm removes from a gradient are most of it
VERY_FEW = 3  # features: a LayerNorm of these returns the same numbers for nearly all rows, and a gradient of round-off
FLIPS = 2  # elements of y in low precision that may be rounded the other way, besides the usual share
SUM = "the sum"
FLOAT32 = torch.finfo(torch.float32).eps

Results = dict[str, Tensor]


def condition_of(z: Tensor, kind: str, eps: float) -> float:
    """Return how much a norm of z magnifies round-off: LayerNorm, if the features of a row are nearly equal, as with d = 1."""
    if kind != "layer":
        return 1.0
    few = z.shape[-1] <= VERY_FEW
    ratio = z.abs().amax(-1) / z.var(-1, correction=0).add(eps).sqrt()
    return max(1.0, float(ratio.nan_to_num(1.0).max()) * (USUAL if few else 1 / USUAL)) if z.numel() else 1.0


def in_float64(name: str, truth: Tensor, other: Tensor | None, width: int, condition: float) -> Difference:
    """Return the difference of two results in float64, where only another order of computing is round-off."""
    bound = ROUNDINGS * torch.finfo(torch.float64).eps * math.sqrt(width) * condition
    size = max(_largest(truth), 1.0)
    error = _largest(truth - other) if other is not None and truth.shape == other.shape else math.inf
    return Difference(f"{name}, in float64", error, None, size, bound * size)


def round_off(
    name: str, before: Tensor | None, after: Tensor | None, exact: Tensor | None, condition: float, kind: str
) -> Iterator[tuple[str, Difference]]:
    """Yield what a call differs by in the graph's dtypes, with as much as round-off explains, and which norm that is."""
    if before is None or after is None or before.shape != after.shape or before.dtype != after.dtype:
        yield "", failure(name)
        return
    size, difference = max(_largest(before), 1.0), _largest(before.double() - after.double())
    eps = torch.finfo(before.dtype).eps
    if name.startswith(SUM):  # its bits are the original's
        yield "", Difference(name, difference, None, size, 0.0)
        return
    has_castings = name.startswith("y") and kind == "rms" and before.dtype in LOW_PRECISION
    if has_castings and not agree(before, after, before.dtype, FLIPS):
        yield " (casting)", failure(name)
    floor = 0.1 if before.shape[-1] > FEW else 1.0
    if exact is None:
        yield "", Difference(name, difference, None, size, (2 * TIMES * eps + ROUNDINGS * FLOAT32) * size)
        difference, size = _root_mean_square(before.double() - after.double()), max(_root_mean_square(before), floor)
        yield " (RMS)", Difference(name, difference, None, size, (ROUNDED * eps + ROUNDINGS * FLOAT32) * size)
    else:
        errors = [tensor.double() - exact for tensor in (before, after)]
        sums = SUMS * FLOAT32 * condition
        if before.dtype == torch.float64:  # so is the exact result, and the operators have no error
            sums = ROUNDINGS * torch.finfo(torch.float64).eps * math.sqrt(before.shape[-1]) * condition
        sampling = SAMPLING / math.sqrt(max(before.numel(), 1))
        own, error = map(_largest, errors)
        yield "", Difference(name, error, own, size, (TIMES + sampling) * own + (2 * eps + sums) * size)
        own, error = map(_root_mean_square, errors)
        size = max(_root_mean_square(exact), floor)
        yield " (RMS)", Difference(name, error, own, size, (GROWTH + sampling) * own + (eps / 2 + sums) * size)


def effects_of(outputs: Results, leaves: Mapping[fx.Node, tuple[Any, Any]]) -> Iterator[str]:
    """Yield a text for each leaf that was written, and for each result in the memory of another tensor."""
    names = {leaf.name: value for leaf, (value, _) in leaves.items() if isinstance(value, Tensor)} | outputs
    memory = {name: tensor.untyped_storage().data_ptr() for name, tensor in names.items() if tensor.numel()}
    yield from (f"{leaf.name} is written" for leaf, (value, drawn) in leaves.items() if not _is_equal(value, drawn))
    for name in outputs:
        yield from (
            f"{name} in the memory of {other}"
            for other in memory
            if memory[other] == memory.get(name) and other != name
        )


def _is_equal(first: Any, second: Any) -> bool:
    return not isinstance(first, Tensor) or torch.equal(first, second)


def same_strides(first: Tensor | None, second: Tensor | None) -> bool:
    """Return whether two tensors have the same strides, where a size is more than one."""
    if first is None or second is None or first.shape != second.shape or not first.numel():
        return True
    return all(n < 2 or a == b for n, a, b in zip(first.shape, first.stride(), second.stride(), strict=True))


def same_special(first: Tensor, second: Tensor) -> bool:
    """Return whether NaN and each infinity have the same places."""
    return all(torch.equal(test(first), test(second)) for test in (torch.isnan, torch.isposinf, torch.isneginf))


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value; infinite if there is a NaN."""
    return float(tensor.abs().nan_to_num(nan=math.inf).max()) if tensor.numel() else 0.0


def _root_mean_square(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt().nan_to_num(nan=math.inf)) if tensor.numel() else 0.0
