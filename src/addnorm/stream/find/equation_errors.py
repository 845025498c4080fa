"""Relative errors of the equations: each equation is computed in float64 and compared with the values of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from addnorm._util.numbers import format_number
from addnorm.stream.dataflow.replay import relative_error, replay_op
from addnorm.stream.find.adds import Add
from addnorm.stream.find.chain import Chain
from addnorm.stream.find.norm import Norm
from addnorm.stream.find.paths import Path
from addnorm.stream.find.sublayers import Sublayer

# Largest relative error of a whole tensor at which an equation counts as proven; eight round-offs for the half dtypes.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 8 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 8 * torch.finfo(torch.bfloat16).eps,
}
REPEATED = 1e-3  # relative tolerance between outputs of two calls; kernels that add in varying order differ by less


def get_tolerance(*dtypes: torch.dtype) -> float:
    """Return the tolerance of the coarsest of the dtypes."""
    return max(TOLERANCES.get(dtype, 1e-5) for dtype in dtypes)


def check_repeated(again: Tensor, whole: Tensor) -> None:
    """Check that `again`, the output of a second call of the model, equals `whole`, that of the first, up to round-off."""
    change = f"shape {tuple(again.shape)} after {tuple(whole.shape)}"
    if again.shape == whole.shape:
        error = relative_error(again, whole) if whole.isfinite().any() else 0.0
        if error <= max(REPEATED, get_tolerance(whole.dtype)):
            return
        change = f"relative change {format_number(error, 2)}"
    raise RuntimeError(
        f"the model returns another output when it is called again with the same inputs ({change}), "
        "expected the same: what forward keeps between calls must be in its buffers or arguments."
    )


def compute_operand(path: Path, source: Tensor) -> Tensor:
    """Compute the operand at the end of `path` from `source`, the value at the start of the path."""
    value = source
    for op in reversed(path.ops):
        value = replay_op(op, value)
    for term in reversed(path.terms):
        value = value * term.factor
        if term.scale is not None:
            value = value * term.scale.exact
    return value


def compute_write(sublayer: Sublayer) -> Tensor:
    """Compute the term that a sublayer adds, in float64, from its output."""
    raw = sublayer.raw.exact
    if sublayer.norm is not None:
        raw = sublayer.norm(raw).reshape(sublayer.write_path.source.shape)
    return compute_operand(sublayer.write_path, raw)


def _compute_sum(add: Add, sublayers: Sequence[Sublayer], x: Tensor) -> Tensor:
    """Compute the sum of an add, in float64, for a residual x."""
    total = compute_operand(add.residual_path, x)
    return sum(map(compute_write, sublayers), total).reshape(add.out.shape)


def measure_row_error(add: Add, sublayers: Sequence[Sublayer], norm_out: Norm | None) -> float:
    """Return the largest relative error of the sum, its norm `norm_out`, and the norms through which the sublayers read."""
    if not add.out.tensor.numel():
        return math.inf
    norms = [norm for sublayer in sublayers for norm in sublayer.reads.norms]
    norms += [] if norm_out is None else [norm_out]
    with torch.no_grad():
        errors = [relative_error(add.out.exact, _compute_sum(add, sublayers, add.x.exact))]
        errors += [relative_error(norm.y.exact, norm(norm.x.exact).reshape(norm.y.shape)) for norm in norms]
        return max(errors)


def measure_sum_error(chain: Chain) -> float | None:
    """Return the relative error of x_L == x_0 + all writes; None if there are operators between the adds."""
    if any(after.x is not add.out for add, after in pairwise(chain.adds)):
        return None
    with torch.no_grad():
        total = chain.adds[0].x.exact
        for sublayers, add in zip(chain.sublayers, chain.adds, strict=True):
            total = _compute_sum(add, sublayers, total)
        return relative_error(chain.adds[-1].out.exact, total)
