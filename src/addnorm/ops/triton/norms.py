"""The norms in the kernels: all that depends on the kind of norm.

    x_hat = (x - mean) * rstd        dx = rstd * (g - mean(g) - slope * mean(g * x_hat)), with g = dy * weight

The mean, and mean(g), are 0 unless the norm is centred. A long row is read in parts: the moments are then those of each lane, a
column of the tiles, until `merge_lanes`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from addnorm.ops.options import NORMS
from addnorm.ops.triton.tiles import divide, row_mean, row_rstd, zero_beyond

LAYER, RMS, NONE = (tl.constexpr(NORMS[name]) for name in ("layer", "rms", "none"))
COMPUTED = {norm.value for norm in (LAYER, RMS, NONE)}  # the norms that the kernels compute


@triton.constexpr_function
def is_centred(norm):
    """Return whether the mean is subtracted."""
    return norm == LAYER.value


@triton.jit
def row_moments(x, eps, cols, D, NORM, ACC):
    """Return mean (0 unless the norm is centred) and rstd of each row of a tile of whole rows."""
    if NORM == RMS:
        return tl.zeros((x.shape[0], 1), ACC), row_rstd(row_mean(x * x, D, ACC), eps, ACC)
    else:
        mean = tl.sum(x * (1.0 / D), 1, keep_dims=True)  # the plain sum may overflow although no element does
        mean += row_mean(zero_beyond(x - mean, cols, D), D, ACC)  # the mean of a constant row is then exact
        centred = zero_beyond(x - mean, cols, D)
        return mean, row_rstd(row_mean(centred * centred, D, ACC), eps, ACC)


@triton.jit
def add_to_lanes(lane_mean, lane_squares, tiles, x, cols, D, NORM, ACC):
    """Return the mean and the sum of squares about it of each lane, and the number of tiles, with the tile `x` (Welford)."""
    if NORM == RMS:
        return lane_mean, lane_squares + x * x, tiles
    else:
        tiles += 1.0
        off = zero_beyond(x - lane_mean, cols, D)
        lane_mean += off * divide(tl.full((1, 1), 1.0, ACC), tiles, ACC)
        return lane_mean, lane_squares + off * zero_beyond(x - lane_mean, cols, D), tiles


@triton.jit
def merge_lanes(lane_mean, lane_squares, eps, D, NORM, ACC, BLOCK_D):
    """Return mean and rstd of each row, as `row_moments`, from those of its lanes."""
    if NORM == RMS:
        return tl.zeros((lane_mean.shape[0], 1), ACC), row_rstd(row_mean(lane_squares, D, ACC), eps, ACC)
    else:
        lane = tl.arange(0, BLOCK_D)[None, :]
        count = (D // BLOCK_D + (lane < D % BLOCK_D).to(tl.int32)).to(ACC)
        mean = tl.sum(lane_mean * (count * (1.0 / D)), 1, keep_dims=True)
        mean += row_mean((lane_mean - mean) * count, D, ACC)  # as in `row_moments`
        off = lane_mean - mean
        return mean, row_rstd(row_mean(lane_squares + off * off * count, D, ACC), eps, ACC)


@triton.jit
def slope(x_hat, NORM):
    """Return the derivative of 1 / rstd by each element of x, times D: x_hat, where 1 / rstd is a root of a mean square."""
    return x_hat
