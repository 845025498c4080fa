"""The backward kernels: the gradients of z, residual, branch and the options, and the sums over the rows.

A program computes a fixed chunk of rows, which depends only on the shape, and writes their float32 sums to its row of `partials`.
`finalize_kernel` adds these in a fixed order, for all parameters at once. For rows too long for the registers `means_kernel`
computes the two means in a row's gradient, and the backward has a second axis of programs, over the features.
"""

from __future__ import annotations

import triton
import triton.language as tl

from addnorm.ops.triton.norms import NONE, is_centred, slope
from addnorm.ops.triton.tiles import (
    apply_branch_scale,
    apply_dropout,
    apply_scale,
    load_weight,
    round_to,
    row_mean,
    row_offsets,
    zero_beyond,
)


@triton.jit
def load_normalized(dy, z, stats, dy_stride, z_stride, row, cols, rows, D, ACC):
    """Return dy, x_hat and rstd of a tile; elements beyond the end of a row or beyond the last row are zero."""
    mask = (row < rows) & (cols < D)
    grad = tl.load(dy + row_offsets(row, dy_stride, D) + cols, mask=mask, other=0.0).to(ACC)
    z = tl.load(z + row_offsets(row, z_stride, D) + cols, mask=mask, other=0.0).to(ACC)
    mean = tl.load(stats + row * 2, mask=row < rows, other=0.0).to(ACC)
    rstd = tl.load(stats + row * 2 + 1, mask=row < rows, other=0.0).to(ACC)
    return grad, zero_beyond((z - mean) * rstd, cols, D), rstd


@triton.jit
def gradient_means(
    dy, z, stats, weight, weight_offset, dy_stride, z_stride, row, rows,
    D, NORM, ACC, BLOCK_ROWS, STEP,
):  # fmt: skip
    """Return (mean(g * x_hat), mean(g)) of rows that are read in parts, with g = dy * weight.

    The second is 0 unless the norm is centred.
    """
    mean_gx, mean_g = tl.zeros((BLOCK_ROWS, STEP), ACC), tl.zeros((BLOCK_ROWS, STEP), ACC)
    for first in range(0, D, STEP):
        cols = first + tl.arange(0, STEP)[None, :]
        grad, x_hat, _ = load_normalized(dy, z, stats, dy_stride, z_stride, row, cols, rows, D, ACC)
        g = grad * load_weight(weight, weight_offset, cols, D, ACC)
        mean_gx = tl.fma(g, x_hat, mean_gx)
        if is_centred(NORM):
            mean_g += g
    return row_mean(mean_gx, D, ACC), row_mean(mean_g, D, ACC)


