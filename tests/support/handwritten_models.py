"""A small model of handwritten sublayers, and norms in the spellings of real code."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from support.families import noise, shake

D, HEADS, VOCAB = 16, 2, 99


# --- sublayers -----------------------------------------------------------------------------------------------------------


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Handwritten attention."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        q, k, v = (heads(part(x)) for part in (self.q, self.k, self.v))
        mixed = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


# --- norms ---------------------------------------------------------------------------------------------------------------


def llama(x, w, b, eps):
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return w * (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def gemma(x, w, b, eps):
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + w.float())).type_as(x)


def square_root(x, w, b, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w


def inverse_root(x, w, b, eps):
    wide = x.double()
    return (wide * (1 / ((wide**2).mean(-1, keepdim=True) + eps).sqrt())).to(x.dtype) * w


def root_plus_eps(x, w, b, eps):
    """RMSNorm of Zhang and Sennrich's code: eps is outside the root."""
    rms = x.norm(2, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
    return w * (x / (rms + eps))


def unit_length(x, w, b, eps):
    return F.normalize(x, dim=-1, eps=eps) * math.sqrt(x.shape[-1]) * w


def functional_rms(x, w, b, eps):
    return F.rms_norm(x, (x.shape[-1],), w, eps)


def bare_rms(x, w, b, eps):
    return F.rms_norm(x, (x.shape[-1],), eps=eps)


def annotated(x, w, b, eps):
    """The Annotated Transformer's: the unbiased deviation, and eps added to it."""
    return w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps) + b


def variance(x, w, b, eps):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(torch.var(x, -1, unbiased=False, keepdim=True) + eps) * w + b


def var_mean(x, w, b, eps):
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return torch.addcmul(b, (x - mean) / torch.sqrt(var + eps), w)


def centered(x, w, b, eps):
    c = x.float() - x.float().mean(-1, keepdim=True)
    return (c * (c * c).mean(-1, keepdim=True).add(eps).rsqrt()).to(x.dtype) * w + b


def moments(x, w, b, eps):
    """The variance as E[x^2] - E[x]^2."""
    mean, square = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(square - mean.square() + eps) * w + b


def sums(x, w, b, eps):
    """Means as sums over the width."""
    d = x.shape[-1]
    c = x - x.sum(-1, keepdim=True) / d
    return c / (c.pow(2).sum(-1, keepdim=True) / d + eps) ** 0.5 * w + b


def functional_layer(x, w, b, eps):
    return F.layer_norm(x, (x.shape[-1],), w, b, eps)


def native_layer(x, w, b, eps):
    return torch.native_layer_norm(x, (x.shape[-1],), w, b, eps)[0]


RMS_FORMULAS = (llama, gemma, square_root, inverse_root, root_plus_eps, unit_length, functional_rms, bare_rms)
LAYER_FORMULAS = (annotated, variance, var_mean, centered, moments, sums, functional_layer, native_layer)


# --- models --------------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """One sublayer: its function, its norm and learned factors, which a step combines: a function of the part and of the stream."""

    def __init__(self, f, norm):
        super().__init__()
        self.f, self.norm, self.drop = f, norm, nn.Dropout(0.1)
        self.gamma, self.scale = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(()))


class Tiny(nn.Module):
    """Transformer of two layers whose sublayers run `step`, with an optional final norm."""

    def __init__(self, step, final_norm):
        super().__init__()
        self.embed, self.positions, self.step = nn.Embedding(VOCAB, D), nn.Embedding(64, D), step
        self.parts = nn.ModuleList(Part(make(), nn.LayerNorm(D)) for _ in range(2) for make in (Attention, Mlp))
        self.last = nn.LayerNorm(D) if final_norm else nn.Identity()

    def forward(self, ids):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[-1]))
        for part in self.parts:
            x = self.step(part, x)
        return self.last(x)


post = lambda s, x: s.norm(x + s.f(x))  # noqa: E731 (a step, as the others in the tables)
pre = lambda s, x: x + s.f(s.norm(x))  # noqa: E731 (a step, as the others in the tables)
IDS = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))


def make_input(*shape):
    return noise(*(shape or (2, 7, D)), seed=0)


def tiny(step=pre, final_norm=True):
    """Return a `Tiny` with random parameters."""
    return shake(Tiny(step, final_norm))
