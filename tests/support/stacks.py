"""A sublayer, stacks of it, and every wiring, for the tests of stacks."""

import torch
from torch import nn

from addnorm import ResidualStack, wirings

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


def stand_in(name, **options):
    """Return the wiring with that name, with a value for its required option."""
    return wirings.get(name, **({"multiplier": 0.5} if name == "residual_multiplier" else {}), **options)


ALL = [stand_in(name) for name in wirings.CONSTRUCTORS]


class Masked(nn.Module):
    def forward(self, x, mask=None, *, scale=1.0):
        self.received = (mask, scale)
        return x * scale
