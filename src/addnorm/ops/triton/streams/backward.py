"""The backward kernels of n streams. X' is in memory: `write_kernel` has computed it again.

    read_backward_kernel      the norm of the read: du, the gradient of c X', that of c, and sums for weight and bias
    gates_backward_kernel     from the gradients of c', b' and A': those of the gates' arguments α z + β, and factors of φ
    write_backward_kernel     the gradient of X' in chunks of features, and from it those of X, w, A and b
    project_backward_kernel   the gradient of φ

The sums over tokens are written for fixed chunks of tokens, whose number depends only on the shape, and are added in a fixed
order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from addnorm.ops.triton.norms import NONE, is_centred, slope
from addnorm.ops.triton.streams.coefficients import (
    GATES,
    GIVEN,
    HYPER,
    MANIFOLD,
    add_eps,
    load_constant_matrix,
    load_constants,
    load_gates,
    load_matrix,
    mean_share,
    normalize_columns,
    normalize_matrix,
    sigmoid,
    store_gates,
    store_matrix,
    stream_offsets,
    tanh,
)
from addnorm.ops.triton.streams.forward import load_project, load_read
from addnorm.ops.triton.tiles import load_weight, round_to, row_mean, zero_beyond


@triton.jit(do_not_specialize=["rows", "chunk"])
def read_backward_kernel(
    dread, streams, collapse, stats, weight, du, dcollapse, partials, rows: tl.int64, chunk: tl.int32,
    N: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, COLLAPSE_WIDTH: tl.constexpr, PER_FEATURE: tl.constexpr,
    STATS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the gradients of c X' and c for `chunk` tokens per program, BLOCK_ROWS at a time.

    `du` is the gradient of c X'. `partials` receives the sums for weight and bias, `(programs, 2, D)`.
    """
    cols = tl.arange(0, BLOCK_D)[None, :]
    gamma = load_weight(weight, None, cols, D, tl.float32)
    weight_sum = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    bias_sum = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    begin = tl.program_id(0).to(tl.int64) * chunk
    for done in range(0, chunk, BLOCK_ROWS):
        row = begin + done + tl.arange(0, BLOCK_ROWS)[:, None]
        mask = (row < rows) & (cols < D)
        grad = tl.load(dread + row * D + cols, mask=mask, other=0.0).to(tl.float32)
        if NORM != NONE:
            mean = tl.load(stats + row * STATS, mask=row < rows, other=0.0)
            rstd = tl.load(stats + row * STATS + 1, mask=row < rows, other=0.0)
            x = load_read(streams, collapse, row, cols, rows, N, D, COLLAPSE_WIDTH, PER_FEATURE)
            x_hat = zero_beyond((x - mean) * rstd, cols, D)
            weight_sum += grad * x_hat
            bias_sum += grad
            g = grad * gamma
            total = g - slope(x_hat, NORM) * row_mean(g * x_hat, D, tl.float32)
            if is_centred(NORM):
                total -= row_mean(g, D, tl.float32)
            grad = zero_beyond(total * rstd, cols, D)
        tl.store(du + row * D + cols, grad, mask=mask)
        if dcollapse is not None:
            for j in tl.static_range(N):
                x = tl.load(streams + (row * N + j) * D + cols, mask=mask, other=0.0).to(tl.float32)
                if PER_FEATURE:
                    tl.store(dcollapse + (row * N + j) * D + cols, x * grad, mask=mask)
                else:
                    tl.store(dcollapse + row * N + j, tl.sum(x * grad, 1, keep_dims=True), mask=row < rows)
    if partials is not None:
        sums = partials + tl.program_id(0).to(tl.int64) * 2 * D
        tl.store(sums + cols, tl.sum(weight_sum, 0, keep_dims=True), mask=cols < D)
        tl.store(sums + D + cols, tl.sum(bias_sum, 0, keep_dims=True), mask=cols < D)


@triton.jit
def load_gate_gradient(first, second, token, rows, N, BLOCK_N):
    """Return the sum of two gradients of gates; None is zero."""
    grad = tl.zeros((token.shape[0], BLOCK_N), tl.float32)
    if first is not None:
        grad += load_gates(first, token, rows, 0, N, 1, N, BLOCK_N)
    if second is not None:
        grad += load_gates(second, token, rows, 0, N, 1, N, BLOCK_N)
    return grad


