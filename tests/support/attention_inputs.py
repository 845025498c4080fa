"""Sizes, inputs and masks for the tests of attention and its cache."""

import torch

from addnorm.nn import SelfAttention

f64 = torch.float64
D, HEADS, BATCH, N, M = 12, 3, 2, 5, 7


def make_inputs(attention, dtype=f64):
    x = torch.randn(BATCH, N, D, dtype=dtype)
    return (x,) if isinstance(attention, SelfAttention) else (x, torch.randn(BATCH, M, D, dtype=dtype))


def random_mask(*shape):
    """Return a random bool mask that allows every query the first key."""
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    return mask
