"""Tests of the reference implementation, the specification: numbers by hand, and torch's norms.

Its derivatives are compared with float64 where it computes alone (test_cpu.py), and with the kernels (test_operators.py).
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from addnorm import reference
from support.cases import bf16, f16, f32, f64, random

GENERATOR = torch.Generator().manual_seed(0)
R, B = (random((4, 3, 6), f64, GENERATOR, mean=0.3) for _ in range(2))
WEIGHT, BIAS, VECTOR = (random((6,), f64, GENERATOR, mean=1.0) for _ in range(3))
ROWS = random((4, 3), f64, GENERATOR, mean=1.0)


def test_layer_norm_of_1_2_3_by_hand():
    """The mean is 2 and the variance 2/3 (by d, not by d - 1), so the ends are 1 / sqrt(2/3) = sqrt(1.5) away."""
    z = torch.tensor([[1.0, 2.0, 3.0]], dtype=f64)
    y = reference.normalize(z, None, None, norm="layer", eps=0.0)
    assert_close(y, torch.tensor([[-math.sqrt(1.5), 0.0, math.sqrt(1.5)]], dtype=f64))
    weight, bias = torch.tensor([2.0, 5.0, 10.0], dtype=f64), torch.tensor([1.0, -1.0, 0.0], dtype=f64)
    y = reference.normalize(z, weight, bias, norm="layer", eps=0.0, weight_offset=-1.0)
    assert_close(y, torch.tensor([[1 - math.sqrt(1.5), -1.0, 9 * math.sqrt(1.5)]], dtype=f64))


def test_rms_norm_of_3_4_by_hand():
    """The mean of the squares is 12.5."""
    z = torch.tensor([[3.0, 4.0]], dtype=f64)
    expected = torch.tensor([[3.0, 4.0]], dtype=f64) / math.sqrt(12.5)
    assert_close(reference.normalize(z, None, None, norm="rms", eps=0.0), expected)


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("bias", [None, BIAS])
def test_norms_equal_torchs(weight, bias):
    layer = reference.normalize(R, weight, bias, norm="layer", eps=1e-5)
    assert_close(layer, F.layer_norm(R, (6,), weight, bias, 1e-5))
    rms = reference.normalize(R, weight, bias, norm="rms", eps=1e-6)
    assert_close(rms, F.rms_norm(R, (6,), weight, 1e-6) + (0.0 if bias is None else bias))


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_reference_normalizes_the_rounded_z(dtype):
    residual, branch, weight = R.to(dtype), B.to(dtype), WEIGHT.to(dtype)
    z = reference.add(residual, branch, layer_scale=0.3)
    assert z.equal((residual.float() + 0.3 * branch.float()).to(dtype))
    y = reference.normalize(z, weight, None, norm="layer", eps=1e-5)
    assert y.equal(reference.normalize(z.float(), weight.float(), None, norm="layer", eps=1e-5).to(dtype))
    wide = reference.add(residual, branch, dtype=f32)
    assert wide.dtype == f32
    assert wide.equal(residual.float() + branch.float())
