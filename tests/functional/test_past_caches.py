"""Tests of results that are written past the caches: those of tensors that exceed them, in memory that has its pages."""

from pathlib import Path

import pytest
import torch

import addnorm
from support.cases import bf16, f16, f32

SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
CACHE = int(SIZE.read_text().removesuffix("K\n")) * 1024 if SIZE.exists() else 32 * 2**20
MOST = 128 * 2**20

pytestmark = pytest.mark.skipif(CACHE > MOST, reason="the last-level cache is too large for a small test")


def rows_of(d, dtype):
    """Return a number of rows, an odd one, of which three tensors exceed the cache."""
    return CACHE // (3 * d * dtype.itemsize) + 2 | 1


def pages(rows, d, dtype, offset=0):
    """Return a tensor whose memory has been written; `offset` elements after a cache line."""
    return torch.full((rows * d + offset,), 7.0, dtype=dtype)[offset:].view(rows, d)


@pytest.mark.parametrize("norm", [addnorm.add_layer_norm, addnorm.add_rms_norm])
@pytest.mark.parametrize(
    ("d", "dtype", "offset"),
    [
        (768, f32, 0),
        (2080, f32, 0),
        (2048, bf16, 0),
        (1056, bf16, 0),
        (1056, f16, 0),
        (48, f32, 0),
        (768, f32, 4),
        (770, bf16, 0),
    ],
)
def test_large_results_have_the_bits_of_a_part(norm, d, dtype, offset, threads):
    """Rows of whole cache lines go past the caches; rows with an offset or of an odd width do not."""
    rows = rows_of(d, dtype)
    residual = torch.randn(257, d).mul_(torch.linspace(0.1, 3, d)).to(dtype)
    branch = torch.randn(257, d).to(dtype)
    weight, bias = torch.rand(d) + 0.5, torch.randn(d)
    parameters = (weight, bias if norm is addnorm.add_layer_norm else None)
    place = torch.arange(rows) % 257
    expected = norm(residual, branch, *parameters, return_residual=True)
    y, z = pages(rows, d, dtype, offset), pages(rows, d, dtype, offset)
    inputs = residual[place], branch[place]
    for count in (1, 2):
        threads(count)
        norm(*inputs, *parameters, out=(y, z), return_residual=True)
        assert y.equal(expected[0][place])
        assert z.equal(expected[1][place])
        y.zero_()
        norm(*inputs, *parameters, out=y)
        assert y.equal(expected[0][place])


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_large_gradients_have_the_bits_of_a_part(dtype):
    d = 768
    rows = rows_of(d, dtype)
    residual, branch, dy, dz = (torch.randn(257, d).to(dtype) for _ in range(4))
    weight = torch.rand(d) + 0.5
    place = torch.arange(rows) % 257
    forward, backward = torch.ops.addnorm.add_norm_forward.kernel, torch.ops.addnorm.add_norm_backward
    _, z, stats = forward(residual, branch, weight, None, 1e-5, 0)
    dtypes = (dtype, dtype, f32, 5)  # the gradients of residual and weight
    expected = backward(dy, dz, z, stats, weight, 0, *dtypes)[0]
    inputs = [t[place] for t in (dy, dz, z, stats)]
    for _ in range(3):  # a later result may have the memory of an earlier one, which has its pages
        dx, _, dweight, *_ = backward(*inputs, weight, 0, *dtypes)
        assert dx.equal(expected[place])
    x_hat = (z[place].double() - stats[place][:, :1]) * stats[place][:, 1:]
    exact = (dy[place].double() * x_hat).sum(0)
    torch.testing.assert_close(dweight.double(), exact, rtol=1e-4, atol=2e-3)