@triton.jit(do_not_specialize=["rows"])
def means_kernel(
    dy, z, stats, weight, means, weight_offset, dy_stride, z_stride, rows: tl.int64,
    D: tl.constexpr, NORM: tl.constexpr, ACC: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write means = (mean(g * x_hat), mean(g)) of each row, `(rows, 2)`, with g = dy * weight; one row per program."""
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    mean_gx, mean_g = gradient_means(
        dy, z, stats, weight, weight_offset, dy_stride, z_stride, row, rows, D, NORM, ACC, 1, BLOCK_D
    )
    tl.store(means + row * 2, mean_gx)
    tl.store(means + row * 2 + 1, mean_g)


@triton.jit
def store_sum(partials, tile, cols, PLACE, SUMS, STEP, D):
    """Store the sums of a chunk of rows: one for each feature (STEP 1), or one number for each program (STEP 0)."""
    row_sums = partials + (tl.program_id(0).to(tl.int64) * SUMS + PLACE) * D
    row = tl.sum(tile, 0, keep_dims=True)
    if STEP == 0:
        tl.store(row_sums + tl.program_id(1) + tl.zeros((1, 1), tl.int32), tl.sum(row, 1, keep_dims=True))
    else:
        tl.store(row_sums + cols, row, mask=cols < D)


@triton.jit(do_not_specialize=["threshold", "offset", "rows", "chunk"])
def backward_kernel(
    dy, dz, z, stats, means, weight, residual, branch, dresidual, dbranch, drow_scale, partials,
    residual_scale, row_scale, layer_scale, branch_bias, seed, residual_factor, branch_factor, keep_scale, weight_offset,
    dy_stride, dz_stride, z_stride, residual_stride, branch_stride,
    threshold: tl.int64, offset: tl.int64, rows: tl.int64, chunk: tl.int32,
    D: tl.constexpr, NORM: tl.constexpr, ACC: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL_SCALE: tl.constexpr, LAYER_SCALE: tl.constexpr, BRANCH_BIAS: tl.constexpr, SUMS: tl.constexpr,
    RESIDUAL_STEP: tl.constexpr, LAYER_STEP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of `chunk` rows per program, BLOCK_ROWS at a time, and their sums over these rows.

    WEIGHT to BRANCH_BIAS are the indices of the sums in `partials`, None for a sum that is not requested.

    dz_total = dz + the gradient of the norm (norms.py).
    """
    first = tl.program_id(1) * BLOCK_D
    cols = first + tl.arange(0, BLOCK_D)[None, :]
    if STEP >= BLOCK_D:
        gamma = load_weight(weight, weight_offset, cols, D, ACC)
    if WEIGHT is not None:
        weight_sum = tl.zeros((BLOCK_ROWS, BLOCK_D), ACC)
    if BIAS is not None:
        bias_sum = tl.zeros((BLOCK_ROWS, BLOCK_D), ACC)
    if RESIDUAL_SCALE is not None:
        residual_scale_sum = tl.zeros((BLOCK_ROWS, BLOCK_D), ACC)
    if LAYER_SCALE is not None:
        layer_scale_sum = tl.zeros((BLOCK_ROWS, BLOCK_D), ACC)
    if BRANCH_BIAS is not None:
        branch_bias_sum = tl.zeros((BLOCK_ROWS, BLOCK_D), ACC)

    begin = tl.program_id(0).to(tl.int64) * chunk
    for done in tl.range(0, chunk, BLOCK_ROWS, num_stages=STAGES):
        row = begin + done + tl.arange(0, BLOCK_ROWS)[:, None]
        mask = (row < rows) & (cols < D)
        if dz is not None:
            total = tl.load(dz + row_offsets(row, dz_stride, D) + cols, mask=mask, other=0.0).to(ACC)
        else:
            total = tl.zeros((BLOCK_ROWS, BLOCK_D), ACC)
        if NORM != NONE:
            if STEP < BLOCK_D and means is None:  # the second reading comes from the cache
                mean_gx, mean_g = gradient_means(
                    dy, z, stats, weight, weight_offset, dy_stride, z_stride, row, rows, D, NORM, ACC, BLOCK_ROWS, STEP
                )
            grad, x_hat, rstd = load_normalized(dy, z, stats, dy_stride, z_stride, row, cols, rows, D, ACC)
            if STEP < BLOCK_D:
                gamma = load_weight(weight, weight_offset, cols, D, ACC)
            g = grad * gamma
            if means is not None:
                mean_gx = tl.load(means + row * 2, mask=row < rows, other=0.0)
                mean_g = tl.load(means + row * 2 + 1, mask=row < rows, other=0.0)
            elif STEP >= BLOCK_D:
                mean_gx = row_mean(g * x_hat, D, ACC)
                mean_g = row_mean(g, D, ACC) if is_centred(NORM) else tl.zeros((BLOCK_ROWS, 1), ACC)
            total = tl.fma(tl.fma(-slope(x_hat, NORM), mean_gx, g - mean_g), rstd, total)
            if WEIGHT is not None:
                weight_sum = tl.fma(grad, x_hat, weight_sum)
            if BIAS is not None:
                bias_sum += grad
        if RESIDUAL_SCALE is not None or LAYER_SCALE is not None or BRANCH_BIAS is not None:
            total = tl.where(mask, total, 0.0)  # beyond the last row an infinite weight times 0 is NaN
        if dresidual is not None:
            out = apply_scale(total, residual_scale, residual_factor, cols, RESIDUAL_STEP, D, ACC)
            tl.store(dresidual + row * D + cols, round_to(out, dresidual.dtype.element_ty), mask=mask)
        if RESIDUAL_SCALE is not None:
            at = row_offsets(row, residual_stride, D) + cols
            residual_scale_sum += total * tl.load(residual + at, mask=mask, other=0.0).to(ACC)
        if dbranch is not None or BRANCH_BIAS is not None:
            out = apply_branch_scale(total, row_scale, layer_scale, branch_factor, row, cols, rows, LAYER_STEP, D, ACC)
            out = apply_dropout(out, row, first, seed, keep_scale, threshold, offset, D, BLOCK_D)
            if dbranch is not None:
                tl.store(dbranch + row * D + cols, round_to(out, dbranch.dtype.element_ty), mask=mask)
            if BRANCH_BIAS is not None:
                branch_bias_sum += tl.where(mask, out, 0.0)  # a scale may be infinite too
        if branch is not None:
            u = tl.load(branch + row_offsets(row, branch_stride, D) + cols, mask=mask, other=0.0).to(ACC)
            if branch_bias is not None:
                u += tl.load(branch_bias + cols, mask=cols < D, other=0.0).to(ACC)
                u = tl.where(mask, u, 0.0)  # an infinite bias times 0 is NaN
            u = total * apply_dropout(u, row, first, seed, keep_scale, threshold, offset, D, BLOCK_D)
            if LAYER_SCALE is not None:
                layer_scale_sum += apply_branch_scale(u, row_scale, None, None, row, cols, rows, LAYER_STEP, D, ACC)
            if drow_scale is not None:
                out = tl.sum(apply_scale(u, layer_scale, branch_factor, cols, LAYER_STEP, D, ACC), 1, keep_dims=True)
                at = drow_scale + tl.program_id(1).to(tl.int64) * rows + row
                tl.store(at, round_to(out, drow_scale.dtype.element_ty), mask=row < rows)

    if WEIGHT is not None:
        store_sum(partials, weight_sum, cols, WEIGHT, SUMS, 1, D)
    if BIAS is not None:
        store_sum(partials, bias_sum, cols, BIAS, SUMS, 1, D)
    if RESIDUAL_SCALE is not None:
        store_sum(partials, residual_scale_sum, cols, RESIDUAL_SCALE, SUMS, RESIDUAL_STEP, D)
    if LAYER_SCALE is not None:
        store_sum(partials, layer_scale_sum, cols, LAYER_SCALE, SUMS, LAYER_STEP, D)
    if BRANCH_BIAS is not None:
        store_sum(partials, branch_bias_sum, cols, BRANCH_BIAS, SUMS, 1, D)


@triton.jit
def column_sums(
    partials, cols, programs, PLACE, SUMS, WIDTH, D,
    ACC, BLOCK_P, BLOCK_C,
):  # fmt: skip
    """Return the sums over all programs of the columns `cols`, `(1, BLOCK_C)`."""
    total = tl.zeros((BLOCK_P, BLOCK_C), ACC)
    for begin in range(0, programs, BLOCK_P):
        program = (begin + tl.arange(0, BLOCK_P)[:, None]).to(tl.int64)
        mask = (program < programs) & (cols < WIDTH)
        total += tl.load(partials + (program * SUMS + PLACE) * D + cols, mask=mask, other=0.0)
    return tl.sum(total, 0, keep_dims=True)


@triton.jit
def finalize_parameter(
    partials, out, programs, PLACE, SUMS, STEP, PARTS,
    D, ACC, BLOCK_P, BLOCK_C,
):  # fmt: skip
    """Write a parameter's gradient, in its dtype: this program's columns, or all of it if it is one number (STEP 0)."""
    if PLACE is not None:  # noqa: SIM102  # decided at compile time, the next condition at run time
        if tl.program_id(1) == PLACE:
            if STEP == 1:
                cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
                total = column_sums(partials, cols, programs, PLACE, SUMS, D, D, ACC, BLOCK_P, BLOCK_C)
                tl.store(out + cols, round_to(total, out.dtype.element_ty), mask=cols < D)
            elif tl.program_id(0) == 0:
                scalar = tl.zeros((1, 1), ACC)
                for first in range(0, PARTS, BLOCK_C):
                    cols = first + tl.arange(0, BLOCK_C)[None, :]
                    total = column_sums(partials, cols, programs, PLACE, SUMS, PARTS, D, ACC, BLOCK_P, BLOCK_C)
                    scalar += tl.sum(total, 1, keep_dims=True)
                tl.store(out + tl.zeros((1, 1), tl.int32), round_to(scalar, out.dtype.element_ty))


@triton.jit(do_not_specialize=["programs"])
def finalize_kernel(
    partials, weight, bias, residual_scale, layer_scale, branch_bias, programs: tl.int32,
    D: tl.constexpr, PARTS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL_SCALE: tl.constexpr,
    LAYER_SCALE: tl.constexpr, BRANCH_BIAS: tl.constexpr, SUMS: tl.constexpr, RESIDUAL_STEP: tl.constexpr,
    LAYER_STEP: tl.constexpr, ACC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum the partial sums of `backward_kernel` to gradients; each parameter has its own row of the program grid."""
    finalize_parameter(partials, weight, programs, WEIGHT, SUMS, 1, PARTS, D, ACC, BLOCK_P, BLOCK_C)
    finalize_parameter(partials, bias, programs, BIAS, SUMS, 1, PARTS, D, ACC, BLOCK_P, BLOCK_C)
    finalize_parameter(
        partials, residual_scale, programs, RESIDUAL_SCALE, SUMS, RESIDUAL_STEP, PARTS, D, ACC, BLOCK_P, BLOCK_C
    )
    finalize_parameter(partials, layer_scale, programs, LAYER_SCALE, SUMS, LAYER_STEP, PARTS, D, ACC, BLOCK_P, BLOCK_C)
    finalize_parameter(partials, branch_bias, programs, BRANCH_BIAS, SUMS, 1, PARTS, D, ACC, BLOCK_P, BLOCK_C)
