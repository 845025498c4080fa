"""Tests of more than 2^31 elements, where 32-bit offsets would overflow: the last rows have the same bits as alone.

The dtype is bfloat16, at 4.3 GB a tensor; residual and branch are one tensor. Each test needs 13 GB at most, and checks that this
memory is available.
"""

from pathlib import Path

import pytest
import torch

import addnorm
from support.cases import bf16, f32, f64
from support.marks import needs_kernels
from support.memory import GB, lines, need
from support.oracle import UNIT, relative

D = 1024
ROWS = 2**31 // D + 5
# Rows at the beginning, around element 2^31, and at the end.
PLACES = [slice(0, 7), slice(2**31 // D - 4, 2**31 // D + 2), slice(ROWS - 3, ROWS)]

pytestmark = [pytest.mark.slow, needs_kernels]


def peak(path):
    """Return the largest growth of the process's memory during `path`, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = lines("/proc/self/status")["VmRSS"]
    path()
    return lines("/proc/self/status")["VmHWM"] - before


def rows(count, d=D):
    """Return rows that repeat with a period that divides no power of two."""
    block = torch.randn(1009, d).to(bf16)
    x = torch.empty(count, d, dtype=bf16)
    for first in range(0, count, 1009):
        x[first : first + 1009] = block[: count - first]
    return x


def test_rows_beyond_2_to_the_31_elements_are_exact():
    need(3 * 2 * D * ROWS)
    x, weight, bias = rows(ROWS), torch.randn(D), torch.randn(D)
    y, z = addnorm.add_layer_norm(x, x, weight, bias, return_residual=True)
    for place in PLACES:
        alone = addnorm.add_layer_norm(x[place], x[place], weight, bias, return_residual=True)
        assert y[place].equal(alone[0])
        assert z[place].equal(alone[1])
    assert not y[-3:].equal(y[:3])  # distinguishable rows


def test_backward_beyond_2_to_the_31_elements():
    """Call the operator itself, since a graph would keep one tensor more. The stream is the gradient of y."""
    need(2 * 2 * D * ROWS + GB)
    z, weight = rows(ROWS), torch.randn(D)
    forward = torch.ops.addnorm.add_norm_forward.default
    backward = torch.ops.addnorm.add_norm_backward.default

    def gradients(part):
        # Statistics of the same rows, in pieces, to save a third tensor.
        stats = torch.cat([forward(piece, None, weight, None, 1e-5, 0)[2] for piece in part.split(2**17)])
        return backward(part, None, part, stats, weight, 0, bf16, bf16, f32, 1 + 4 + 8)

    dresidual, _, dweight, dbias, *_ = gradients(z)
    for place in PLACES:
        assert dresidual[place].equal(gradients(z[place])[0])
    del dresidual
    # Compare sums over two million rows with those of smaller parts.
    parts = [gradients(part) for part in z.split(2**19)]
    for full, index in ((dweight, 2), (dbias, 3)):
        expected = torch.stack([part[index].to(f64) for part in parts]).sum(0)
        assert relative(full, expected) < 1e-5


def test_dropout_mask_beyond_2_to_the_31_elements():
    def call(x, offset):
        return addnorm.add_residual(x, x, dropout_p=0.3, seed=torch.tensor(11), offset=offset)

    small = torch.zeros(2**14, D, dtype=bf16)
    if peak(lambda: call(small, 0)) > 3 * 2 * small.numel():
        pytest.skip("dropout is computed in eager torch here, which makes the mask in memory")
    need(2 * 2 * D * ROWS)
    x = rows(ROWS)
    z = call(x, 0)
    for place in PLACES:
        assert z[place].equal(call(x[place], place.start * D // 4))
    assert not z[-3:].equal(call(x[-3:], 0))


def test_row_of_more_than_2_to_the_31_elements():
    d = 2**31 + 24
    need(3 * 2 * d)
    x = rows(d // 8, 8).view(1, d)
    y, z = addnorm.add_layer_norm(x, x, return_residual=True)
    assert z[0, -5:].equal(x[0, -5:] + x[0, -5:])
    sums = torch.zeros(2, dtype=f64)
    for piece in z[0].split(2**26):
        wide = piece.to(f64)
        sums += torch.stack([wide.sum(), wide.square().sum()])
    mean, square = sums / d
    rstd = (square - mean * mean + 1e-5).rsqrt()
    for place in (slice(0, 1000), slice(2**31 - 500, 2**31 + 24)):
        assert relative(y[0, place], (z[0, place].to(f64) - mean) * rstd) < UNIT[bf16]
