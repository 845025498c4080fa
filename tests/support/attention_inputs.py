"""Sizes, inputs, masks and gradients for the tests of attention and its cache."""

import torch

from addnorm.nn import SelfAttention
from support.oracle import relative

f64 = torch.float64
D, HEADS, BATCH, N, M = 12, 3, 2, 5, 7


def make_inputs(attention, n=N, m=M, dtype=f64):
    x = torch.randn(BATCH, n, D, dtype=dtype)
    return (x,) if isinstance(attention, SelfAttention) else (x, torch.randn(BATCH, m, D, dtype=dtype))


def random_mask(*shape):
    """Return a random bool mask that allows every query the first key."""
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    return mask


def compute_gradients(call, attention, tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = call(*leaves)
    torch.manual_seed(3)
    grad_outputs = torch.randn(y.shape, dtype=y.dtype)
    return [y, *torch.autograd.grad(y, [*leaves, *attention.parameters()], grad_outputs)]


def assert_close(actual, expected, limit=1e-12):
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert relative(a, b) < limit, i
