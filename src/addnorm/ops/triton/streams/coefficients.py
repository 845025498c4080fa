"""Functions that the kernels of n streams share: loads of streams and coefficients, gates, Sinkhorn.

A block has BLOCK_T tokens. A tile of streams is `(BLOCK_T, BLOCK_N, BLOCK_D)`, one of gates `(BLOCK_T, BLOCK_N)`, one of matrices
`(BLOCK_T, BLOCK_N, BLOCK_N)`, with zeros beyond the N streams; BLOCK_N is the next power of two. The arithmetic is in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from addnorm.ops.triton.tiles import divide

GIVEN, MANIFOLD, INDEPENDENT, GATES, HYPER = (tl.constexpr(kind) for kind in range(5))  # GATE_KINDS in streams/kinds.py


@triton.jit
def stream_offsets(token, first, rows, N, D, BLOCK_N, BLOCK_D):
    """Return the offsets of a tile of `(rows, N, D)`, and the mask of its elements."""
    token, stream = token[:, None, None], tl.arange(0, BLOCK_N)[None, :, None]
    cols = first + tl.arange(0, BLOCK_D)[None, None, :]
    return (token * N + stream) * D + cols, (token < rows) & ((stream < N) & (cols < D))


@triton.jit
def load_gates(gates, token, rows, begin, WIDTH, EACH, N, BLOCK_N):
    """Return `(BLOCK_T, BLOCK_N)` numbers at `token * WIDTH + begin + stream * EACH`."""
    stream = tl.arange(0, BLOCK_N)[None, :]
    at = token[:, None] * WIDTH + begin + stream * EACH
    return tl.load(gates + at, mask=(token[:, None] < rows) & (stream < N), other=0.0).to(tl.float32)


@triton.jit
def store_gates(gates, value, token, rows, begin, WIDTH, EACH, N, BLOCK_N):
    """Store `value`, a number for each token and stream, where `load_gates` loads from."""
    stream = tl.arange(0, BLOCK_N)[None, :]
    tl.store(gates + token[:, None] * WIDTH + begin + stream * EACH, value, mask=(token[:, None] < rows) & (stream < N))


@triton.jit
def load_constants(base, N, BLOCK_N):
    """Return the numbers that all tokens share, one for each stream, `(1, BLOCK_N)`."""
    stream = tl.arange(0, BLOCK_N)[None, :]
    return tl.load(base + stream, mask=stream < N, other=0.0).to(tl.float32)


@triton.jit
def load_constant_matrix(base, N, BLOCK_N):
    """Return a matrix that all tokens share, `(1, BLOCK_N, BLOCK_N)`."""
    row, column = tl.arange(0, BLOCK_N)[None, :, None], tl.arange(0, BLOCK_N)[None, None, :]
    return tl.load(base + (row * N + column), mask=(row < N) & (column < N), other=0.0).to(tl.float32)


@triton.jit
def matrix_offsets(token, rows, begin, WIDTH, ROW, COLUMN, N, BLOCK_N):
    """Return the offsets `token * WIDTH + begin + k * ROW + j * COLUMN` of matrices, and the mask of their elements."""
    token = token[:, None, None]
    row, column = tl.arange(0, BLOCK_N)[None, :, None], tl.arange(0, BLOCK_N)[None, None, :]
    return token * WIDTH + begin + row * ROW + column * COLUMN, (token < rows) & ((row < N) & (column < N))


@triton.jit
def load_matrix(matrix, token, rows, begin, WIDTH, ROW, COLUMN, N, BLOCK_N):
    """Return a matrix for each token, `(BLOCK_T, BLOCK_N, BLOCK_N)`, from the offsets of `matrix_offsets`."""
    at, mask = matrix_offsets(token, rows, begin, WIDTH, ROW, COLUMN, N, BLOCK_N)
    return tl.load(matrix + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_matrix(matrix, value, token, rows, begin, WIDTH, ROW, COLUMN, N, BLOCK_N):
    """Store `value`, a matrix for each token, where `load_matrix` loads from."""
    at, mask = matrix_offsets(token, rows, begin, WIDTH, ROW, COLUMN, N, BLOCK_N)
    tl.store(matrix + at, value, mask=mask)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x))."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent: a series near zero, where the quotient of exponentials cancels."""
    small = tl.minimum(tl.abs(x), 0.25)
    square = small * small
    series = square * (-1382.0 / 155925.0) + 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    series = small + small * square * series
    power = tl.exp(-2.0 * tl.abs(x))
    value = tl.where(tl.abs(x) < 0.25, series, tl.div_rn(1.0 - power, 1.0 + power))
    return tl.where(x < 0.0, -value, value)


@triton.jit
def normalize_columns(logits, N, BLOCK_N):
    """Return exp(logits) divided by the sums of its columns."""
    row, column = tl.arange(0, BLOCK_N)[None, :, None], tl.arange(0, BLOCK_N)[None, None, :]
    logits = tl.where(row < N, logits, float("-inf"))
    power = tl.exp(logits - tl.max(logits, 1, keep_dims=True))
    share = tl.div_rn(power, tl.broadcast_to(tl.sum(power, 1, keep_dims=True), power.shape))
    return tl.where((row < N) & (column < N), share, 0.0)


@triton.jit
def normalize_matrix(matrix, eps, AXIS, N, BLOCK_N):
    """Return a matrix divided by its sums along AXIS, to which eps is added, and these sums."""
    total = tl.sum(matrix, AXIS, keep_dims=True) + eps
    if AXIS == 2:
        total = tl.where(tl.arange(0, BLOCK_N)[None, :, None] < N, total, 1.0)
    else:
        total = tl.where(tl.arange(0, BLOCK_N)[None, None, :] < N, total, 1.0)
    return tl.div_rn(matrix, tl.broadcast_to(total, matrix.shape)), total


@triton.jit
def add_eps(share, eps, N, BLOCK_N):
    """Return the matrix plus eps, with zeros beyond the streams."""
    row, column = tl.arange(0, BLOCK_N)[None, :, None], tl.arange(0, BLOCK_N)[None, None, :]
    return tl.where((row < N) & (column < N), share + eps, 0.0)


@triton.jit
def sinkhorn(logits, eps, iterations, N, BLOCK_N):
    """Return exp(logits) with columns and rows divided by their sums in turn, rows last."""
    matrix = add_eps(normalize_columns(logits, N, BLOCK_N), eps, N, BLOCK_N)
    matrix, _ = normalize_matrix(matrix, eps, 2, N, BLOCK_N)
    for _ in range(1, iterations):
        matrix, _ = normalize_matrix(matrix, eps, 1, N, BLOCK_N)
        matrix, _ = normalize_matrix(matrix, eps, 2, N, BLOCK_N)
    return matrix


@triton.jit
def mean_share(total, COUNT):
    """Return total / COUNT, correctly rounded."""
    return divide(total, tl.full(total.shape, COUNT, tl.float32), tl.float32)
