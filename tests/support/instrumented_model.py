"""Model of attention and feed-forwards, a recorded step of it, and the recorder's statistics by their formulas."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import addnorm
from support.families import noise, shake

D, TOKENS, BATCH = 16, 6, 3


class Model(nn.Module):
    """Embedding and torch's layers, with random parameters."""

    def __init__(self, post=False, layers=2):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "norm_first": not post}
        self.embed = nn.Embedding(20, D)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(D, 2, 2 * D, **options) for _ in range(layers))
        self.last = nn.Identity() if post else nn.LayerNorm(D)
        self.checkpointed = None
        shake(self)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            if self.checkpointed is not None and self.training:
                x = checkpoint(block, x, use_reentrant=self.checkpointed)
            else:
                x = block(x)
        return self.last(x)


def token_ids():
    """Return the input of `Model`."""
    return torch.randint(20, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def compute_loss(y):
    """Return a loss whose gradient differs between tokens."""
    return (y * noise(*y.shape, seed=2).to(y.dtype)).sum()


def backward(model, *inputs):
    """Run a forward, and the backward of its loss."""
    compute_loss(model(*inputs)).backward()


def step(model, ids, **options):
    """Return the recording of one forward and backward."""
    model.zero_grad()
    with addnorm.record(model, **options) as rec:
        backward(model, ids)
    return rec


def record(model, *inputs, **options):
    """Return the recording of one forward without gradients."""
    with addnorm.record(model, grads=False, **options) as rec, torch.no_grad():
        model(*inputs)
    return rec


def assert_same_numbers(actual, expected, skip=(), rtol=1e-7, atol=1e-12):
    """Compare the numbers of two recordings, but for those of some roles."""
    numbers = (
        {(row.step, row.site, row.role, row.statistic): row.value for row in rec.table() if row.role not in skip}
        for rec in (actual, expected)
    )
    torch.testing.assert_close(*numbers, rtol=rtol, atol=atol, equal_nan=True)


def column(rec, role, statistic, step=None):
    """Return a statistic of the sublayers by depth, at a step or the last one."""
    return [value for site, value in rec.series(role, statistic, step) if site.layer is not None]


def parameter_gradients(model):
    """Return the L2 norm of the parameters' gradients for each sublayer."""
    sublayers = [modules for block in model.blocks for modules in ([block.self_attn], [block.linear1, block.linear2])]
    grads = [[p.grad.double().norm() for module in modules for p in module.parameters()] for modules in sublayers]
    return [float(torch.stack(norms).norm()) for norms in grads]


def lengths(t):
    """Return the L2 norm of each token."""
    return t.detach().double().reshape(-1, t.shape[-1]).norm(dim=-1)


def compare_write(x, write):
    """Return ratio and cosine of a write and the stream it is added to."""
    cosines = F.cosine_similarity(x.detach(), write.detach(), dim=-1)
    return {"ratio": float((lengths(write) / lengths(x)).mean()), "cosine": float(cosines.mean())}


def similarity(t):
    """Return the mean cosine between two tokens of a sequence; t is `(sequences, tokens, features)`."""
    unit, n = F.normalize(t.detach().double(), dim=-1), t.shape[1]
    return float(((unit @ unit.mT).sum((1, 2)) - n).mean()) / (n * (n - 1))


REFERENCE = {
    "l2": lambda t: float(lengths(t).mean()),
    "rms": lambda t: float(t.detach().double().square().mean().sqrt()),
    "max": lambda t: float(t.detach().abs().max()),
}
