"""Sizes, modules with random parameters, inputs and gradients for the tests of Encoder, Decoder and Transformer."""

import torch

from addnorm.nn import Decoder, Encoder, Transformer
from support.oracle import relative
from support.torch_transformers import randomize

f64 = torch.float64
D, HEADS, BATCH, N, M = 16, 4, 3, 5, 7


def get_sizes(kind):
    return (2, 3, D, HEADS) if kind is Transformer else (3, D, HEADS)


def make_inputs(kind):
    x, memory = torch.randn(BATCH, N, D, dtype=f64), torch.randn(BATCH, M, D, dtype=f64)
    return {Encoder: (x,), Decoder: (x, memory), Transformer: (memory, x)}[kind]


def make_module(kind, wiring="pre_ln", **options):
    """Return a module with changed parameters, so that no factor is zero and every norm has an effect."""
    module = kind(*get_sizes(kind), wiring=wiring, dtype=f64, **options)
    if module.wiring.profile is not None:
        module.wiring.init_(module, *make_inputs(kind))
    return randomize(module)


def compute_gradients(call, parameters, tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    torch.manual_seed(5)
    y = call(*leaves)
    torch.manual_seed(5)
    parameters = list(parameters)
    return [y.detach(), *torch.autograd.grad(y, [*leaves, *parameters], torch.randn(y.shape, dtype=y.dtype))]


def assert_close(actual, expected, limit=1e-12):
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert relative(a, b) < limit, i


def padding_mask(n):
    """Return a mask that is True for tokens that are not padding."""
    return torch.arange(n) < torch.tensor([n, n - 2, n - 3])[:, None]
