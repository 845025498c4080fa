"""Stacks in float64 of which nothing is at its initial value, and whether two of them are the same function.

Weights, biases and learned factors of the norms are random, and a large eps shows whether it is in the right place. Compared
are the forward, the gradient of x_0 and of every parameter, to rounding.
"""

import torch
import torch.nn.functional as F
from torch import nn

from addnorm import ResidualStack

D, LAYERS, EPS = 12, 3, 1e-2


class Attention(nn.Module):
    """One head of causal self-attention: tokens mix, nonlinearly."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(D, D, bias=False).double() for _ in range(4))

    def forward(self, x):
        mixed = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)
        return self.out(mixed)


def feed_forward():
    return nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)).double()


def sublayers(num_layers=LAYERS):
    return [make() for _ in range(num_layers) for make in (Attention, feed_forward)]


def stacked(wiring, modules=None, norm="layer", **options):
    """A stack whose norms and learned factors are random."""
    options = {"eps": EPS, "dtype": torch.float64, **options}
    stack = ResidualStack(sublayers() if modules is None else modules, D, wiring, norm=norm, **options)
    inside = {id(p) for connection in stack.connections for p in parameters(connection.sublayer)}
    for parameter in stack.parameters():
        if id(parameter) not in inside:
            nn.init.normal_(parameter, 0.5, 0.5)
    return stack


def parameters(sublayer):
    return list(sublayer.parameters()) if isinstance(sublayer, nn.Module) else []


def tokens(*shape):
    return torch.randn(*(shape or (2, 5)), D, dtype=torch.float64, requires_grad=True)


def assert_close(found, expected, what=""):
    """To 1e-12 of the tensor's largest element."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) <= 1e-12 * float(other.abs().max()), what


def differentiated(function, x, wanted, cotangent):
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *wanted], cotangent)]


def assert_same(function, other, x=None, wanted=(), others=None):
    """The same output, and the same gradients of x and of the parameters (`others`: those of the other, in the same order)."""
    x = tokens() if x is None else x
    cotangent = torch.randn_like(x)
    found = differentiated(function, x, wanted, cotangent)
    expected = differentiated(other, x, wanted if others is None else others, cotangent)
    assert_close(found, expected)


def norms(stack):
    """The norms of a stack in the order in which the stream meets them."""
    found = [stack.norm_embedding]
    for connection in stack.connections:
        found += [connection.norm_in, connection.norm_branch, connection.norm_out]
    return [norm for norm in [*found, stack.norm_final] if norm is not None]


def plain(norm):
    """A norm as PyTorch's function."""
    if isinstance(norm, nn.LayerNorm):
        return lambda x: F.layer_norm(x, (D,), norm.weight, norm.bias, EPS)
    if isinstance(norm, nn.RMSNorm):
        return lambda x: F.rms_norm(x, (D,), norm.weight, EPS)
    return None
