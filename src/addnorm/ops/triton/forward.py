"""The forward kernel: it computes z from residual and branch, and y from z.

A row of up to `plan.FORWARD_ROW` elements stays in registers from the first read to the last write. A longer row is read tile
by tile: first for z and the moments, then again (z if it was stored, else its summands) for y.
"""

from __future__ import annotations

import triton
import triton.language as tl

from addnorm.ops.triton.norms import NONE, add_to_lanes, merge_lanes, row_moments
from addnorm.ops.triton.tiles import (
    apply_branch_scale,
    apply_dropout,
    apply_scale,
    load_weight,
    round_to,
    row_offsets,
)


@triton.jit
def load_sum(
    residual, branch, residual_scale, row_scale, layer_scale, branch_bias, seed, residual_factor, branch_factor, keep_scale,
    threshold, offset, residual_at, branch_at, row, first, rows,
    D, ADD, Z, RESIDUAL_STEP, LAYER_STEP,
    BLOCK_D,
):  # fmt: skip
    """Return residual_scale * residual + row_scale * layer_scale * dropout(branch + branch_bias), in the dtype Z."""
    cols = first + tl.arange(0, BLOCK_D)[None, :]
    mask = (row < rows) & (cols < D)
    z = tl.load(residual + residual_at + cols, mask=mask, other=0.0).to(ADD)
    if branch is not None:
        u = tl.load(branch + branch_at + cols, mask=mask, other=0.0).to(ADD)
        if branch_bias is not None:
            u += tl.load(branch_bias + cols, mask=cols < D, other=0.0).to(ADD)
        u = apply_dropout(u, row, first, seed, keep_scale, threshold, offset, D, BLOCK_D)
        u = apply_branch_scale(u, row_scale, layer_scale, branch_factor, row, cols, rows, LAYER_STEP, D, ADD)
        z = apply_scale(z, residual_scale, residual_factor, cols, RESIDUAL_STEP, D, ADD) + u
    return round_to(z, Z)


@triton.jit
def normalize(x, mean, rstd, weight, bias, weight_offset, cols, D, X_HAT, ACC):
    """Return (x - mean) * rstd * (weight + weight_offset) + bias; X_HAT is the dtype of the first product, or None."""
    y = (x - mean) * rstd
    if X_HAT is not None:
        y = round_to(y, X_HAT).to(ACC)
    gamma = load_weight(weight, weight_offset, cols, D, ACC)
    if bias is not None:
        return tl.fma(y, gamma, tl.load(bias + cols, mask=cols < D, other=0.0).to(ACC))
    else:
        return y * gamma


@triton.jit(do_not_specialize=["threshold", "offset", "rows"])
def forward_kernel(
    residual, branch, weight, bias, y, z, stats, residual_scale, row_scale, layer_scale, branch_bias, seed,
    residual_factor, branch_factor, keep_scale, eps, weight_offset, residual_stride, branch_stride,
    threshold: tl.int64, offset: tl.int64, rows: tl.int64,
    D: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, ACC: tl.constexpr, Z: tl.constexpr, X_HAT: tl.constexpr,
    RESIDUAL_STEP: tl.constexpr, LAYER_STEP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute y, z and the statistics of BLOCK_ROWS rows per program.

    ADD is the dtype of the sum's arithmetic, ACC that of the norm, Z the dtype of z.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    residual_at, branch_at, at = row_offsets(row, residual_stride, D), row_offsets(row, branch_stride, D), row * D
    if BLOCK_D >= D:
        cols = tl.arange(0, BLOCK_D)[None, :]
        mask = (row < rows) & (cols < D)
        stream = load_sum(
            residual, branch, residual_scale, row_scale, layer_scale, branch_bias, seed, residual_factor, branch_factor,
            keep_scale, threshold, offset, residual_at, branch_at, row, 0, rows, D, ADD, Z, RESIDUAL_STEP, LAYER_STEP, BLOCK_D,
        )  # fmt: skip
        if z is not None:
            tl.store(z + at + cols, stream, mask=mask)
        if NORM != NONE:
            x = stream.to(ACC)
            mean, rstd = row_moments(x, eps, cols, D, NORM, ACC)
            out = normalize(x, mean, rstd, weight, bias, weight_offset, cols, D, X_HAT, ACC)
            tl.store(y + at + cols, round_to(out, y.dtype.element_ty), mask=mask)
    else:
        lane_mean, lane_squares = tl.zeros((BLOCK_ROWS, BLOCK_D), ACC), tl.zeros((BLOCK_ROWS, BLOCK_D), ACC)
        tiles = tl.zeros((1, 1), ACC)
        for first in range(0, D, BLOCK_D):
            cols = first + tl.arange(0, BLOCK_D)[None, :]
            mask = (row < rows) & (cols < D)
            stream = load_sum(
                residual, branch, residual_scale, row_scale, layer_scale, branch_bias, seed, residual_factor, branch_factor,
                keep_scale, threshold, offset, residual_at, branch_at, row, first, rows, D, ADD, Z, RESIDUAL_STEP,
                LAYER_STEP, BLOCK_D,
            )  # fmt: skip
            if z is not None:
                tl.store(z + at + cols, stream, mask=mask)
            x = stream.to(ACC)
            if NORM != NONE:
                lane_mean, lane_squares, tiles = add_to_lanes(lane_mean, lane_squares, tiles, x, cols, D, NORM, ACC)
        if NORM != NONE:
            mean, rstd = merge_lanes(lane_mean, lane_squares, eps, D, NORM, ACC, BLOCK_D)
            tl.debug_barrier()  # other threads than those that wrote z may read it
            for first in range(0, D, BLOCK_D):
                cols = first + tl.arange(0, BLOCK_D)[None, :]
                mask = (row < rows) & (cols < D)
                if z is not None:
                    x = tl.load(z + at + cols, mask=mask, other=0.0).to(ACC)
                else:
                    x = load_sum(
                        residual, branch, residual_scale, row_scale, layer_scale, branch_bias, seed, residual_factor,
                        branch_factor, keep_scale, threshold, offset, residual_at, branch_at, row, first, rows, D, ADD, Z,
                        RESIDUAL_STEP, LAYER_STEP, BLOCK_D,
                    ).to(ACC)  # fmt: skip
                out = normalize(x, mean, rstd, weight, bias, weight_offset, cols, D, X_HAT, ACC)
                tl.store(y + at + cols, round_to(out, y.dtype.element_ty), mask=mask)
    if stats is not None:
        tl.store(stats + row * 2, mean, mask=row < rows)
        tl.store(stats + row * 2 + 1, rstd, mask=row < rows)
