"""A boundary of several streams as a model, whose write and read a function spells; its outputs and gradients, and their errors."""

import copy

import torch
from torch import nn

from support.graph_capture import relative_difference, run_call
from support.stream_steps import noise

N, D = 4, 16
X = noise(2, 3, N, D)


class Boundary(nn.Module):
    """One boundary: a write with coefficients of each token, a read and its norm; `function` spells them."""

    def __init__(self, function, n=N, d=D):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.n, self.f, self.gates = function, n, nn.Linear(d, d), nn.Linear(d, n * (n + 2))
        self.norm, self.weight = nn.LayerNorm(d), nn.Parameter(torch.rand(d) + 0.5)

    def forward(self, x):
        n, w = self.n, self.f(x.mean(-2))
        z = self.gates(x.mean(-2)).sigmoid()
        return self.function(self, x, w, z[..., : n * n].unflatten(-1, (n, n)), *z[..., n * n :].split(n, -1))


def outer(b, w):
    """Return what a write adds to each stream."""
    return b.unsqueeze(-1) * w.unsqueeze(-2)


def read(c, streams):
    """Return what the next sublayer reads, before its norm."""
    return (c.unsqueeze(-1) * streams).sum(-2)


def deepseek(m, x, w, a, b, c):
    new = outer(b, w) + torch.matmul(a.transpose(-1, -2), x)
    return new, m.norm((c.unsqueeze(-1) * new).sum(dim=2))


def broadcast_sums(m, x, w, a, b, c):
    new = (a.unsqueeze(-1) * x.unsqueeze(-3)).sum(-2) + w.unsqueeze(-2) * b[..., None]
    return new, m.norm(new.mean(-2))


def train(model, call, x):
    """Return outputs and gradients of a loss with fixed cotangents."""
    outputs, grads = run_call(model, call, (x,))
    return [*(out.detach() for out in outputs), *grads.values()]


def assert_close(model, plain, *inputs):
    """Check that two models have the same outputs but for the round-off of float32."""
    for x in inputs:
        pairs = zip(plain(x), model(x), strict=True)
        assert all(relative_difference(*pair) < 1e-5 for pair in pairs)


def errors(results, exact):
    return [
        float((own.double() - truth).norm() / truth.norm().clamp_min(1e-9))
        for own, truth in zip(results, exact, strict=True)
    ]


def assert_as_exact(model, call, x=X, run=lambda call, x: call(x), dtype=torch.float32):
    """Check outputs and gradients of a fused call: at most 1.5 times as far from float64 as those of the model."""
    wide = copy.deepcopy(model).double()
    exact = train(wide, wide, x.double())
    after = train(model, lambda x: run(call, x), x)
    before = train(model, lambda x: run(model, x), x)
    assert [(t.dtype, t.shape) for t in before] == [(t.dtype, t.shape) for t in after]
    assert [t.stride() for t in before[:2]] == [t.stride() for t in after[:2]]
    eps = torch.finfo(dtype).eps
    assert all(a <= 1.5 * b + 4 * eps for a, b in zip(errors(after, exact), errors(before, exact), strict=True))
