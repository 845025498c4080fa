"""Stacks of every wiring, also of several streams, with sublayers of one or several inputs."""

from functools import partial

import pytest
import torch
from torch import nn

from addnorm import ResidualStack, wirings
from support.stacks import ALL
from support.torch_transformers import randomize

D = 8
WIRINGS = {wiring.name: wiring for wiring in ALL if not wiring.has_rows} | {  # small ones, and more options
    "hyper_connections": wirings.hyper_connections(3),
    "static_hyper_connections": wirings.hyper_connections(3, dynamic=False),
    "mhc": wirings.mhc(3, iterations=5),
    "mhc_with_mean": wirings.mhc(3, head="mean", iterations=5),
    "single_pass_mhc": wirings.mhc(3, single_pass=True, iterations=5),
    "independent_hc": wirings.independent_hc(3),
    "gated_residual": wirings.gated_residual(3, rank=4),
    "attention_residuals_by_block": wirings.attention_residuals(1),
    "attention_residuals_three_reads": wirings.attention_residuals(normed_values=True, reads=3),
    "muddformer_three_reads": wirings.muddformer(reads=3),
}
EVERY = {wiring.name: wiring for wiring in ALL} | WIRINGS
each = pytest.mark.parametrize("name", WIRINGS)
every = pytest.mark.parametrize("name", EVERY)
one_of_each_module = pytest.mark.parametrize(
    "name",
    ["pre_ln", "rezero", "hyper_connections", "single_pass_mhc", "independent_hc", "gated_residual", "attention_residuals_three_reads",
     "muddformer_three_reads", "x0_residual", "residual_scaling"],
)  # fmt: skip


class Branch(nn.Module):
    """A sublayer of one or several inputs that is not homogeneous."""

    def __init__(self, reads=1):
        super().__init__()
        self.linear, self.reads = nn.Linear(D, D), reads

    def forward(self, x, *others):
        assert len(others) == self.reads - 1
        for k, read in enumerate(others):
            x = x + (k + 2) * read
        return torch.tanh(self.linear(x)) + 0.3


def branches(name, number=6):
    return [Branch(3 if name.endswith("three_reads") and i % 2 == 0 else 1) for i in range(number)]


def make(name, dtype=torch.float32, number=6, **options):
    """Return a stack whose parameters are away from their initial values."""
    return perturb(ResidualStack(branches(name, number), D, EVERY[name], **options)).to(dtype)


perturb = partial(randomize, size=0.3)


def tokens(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (4, 5)), D, dtype=dtype)
