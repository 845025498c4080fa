"""The forward kernels of n streams: the write, the projection and the gates of a block of tokens; the read and its norm.

`write_kernel` goes through the features in chunks. It writes the new streams of its tokens and multiplies them with that chunk
of φ. In hyper, whose streams are centred first, it reads them a second time, from the cache. `read_kernel` has whole rows in
registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from addnorm.ops.triton.forward import normalize
from addnorm.ops.triton.norms import NONE, row_moments
from addnorm.ops.triton.streams.coefficients import (
    GATES,
    GIVEN,
    HYPER,
    INDEPENDENT,
    MANIFOLD,
    load_constant_matrix,
    load_constants,
    load_gates,
    load_matrix,
    mean_share,
    sigmoid,
    sinkhorn,
    store_gates,
    store_matrix,
    stream_offsets,
    tanh,
)
from addnorm.ops.triton.tiles import round_to, row_rstd


@triton.jit
def load_new_streams(
    streams, branch, mix, inject, token, first, rows,
    N, D, MIX_WIDTH, INJECT_WIDTH, BLOCK_N,
    BLOCK_D,
):  # fmt: skip
    """Return A X + b w, not rounded, or X without a branch; with a width of 0 all tokens share the coefficients."""
    at, mask = stream_offsets(token, first, rows, N, D, BLOCK_N, BLOCK_D)
    if branch is None:
        return tl.load(streams + at, mask=mask, other=0.0).to(tl.float32)
    else:
        cols = first + tl.arange(0, BLOCK_D)[None, :]
        row_mask = (token[:, None] < rows) & (cols < D)
        write = tl.load(branch + token[:, None] * D + cols, mask=row_mask, other=0.0).to(tl.float32)
        gain = load_gates(inject, token, rows, 0, INJECT_WIDTH, 1, N, BLOCK_N)
        new = gain[:, :, None] * write[:, None, :]
        if mix is None:
            new += tl.load(streams + at, mask=mask, other=0.0).to(tl.float32)
        else:
            for j in tl.static_range(N):
                x = tl.load(streams + (token[:, None] * N + j) * D + cols, mask=row_mask, other=0.0).to(tl.float32)
                new += load_gates(mix, token, rows, j, MIX_WIDTH, N, N, BLOCK_N)[:, :, None] * x[:, None, :]
        return new


@triton.jit
def load_project(
    project, first, COUNT, N, D, BLOCK_R, BLOCK_N,
    BLOCK_D,
):  # fmt: skip
    """Return a chunk of φ, `(BLOCK_R, BLOCK_N * BLOCK_D)`; the features of a stream are together. N is 1 in hyper."""
    r, q = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_N * BLOCK_D)[None, :]
    stream, cols = q // BLOCK_D, first + q % BLOCK_D
    mask = (r < COUNT) & (stream < N) & (cols < D)
    return tl.load(project + (r * N + stream) * D + cols, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def add_compensated(total, lost, term):
    """Return total + term - lost, and the rounding error of this addition, which is the next `lost`.

    It is Kahan's compensated sum: a product over all features is a long chain of additions.
    """
    term -= lost
    sum_ = total + term
    return sum_, (sum_ - total) - term


@triton.jit
def store_gates_of(
    kind_logits, scale, base, new_collapse, new_mix, new_inject, gate_eps, magnitude, token, rows, iterations,
    N, KIND, LOGITS, BLOCK_N,
):  # fmt: skip
    """Compute c', b' and A' from the logits in memory, and store them."""
    first = tl.load(scale).to(tl.float32)
    constant = load_constants(base, N, BLOCK_N)
    if KIND == HYPER:
        gate = tanh(load_gates(kind_logits, token, rows, 0, LOGITS, N + 2, N, BLOCK_N))
        store_gates(new_collapse, constant + first * gate, token, rows, 0, N, 1, N, BLOCK_N)
        gate = tanh(load_gates(kind_logits, token, rows, 1, LOGITS, N + 2, N, BLOCK_N))
        gate = load_constants(base + N, N, BLOCK_N) + tl.load(scale + 1).to(tl.float32) * gate
        store_gates(new_inject, gate, token, rows, 0, N, 1, N, BLOCK_N)
        matrix = tanh(load_matrix(kind_logits, token, rows, 2, LOGITS, 1, N + 2, N, BLOCK_N))
        matrix = load_constant_matrix(base + 2 * N, N, BLOCK_N) + first * matrix
        store_matrix(new_mix, matrix, token, rows, 0, N * N, N, 1, N, BLOCK_N)
    else:
        gate = sigmoid(load_gates(kind_logits, token, rows, 0, LOGITS, 1, N, BLOCK_N) * first + constant)
        store_gates(new_collapse, gate + gate_eps, token, rows, 0, N, 1, N, BLOCK_N)
        if KIND != GATES:
            logit = load_gates(kind_logits, token, rows, N, LOGITS, 1, N, BLOCK_N)
            constant = load_constants(base + N, N, BLOCK_N)
            gate = magnitude * sigmoid(logit * tl.load(scale + 1).to(tl.float32) + constant)
            if KIND == INDEPENDENT:
                gate += gate_eps
            store_gates(new_inject, gate, token, rows, 0, N, 1, N, BLOCK_N)
        if KIND == MANIFOLD:
            logit = load_matrix(kind_logits, token, rows, 2 * N, LOGITS, N, 1, N, BLOCK_N)
            constants = load_constant_matrix(base + 2 * N, N, BLOCK_N)
            matrix = sinkhorn(logit * tl.load(scale + 2).to(tl.float32) + constants, gate_eps, iterations, N, BLOCK_N)
            store_matrix(new_mix, matrix, token, rows, 0, N * N, N, 1, N, BLOCK_N)


