"""Tests of common statements about Add & Norm that hold for every wiring of a kind.

Statements that are measured (the norm's own, scale, gradients, training, cost) are in benchmarks/bench_claims.py and docs/claims.md.
"""

import pytest
import torch
from torch import nn

from addnorm import LayerNorm, ResidualStack, RMSNorm

D = 16
SUMS = (
    "pre_ln", "sandwich", "reordered", "layer_scale", "layernorm_scaling", "depth_mup", "no_norm", "rezero", "parallel",
)  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_zero_sublayer_leaves_pre_ln_stream_unchanged(name):
    """a = 1 and no N_out: only the adds change the stream."""
    stack = ResidualStack([torch.zeros_like] * 12, D, name, final_norm=False)
    x = 1e3 * torch.randn(3, 5, D)
    assert torch.equal(stack(x), x)
    assert torch.equal(stack.unroll(x).x_L, x)


@pytest.mark.parametrize("name", SUMS[:-1])
def test_identity_path_carries_gradient_unchanged(name):
    """The identity path has the factor 1: gradients are bitwise equal after 24 sublayers that stop them."""
    sublayers = [nn.Sequential(nn.Linear(D, D), nn.GELU()) for _ in range(24)]
    for sublayer in sublayers:
        sublayer.register_forward_hook(lambda module, args, output: output.detach())
    stack, x = ResidualStack(sublayers, D, name, final_norm=False), torch.randn(3, 5, D, requires_grad=True)
    cotangent = torch.randn(3, 5, D)
    (gradient,) = torch.autograd.grad(stack(x), x, cotangent)
    assert torch.equal(gradient, cotangent)


@pytest.mark.parametrize(("norm", "each"), [("layer", 2 * D), ("rms", D)])
def test_add_and_norm_has_two_vectors_of_parameters(norm, each):
    """A LayerNorm has scale and shift, an RMSNorm the scale alone, the add none."""
    for wiring, norms in (("post_ln", 24), ("pre_ln", 25), ("sandwich", 49), ("no_norm", 0)):
        stack = ResidualStack([torch.zeros_like] * 24, D, wiring, norm=norm)
        assert sum(parameter.numel() for parameter in stack.parameters()) == norms * each
        assert sum(isinstance(module, LayerNorm | RMSNorm) for module in stack.modules()) == norms
