"""Tests of rows whose few large or many equal elements round in one direction, against float64 and the documented bound."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import addnorm
from support.cases import bf16, f16, f32, f64
from support.marks import needs_kernels
from support.oracle import UNIT

NORMS = {"LayerNorm": (addnorm.layer_norm, F.layer_norm), "RMSNorm": (addnorm.rms_norm, F.rms_norm)}


def adversarial_rows(d, dtype):
    """Return rows of d elements: spikes on a constant or on noise, steps, few different values, a large offset."""
    generator = torch.Generator().manual_seed(d)
    rows = []
    for at in sorted({0, min(5, d - 1), d // 2, max(d - 2, 0), d - 1}):
        for size in (1e4 if dtype == f16 else 1e7) / 10 ** torch.arange(4, dtype=f64):
            noise = torch.randn(d, generator=generator, dtype=f64)
            for base in (torch.ones(d, dtype=f64), noise[0].expand(d), noise):
                spike, pair = base.clone(), base.clone()
                spike[at] += size
                pair[at] += size
                pair[(at + d // 2) % d] -= size
                rows += [spike, pair]
    first, second = torch.arange(d) < d // 2, torch.arange(d) % 2 == 0
    for size in (1e4, 0.1, 3.3):
        for where in (first, second):
            rows.append(torch.where(where, size, -size * (1 + 1e-3)))
            rows.append(torch.where(where, size, size / 3))
    rows += [noise + 1e3, noise[0].expand(d), noise**7]
    return torch.stack([row.to(f64) for row in rows]).to(dtype)


def exact(z, norm, eps):
    """Return y, computed in extended precision where numpy has it, and the magnitude of its terms."""
    x = z.to(f64).numpy().astype(np.longdouble)
    centred, terms = x, abs(x)
    if norm == "LayerNorm":
        centred = x - x.mean(-1, keepdims=True)
        terms = abs(x) + abs(x).mean(-1, keepdims=True)
    std = np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return torch.from_numpy((centred / std).astype(np.float64)), torch.from_numpy((terms / std).astype(np.float64))


@needs_kernels
@pytest.mark.parametrize("d", [1, 2, 17, 64, 1025, 4096])
@pytest.mark.parametrize("dtype", [f32, bf16, f16, f64])
@pytest.mark.parametrize("norm", NORMS)
def test_each_adversarial_row_keeps_the_bound(norm, dtype, d):
    ours, theirs = NORMS[norm]
    z, eps = adversarial_rows(d, dtype), 1e-30
    y, plain = ours(z, eps=eps).to(f64), theirs(z, (d,), eps=eps).to(f64)
    expected, terms = exact(z, norm, eps)
    best = expected.to(dtype).to(f64) - expected
    unit = 4 * UNIT[f64] if dtype == f64 else UNIT[f32]
    # One element may be the whole row, so that nothing averages its roundings: of the difference, of rstd and of their product.
    for size, factor, units in ((lambda t: t.square().mean(-1).sqrt(), 1.02, 3), (lambda t: t.abs().amax(-1), 2, 6)):
        error = size(y - expected)
        bound = factor * torch.maximum(size(plain - expected), size(best)) + units * unit * size(terms)
        assert (error <= bound).all(), (error / bound).max()


@needs_kernels
def test_spike_in_the_first_elements_keeps_the_statistics():
    """The exact result is representable, so that one rounding of the statistics shows."""
    z = torch.ones(4, 1025)
    z[:, 0] += 1e7
    y = addnorm.layer_norm(z, eps=0.0)
    assert y[:, 0].tolist() == [32.0] * 4
    assert (y[:, 1:] == -1 / 32).all()
