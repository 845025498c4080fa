"""Stacks in float64 with random parameters, and the comparison of two stacks as functions.

Weights, biases and learned factors are random, and eps is large, so that a misplaced norm or factor changes the output.
`assert_equal_functions` compares the output and the gradients of x_0 and of every parameter, to round-off.
"""

import torch
import torch.nn.functional as F
from torch import nn

from addnorm import ResidualStack
from support.stream_steps import make_mlp

D, LAYERS, EPS = 12, 3, 1e-2


class Attention(nn.Module):
    """One head of causal self-attention, which mixes tokens nonlinearly."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(D, D, bias=False).double() for _ in range(4))

    def forward(self, x):
        mixed = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)
        return self.out(mixed)


def make_sublayers():
    return [make() for _ in range(LAYERS) for make in (Attention, lambda: make_mlp(D).double())]


def make_stack(wiring, modules=None, norm="layer", **options):
    """Return a stack whose norms and learned factors are random."""
    options = {"eps": EPS, "dtype": torch.float64, **options}
    stack = ResidualStack(make_sublayers() if modules is None else modules, D, wiring, norm=norm, **options)
    inside = {id(p) for connection in stack.connections for p in list_parameters(connection.sublayer)}
    for parameter in stack.parameters():
        if id(parameter) not in inside:
            nn.init.normal_(parameter, 0.5, 0.5)
    return stack


def list_parameters(sublayer):
    return list(sublayer.parameters()) if isinstance(sublayer, nn.Module) else []


def make_tokens(*shape):
    return torch.randn(*(shape or (2, 5)), D, dtype=torch.float64, requires_grad=True)


def assert_close(results, expected, what=""):
    """Compare tensors with a tolerance of 1e-12 of the largest element."""
    for result, other in zip(results, expected, strict=True):
        assert result.shape == other.shape
        assert float((result - other).abs().max()) <= 1e-12 * float(other.abs().max()), what


def compute_gradients(function, x, wanted, cotangent):
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *wanted], cotangent)]


def assert_equal_functions(function, other, wanted):
    """Compare the outputs and the gradients of the input and of `wanted`."""
    x = make_tokens()
    cotangent = torch.randn_like(x)
    assert_close(*(compute_gradients(f, x, wanted, cotangent) for f in (function, other)))


def get_norm_function(norm):
    """Return a norm as PyTorch's function."""
    if isinstance(norm, nn.LayerNorm):
        return lambda x: F.layer_norm(x, (D,), norm.weight, norm.bias, EPS)
    if isinstance(norm, nn.RMSNorm):
        return lambda x: F.rms_norm(x, (D,), norm.weight, EPS)
    return None