@triton.jit
def hyper_gate_backward(
    grad, logits, base, scale, project_sum, rstd, dpre, factors, token, rows, PLACE, LOGITS, N, BLOCK_N
):
    """Write `dpre` and `factors` of the gates β + α tanh(z) in a kernel of KIND HYPER; return their terms of `offsets`."""
    store_gates(dpre, grad, token, rows, PLACE * N, LOGITS, 1, N, BLOCK_N)
    logit = load_gates(logits, token, rows, PLACE, LOGITS, N + 2, N, BLOCK_N)
    gate = tanh(logit)
    grad = grad * tl.load(scale + PLACE).to(tl.float32) * (1.0 - gate * gate)
    store_gates(factors, grad * rstd, token, rows, PLACE, LOGITS, N + 2, N, BLOCK_N)
    added = tl.load(base + N * (N + 2) + PLACE).to(tl.float32)
    return grad * (logit - added), grad * tl.load(project_sum + PLACE)


@triton.jit
def sigmoid_gate_backward(grad, logits, base, scale, rstd, dpre, factors, token, rows, PLACE, LOGITS, N, BLOCK_N):
    """Write `dpre` and `factors` of the gates σ(α z + β); return their term of `offsets[0]`."""
    slope = tl.load(scale + PLACE).to(tl.float32)
    logit = load_gates(logits, token, rows, PLACE * N, LOGITS, 1, N, BLOCK_N)
    gate = sigmoid(logit * slope + load_constants(base + PLACE * N, N, BLOCK_N))
    grad = grad * gate * (1.0 - gate)
    store_gates(dpre, grad, token, rows, PLACE * N, LOGITS, 1, N, BLOCK_N)
    grad = grad * slope
    store_gates(factors, grad * rstd, token, rows, PLACE * N, LOGITS, 1, N, BLOCK_N)
    return tl.sum(grad * logit, 1, keep_dims=True)


@triton.jit
def division_backward(grad, iterates, step, token, rows, eps, AXIS, N, BLOCK_N):
    """Return the gradient of the matrix `iterates[step]` from `grad`, that of the matrix over its sums along AXIS."""
    before = load_matrix(iterates, token, rows, step * rows * N * N, N * N, N, 1, N, BLOCK_N)
    matrix, total = normalize_matrix(before, eps, AXIS, N, BLOCK_N)
    return tl.div_rn(grad - tl.sum(grad * matrix, AXIS, keep_dims=True), tl.broadcast_to(total, grad.shape))


@triton.jit
def sinkhorn_backward(logits, grad, iterates, token, rows, eps, iterations, N, BLOCK_N):
    """Return the gradient of Sinkhorn's logits from that of its result; `iterates` is memory for the matrix before each step."""
    share = normalize_columns(logits, N, BLOCK_N)
    matrix = add_eps(share, eps, N, BLOCK_N)
    store_matrix(iterates, matrix, token, rows, 0, N * N, N, 1, N, BLOCK_N)
    for i in range(1, iterations):
        matrix, _ = normalize_matrix(matrix, eps, 2, N, BLOCK_N)
        store_matrix(iterates, matrix, token, rows, (2 * i - 1) * rows * N * N, N * N, N, 1, N, BLOCK_N)
        matrix, _ = normalize_matrix(matrix, eps, 1, N, BLOCK_N)
        store_matrix(iterates, matrix, token, rows, 2 * i * rows * N * N, N * N, N, 1, N, BLOCK_N)
    tl.debug_barrier()  # another layout may read what was written
    for done in range(1, iterations):
        i = iterations - done
        grad = division_backward(grad, iterates, 2 * i, token, rows, eps, 2, N, BLOCK_N)
        grad = division_backward(grad, iterates, 2 * i - 1, token, rows, eps, 1, N, BLOCK_N)
    grad = division_backward(grad, iterates, 0, token, rows, eps, 2, N, BLOCK_N)
    return share * (grad - tl.sum(grad * share, 1, keep_dims=True))