@triton.jit(do_not_specialize=["rows", "iterations"])
def write_kernel(
    streams, branch, mix, inject, project, scale, base, new, logits, stats, new_collapse, new_mix, new_inject,
    gate_eps, project_eps, magnitude, rows: tl.int64, iterations: tl.int32,
    N: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, MIX_WIDTH: tl.constexpr, INJECT_WIDTH: tl.constexpr,
    LOGITS: tl.constexpr, STATS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute the new streams, the logits and the coefficients of BLOCK_T tokens per program."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    sums = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    PER_STREAM: tl.constexpr = KIND == HYPER
    if KIND != GIVEN and not PER_STREAM:
        products, lost = tl.zeros((BLOCK_T, BLOCK_R), tl.float32), tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for first in range(0, D, BLOCK_D):
        x = load_new_streams(
            streams, branch, mix, inject, token, first, rows, N, D, MIX_WIDTH, INJECT_WIDTH, BLOCK_N, BLOCK_D
        )
        if new is not None:
            at, mask = stream_offsets(token, first, rows, N, D, BLOCK_N, BLOCK_D)
            rounded = round_to(x, new.dtype.element_ty)
            tl.store(new + at, rounded, mask=mask)
            x = rounded.to(tl.float32)
        if PER_STREAM:
            sums += tl.sum(x, 2)
        elif KIND != GIVEN:
            sums += tl.sum(x * x, 2)
            chunk = load_project(project, first, LOGITS, N, D, BLOCK_R, BLOCK_N, BLOCK_D)
            flat = tl.reshape(x, (BLOCK_T, BLOCK_N * BLOCK_D))
            term = tl.dot(flat, tl.trans(chunk), input_precision="ieee")
            products, lost = add_compensated(products, lost, term)
    if PER_STREAM:
        source = streams if new is None else new
        mean = mean_share(sums, D)
        tl.debug_barrier()  # other threads than those that wrote the streams may read them
        left, squares = tl.zeros((BLOCK_T, BLOCK_N), tl.float32), tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        products = tl.zeros((BLOCK_T * BLOCK_N, BLOCK_R), tl.float32)
        lost = tl.zeros((BLOCK_T * BLOCK_N, BLOCK_R), tl.float32)
        rows_of_project = tl.zeros((1, BLOCK_R), tl.float32)
        for first in range(0, D, BLOCK_D):
            at, mask = stream_offsets(token, first, rows, N, D, BLOCK_N, BLOCK_D)
            x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
            x = tl.where(mask, x - mean[:, :, None], 0.0)
            left += tl.sum(x, 2)
            squares += tl.sum(x * x, 2)
            chunk = load_project(project, first, N + 2, 1, D, BLOCK_R, 1, BLOCK_D)
            rows_of_project += tl.sum(chunk, 1)[None, :]
            flat = tl.reshape(x, (BLOCK_T * BLOCK_N, BLOCK_D))
            term = tl.dot(flat, tl.trans(chunk), input_precision="ieee")
            products, lost = add_compensated(products, lost, term)
        left = mean_share(left, D)  # what the rounded mean lacks
        rstd = row_rstd(mean_share(squares, D) - left * left, project_eps, tl.float32)
        store_gates(stats, mean + left, token, rows, 2, STATS, 2, N, BLOCK_N)
        store_gates(stats, rstd, token, rows, 3, STATS, 2, N, BLOCK_N)
        q, r = tl.arange(0, BLOCK_T * BLOCK_N)[:, None], tl.arange(0, BLOCK_R)[None, :]
        owner, stream = tl.program_id(0).to(tl.int64) * BLOCK_T + q // BLOCK_N, q % BLOCK_N
        added = tl.load(base + N * (N + 2) + r, mask=r < N + 2, other=0.0).to(tl.float32)
        products -= tl.reshape(left, (BLOCK_T * BLOCK_N, 1)) * rows_of_project
        products = tl.reshape(rstd, (BLOCK_T * BLOCK_N, 1)) * products + added
        where = (owner < rows) & (stream < N) & (r < N + 2)
        tl.store(logits + owner * LOGITS + stream * (N + 2) + r, products, mask=where)
    elif KIND != GIVEN:
        rstd = row_rstd(mean_share(tl.sum(sums, 1, keep_dims=True), N * D), project_eps, tl.float32)
        tl.store(stats + token[:, None] * STATS + 2, rstd, mask=token[:, None] < rows)
        r = tl.arange(0, BLOCK_R)[None, :]
        tl.store(logits + token[:, None] * LOGITS + r, products * rstd, mask=(token[:, None] < rows) & (r < LOGITS))
    if KIND != GIVEN:
        tl.debug_barrier()  # other threads than those that wrote the logits read them
        store_gates_of(
            logits, scale, base, new_collapse, new_mix, new_inject, gate_eps, magnitude, token, rows, iterations,
            N, KIND, LOGITS, BLOCK_N,
        )  # fmt: skip


@triton.jit
def load_gate(collapse, row, cols, rows, stream, N, D, WIDTH, PER_FEATURE):
    """Load the weight of one stream in the read: `(BLOCK_ROWS, 1)`, or one for each feature, `(BLOCK_ROWS, BLOCK_D)`."""
    if PER_FEATURE:
        return tl.load(collapse + (row * N + stream) * D + cols, mask=(row < rows) & (cols < D), other=0.0).to(
            tl.float32
        )
    else:
        return tl.load(collapse + row * WIDTH + stream, mask=row < rows, other=0.0).to(tl.float32)


@triton.jit
def load_read(streams, collapse, row, cols, rows, N, D, WIDTH, PER_FEATURE):
    """Return c X of a tile, in float32."""
    total = tl.zeros((row.shape[0], cols.shape[1]), tl.float32)
    for j in tl.static_range(N):
        x = tl.load(streams + (row * N + j) * D + cols, mask=(row < rows) & (cols < D), other=0.0).to(tl.float32)
        gate = load_gate(collapse, row, cols, rows, j, N, D, WIDTH, PER_FEATURE)
        total = gate * x if j == 0 else total + gate * x
    return total


@triton.jit(do_not_specialize=["rows"])
def read_kernel(
    streams, collapse, weight, bias, read, stats, eps, rows: tl.int64,
    N: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, COLLAPSE_WIDTH: tl.constexpr, PER_FEATURE: tl.constexpr,
    STATS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute N(c X) and its statistics of BLOCK_ROWS tokens per program."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    x = load_read(streams, collapse, row, cols, rows, N, D, COLLAPSE_WIDTH, PER_FEATURE)
    mean, rstd = tl.zeros((BLOCK_ROWS, 1), tl.float32), tl.zeros((BLOCK_ROWS, 1), tl.float32)
    if NORM != NONE:
        mean, rstd = row_moments(x, eps, cols, D, NORM, tl.float32)
        x = normalize(x, mean, rstd, weight, bias, None, cols, D, None, tl.float32)
    tl.store(read + row * D + cols, round_to(x, read.dtype.element_ty), mask=(row < rows) & (cols < D))
    tl.store(stats + row * STATS, mean, mask=row < rows)
    tl.store(stats + row * STATS + 1, rstd, mask=row < rows)
