"""Functions that the kernels share: means of rows, scales, the dropout mask.

A tile is `(BLOCK_ROWS, BLOCK_D)`; `row` is `(BLOCK_ROWS, 1)` in int64, so that no offset overflows, and `cols` is `(1, BLOCK_D)`.
A missing tensor is None, which Triton removes at compile time. Names in capitals are constants at compile time, which only a
kernel that is launched must declare as such. ACC is the dtype of the arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

PHILOX_ROUNDS = tl.constexpr(10)


@triton.jit
def row_offsets(row, stride, D):
    """Return the offsets at which rows begin; a stride of None is D."""
    if stride is None:
        return row * D
    else:
        return row * stride


@triton.jit
def round_to(value, DTYPE):
    """Round to a dtype; from float64 to 16 bits by way of float32, as torch does."""
    if value.dtype == tl.float64 and DTYPE.primitive_bitwidth == 16:
        value = value.to(tl.float32)
    return value.to(DTYPE)


@triton.jit
def divide(a, b, ACC):
    """Return a / b, correctly rounded."""
    if tl.float64 == ACC:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def row_mean(tile, D, ACC):
    """Return the mean of each row, `(BLOCK_ROWS, 1)`; the tile must be zero beyond the row."""
    return divide(tl.sum(tile, 1, keep_dims=True), tl.full((1, 1), D, ACC), ACC)


@triton.jit
def row_rstd(var, eps, ACC):
    """Return 1 / sqrt(var + eps) with root and quotient correctly rounded; the hardware's rsqrt is off by two units."""
    root = tl.sqrt(var + eps) if tl.float64 == ACC else tl.sqrt_rn(var + eps)
    return divide(tl.full((1, 1), 1.0, ACC), root, ACC)


@triton.jit
def zero_beyond(value, cols, D):
    """Return the tile with zeros beyond the row, which do not change a sum."""
    return tl.where(cols < D, value, 0.0)


@triton.jit
def load_weight(weight, weight_offset, cols, D, ACC):
    """Return weight + weight_offset, `(1, BLOCK_D)`; ones without a weight."""
    gamma = tl.full(cols.shape, 1.0, ACC)
    if weight is not None:
        gamma = tl.load(weight + cols, mask=cols < D, other=0.0).to(ACC)
        if weight_offset is not None:
            gamma += weight_offset
    return gamma


@triton.jit
def apply_scale(value, scale, factor, cols, STEP, D, ACC):
    """Return value * scale; the scale is a tensor of one element (STEP 0) or one per feature (STEP 1), a number, or None."""
    if scale is not None:
        return value * tl.load(scale + cols * STEP, mask=cols < D, other=0.0).to(ACC)
    elif factor is not None:
        return value * factor
    else:
        return value


@triton.jit
def apply_branch_scale(value, row_scale, layer_scale, factor, row, cols, rows, STEP, D, ACC):
    """Return value * (row_scale * layer_scale)."""
    if row_scale is not None:
        gain = tl.load(row_scale + row, mask=row < rows, other=0.0).to(ACC)
        return value * apply_scale(gain, layer_scale, factor, cols, STEP, D, ACC)
    else:
        return apply_scale(value, layer_scale, factor, cols, STEP, D, ACC)


@triton.jit
def keep_mask(row, first, seed, threshold, offset, D, BLOCK_D):
    """Return the mask of the elements that dropout keeps.

    Element i is kept if word `i & 3` of Philox block `(i >> 2) + offset` reaches the threshold.
    """
    BLOCK_ROWS: tl.constexpr = row.shape[0]
    if D % 4 == 0:  # every row begins with a block: all four words of it are used
        block = row * (D // 4) + first // 4 + tl.arange(0, BLOCK_D // 4)[None, :] + offset
    else:
        i = row * D + first + tl.arange(0, BLOCK_D)[None, :]
        block = (i >> 2) + offset
    zero = tl.zeros(block.shape, tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        tl.load(seed), block.to(tl.uint32), (block >> 32).to(tl.uint32), zero, zero, PHILOX_ROUNDS
    )
    if D % 4 == 0:
        word = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK_ROWS, BLOCK_D)
    else:
        word = tl.where(i & 2 == 0, tl.where(i & 1 == 0, w0, w1), tl.where(i & 1 == 0, w2, w3))
    return word.to(tl.int64) >= threshold


@triton.jit
def apply_dropout(value, row, first, seed, keep_scale, threshold, offset, D, BLOCK_D):
    """Return dropout(value); a dropped element is 0 even if it was infinite."""
    if seed is None:
        return value
    else:
        return tl.where(keep_mask(row, first, seed, threshold, offset, D, BLOCK_D), value * keep_scale, 0.0)
