"""A sublayer, stacks of it, and every wiring, for the tests of stacks."""

import torch
from torch import nn

from addnorm import ResidualStack, wirings
from addnorm.nn import Encoder

D = 16
f64 = torch.float64


class Mlp(nn.Module):
    """Sublayer that returns a new tensor."""

    def __init__(self, d=D, dtype=None):
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d, dtype=dtype), nn.Linear(2 * d, d, dtype=dtype)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def stack_of(n, wiring="pre_ln", d=D, **options):
    dtype = options.get("dtype")
    return ResidualStack([Mlp(d, dtype) for _ in range(n)], d, wiring, **options)


def encoder(wiring="pre_ln", num_layers=2, **options):
    """Return an encoder in evaluation mode, always the same for the same arguments."""
    torch.manual_seed(0)
    return Encoder(num_layers, D, nhead=2, wiring=wiring, **options).eval()


def torch_encoder(norm_first=False, num_layers=2, norm=None, **options):
    """Return torch's encoder in evaluation mode, always the same for the same arguments."""
    torch.manual_seed(0)
    options = {"batch_first": True, "norm_first": norm_first} | options
    layer = nn.TransformerEncoderLayer(D, 2, 2 * D, **options)
    return nn.TransformerEncoder(layer, num_layers, norm, enable_nested_tensor=False).eval()


ALL = wirings.list_all()


class Masked(nn.Module):
    def forward(self, x, mask=None, *, scale=1.0):
        self.received = (mask, scale)
        return x * scale