@triton.jit(do_not_specialize=["rows", "iterations"])
def gates_backward_kernel(
    dread_collapse, dcollapse, dmix, dinject, logits, stats, scale, base, project_sums, iterates, dpre, factors, offsets,
    gate_eps, magnitude, rows: tl.int64, iterations: tl.int32,
    N: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, LOGITS: tl.constexpr, STATS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write `dpre`, `factors` and `offsets`: φ adds factors φ - offsets[0] (x - mean) - offsets[1] to the gradient of X'.

    `dpre` are the gradients of α z + β, in hyper of β + α tanh(z), for the logits z. `factors` are the gradients of the
    logits divided by the rms, in hyper by the standard deviation of their stream. `offsets` is `(rows, N, 2)`.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    grad = load_gate_gradient(dread_collapse, dcollapse, token, rows, N, BLOCK_N)
    if KIND == HYPER:
        rstd = load_gates(stats, token, rows, 3, STATS, 2, N, BLOCK_N)
        dot, mean = hyper_gate_backward(
            grad, logits, base, scale, project_sums, rstd, dpre, factors, token, rows, 0, LOGITS, N, BLOCK_N
        )
        grad = load_gate_gradient(dinject, None, token, rows, N, BLOCK_N)
        more_dot, more_mean = hyper_gate_backward(
            grad, logits, base, scale, project_sums, rstd, dpre, factors, token, rows, 1, LOGITS, N, BLOCK_N
        )
        dot += more_dot
        mean += more_mean
        square = tl.zeros((BLOCK_T, BLOCK_N, BLOCK_N), tl.float32)
        if dmix is not None:
            square = load_matrix(dmix, token, rows, 0, N * N, N, 1, N, BLOCK_N)
        store_matrix(dpre, square, token, rows, 2 * N, LOGITS, N, 1, N, BLOCK_N)
        logit = load_matrix(logits, token, rows, 2, LOGITS, 1, N + 2, N, BLOCK_N)
        gate = tanh(logit)
        square = square * tl.load(scale).to(tl.float32) * (1.0 - gate * gate)
        row_of = tl.arange(0, BLOCK_N)[None, :, None]
        constants = tl.load(base + N * (N + 2) + 2 + row_of, mask=row_of < N, other=0.0).to(tl.float32)
        dot += tl.sum(square * (logit - constants), 1)
        mean += tl.sum(square * tl.load(project_sums + 2 + row_of, mask=row_of < N, other=0.0), 1)
        store_matrix(factors, square * rstd[:, None, :], token, rows, 2, LOGITS, 1, N + 2, N, BLOCK_N)
        store_gates(offsets, rstd * rstd * mean_share(dot, D), token, rows, 0, 2 * N, 2, N, BLOCK_N)
        store_gates(offsets, rstd * mean_share(mean, D), token, rows, 1, 2 * N, 2, N, BLOCK_N)
    else:
        rstd = tl.load(stats + token[:, None] * STATS + 2, mask=token[:, None] < rows, other=0.0)
        dot = sigmoid_gate_backward(grad, logits, base, scale, rstd, dpre, factors, token, rows, 0, LOGITS, N, BLOCK_N)
        if KIND != GATES:
            grad = load_gate_gradient(dinject, None, token, rows, N, BLOCK_N) * magnitude
            dot += sigmoid_gate_backward(
                grad, logits, base, scale, rstd, dpre, factors, token, rows, 1, LOGITS, N, BLOCK_N
            )
        if KIND == MANIFOLD:
            square = tl.zeros((BLOCK_T, BLOCK_N, BLOCK_N), tl.float32)
            third = tl.load(scale + 2).to(tl.float32)
            logit = load_matrix(logits, token, rows, 2 * N, LOGITS, N, 1, N, BLOCK_N)
            if dmix is not None:
                square = load_matrix(dmix, token, rows, 0, N * N, N, 1, N, BLOCK_N)
                pre = logit * third + load_constant_matrix(base + 2 * N, N, BLOCK_N)
                square = sinkhorn_backward(pre, square, iterates, token, rows, gate_eps, iterations, N, BLOCK_N)
            store_matrix(dpre, square, token, rows, 2 * N, LOGITS, N, 1, N, BLOCK_N)
            square = square * third
            dot += tl.sum(tl.sum(square * logit, 2), 1, keep_dims=True)
            store_matrix(factors, square * rstd[:, :, None], token, rows, 2 * N, LOGITS, N, 1, N, BLOCK_N)
        share = rstd * rstd * mean_share(dot, N * D)
        store_gates(offsets, tl.broadcast_to(share, (BLOCK_T, BLOCK_N)), token, rows, 0, 2 * N, 2, N, BLOCK_N)
        store_gates(offsets, tl.zeros((BLOCK_T, BLOCK_N), tl.float32), token, rows, 1, 2 * N, 2, N, BLOCK_N)


@triton.jit
def load_factors(
    factors, block, rows, N, KIND, LOGITS, BLOCK_T, BLOCK_N,
    BLOCK_R,
):  # fmt: skip
    """Return the factors of a block, `(BLOCK_T, BLOCK_R)`, in hyper `(BLOCK_T * BLOCK_N, BLOCK_R)`."""
    r = tl.arange(0, BLOCK_R)[None, :]
    if KIND == HYPER:
        q = tl.arange(0, BLOCK_T * BLOCK_N)[:, None]
        token, stream = block + q // BLOCK_N, q % BLOCK_N
        mask = (token < rows) & (stream < N) & (r < N + 2)
        return tl.load(factors + token * LOGITS + stream * (N + 2) + r, mask=mask, other=0.0)
    else:
        token = block + tl.arange(0, BLOCK_T)[:, None]
        return tl.load(factors + token * LOGITS + r, mask=(token < rows) & (r < LOGITS), other=0.0)


@triton.jit(do_not_specialize=["rows"])
def write_backward_kernel(
    dnew, du, collapse, new, streams, branch, mix, inject, project, stats, factors, offsets, dstreams, dbranch, dmix, dinject,
    rows: tl.int64,
    N: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, MIX_WIDTH: tl.constexpr, INJECT_WIDTH: tl.constexpr,
    COLLAPSE_WIDTH: tl.constexpr, PER_FEATURE: tl.constexpr, LOGITS: tl.constexpr, STATS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write the gradients of X, w, A and b for BLOCK_T tokens per program; A and b have a gradient for each token."""
    block = tl.program_id(0).to(tl.int64) * BLOCK_T
    token = block + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_N)[None, None, :]
    if dmix is not None:
        mix_sum = tl.zeros((BLOCK_T, BLOCK_N, BLOCK_N), tl.float32)
    if dinject is not None:
        inject_sum = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    if KIND != GIVEN:
        factor = load_factors(factors, block, rows, N, KIND, LOGITS, BLOCK_T, BLOCK_N, BLOCK_R)
        slope = load_gates(offsets, token, rows, 0, 2 * N, 2, N, BLOCK_N)
        offset = load_gates(offsets, token, rows, 1, 2 * N, 2, N, BLOCK_N)
        mean = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        if KIND == HYPER:
            mean = load_gates(stats, token, rows, 2, STATS, 2, N, BLOCK_N)
    for first in range(0, D, BLOCK_D):
        at, mask = stream_offsets(token, first, rows, N, D, BLOCK_N, BLOCK_D)
        cols = first + tl.arange(0, BLOCK_D)[None, :]
        row_mask = (token[:, None] < rows) & (cols < D)
        grad = tl.zeros((BLOCK_T, BLOCK_N, BLOCK_D), tl.float32)
        if dnew is not None:
            grad += tl.load(dnew + at, mask=mask, other=0.0).to(tl.float32)
        if du is not None:
            read = tl.load(du + token[:, None] * D + cols, mask=row_mask, other=0.0)
            if PER_FEATURE:
                gate = tl.load(collapse + at, mask=mask, other=0.0).to(tl.float32)
            else:
                gate = load_gates(collapse, token, rows, 0, COLLAPSE_WIDTH, 1, N, BLOCK_N)[:, :, None]
            grad += gate * read[:, None, :]
        if KIND != GIVEN:
            if KIND == HYPER:
                chunk = load_project(project, first, N + 2, 1, D, BLOCK_R, 1, BLOCK_D)
            else:
                chunk = load_project(project, first, LOGITS, N, D, BLOCK_R, BLOCK_N, BLOCK_D)
            back = tl.dot(factor, chunk, input_precision="ieee")
            x = tl.load(new + at, mask=mask, other=0.0).to(tl.float32)
            grad += tl.reshape(back, (BLOCK_T, BLOCK_N, BLOCK_D))
            grad -= offset[:, :, None] + slope[:, :, None] * (x - mean[:, :, None])
            grad = tl.where(mask, grad, 0.0)
        if branch is not None:
            if dbranch is not None:
                gain = load_gates(inject, token, rows, 0, INJECT_WIDTH, 1, N, BLOCK_N)
                total = tl.sum(grad * gain[:, :, None], 1)
                tl.store(dbranch + token[:, None] * D + cols, round_to(total, dbranch.dtype.element_ty), mask=row_mask)
            if dinject is not None:
                write = tl.load(branch + token[:, None] * D + cols, mask=row_mask, other=0.0).to(tl.float32)
                inject_sum += tl.sum(grad * write[:, None, :], 2)
        if mix is None:
            if dstreams is not None:
                tl.store(dstreams + at, round_to(grad, dstreams.dtype.element_ty), mask=mask)
        else:
            for j in tl.static_range(N):
                one = (token[:, None] * N + j) * D + cols
                if dmix is not None:
                    x = tl.load(streams + one, mask=row_mask, other=0.0).to(tl.float32)
                    mix_sum += tl.where(column == j, tl.sum(grad * x[:, None, :], 2)[:, :, None], 0.0)
                if dstreams is not None:
                    weights = load_gates(mix, token, rows, j, MIX_WIDTH, N, N, BLOCK_N)
                    total = tl.sum(grad * weights[:, :, None], 1)
                    tl.store(dstreams + one, round_to(total, dstreams.dtype.element_ty), mask=row_mask)
    if dmix is not None:
        store_matrix(dmix, mix_sum, token, rows, 0, N * N, N, 1, N, BLOCK_N)
    if dinject is not None:
        store_gates(dinject, inject_sum, token, rows, 0, N, 1, N, BLOCK_N)


@triton.jit(do_not_specialize=["rows", "chunk"])
def project_backward_kernel(
    new, stats, factors, partials, rows: tl.int64, chunk: tl.int32,
    N: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, LOGITS: tl.constexpr, STATS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a chunk of φ from `chunk` tokens; `partials` is `(programs, *φ.shape)`."""
    first = tl.program_id(1) * BLOCK_D
    STREAMS: tl.constexpr = 1 if KIND == HYPER else BLOCK_N
    total = tl.zeros((BLOCK_R, STREAMS * BLOCK_D), tl.float32)
    begin = tl.program_id(0).to(tl.int64) * chunk
    for done in range(0, chunk, BLOCK_T):
        block = begin + done
        token = block + tl.arange(0, BLOCK_T)
        at, mask = stream_offsets(token, first, rows, N, D, BLOCK_N, BLOCK_D)
        x = tl.load(new + at, mask=mask, other=0.0).to(tl.float32)
        if KIND == HYPER:
            mean = load_gates(stats, token, rows, 2, STATS, 2, N, BLOCK_N)
            x = tl.reshape(tl.where(mask, x - mean[:, :, None], 0.0), (BLOCK_T * BLOCK_N, BLOCK_D))
        else:
            x = tl.reshape(x, (BLOCK_T, BLOCK_N * BLOCK_D))
        factor = load_factors(factors, block, rows, N, KIND, LOGITS, BLOCK_T, BLOCK_N, BLOCK_R)
        total += tl.dot(tl.trans(factor), x, input_precision="ieee")
    r, q = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, STREAMS * BLOCK_D)[None, :]
    stream, cols = q // BLOCK_D, first + q % BLOCK_D
    COUNT: tl.constexpr = N + 2 if KIND == HYPER else LOGITS
    WIDTH: tl.constexpr = 1 if KIND == HYPER else N
    where = (r < COUNT) & (stream < WIDTH) & (cols < D)
    tl.store(partials + ((tl.program_id(0).to(tl.int64) * COUNT + r) * WIDTH + stream) * D + cols, total, mask=where)
