"""Small models of handwritten sublayers, from which the adversarial models are built, and norms in the spellings of real code."""

import math
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from support import families
from support.answers import Answer
from support.families import AAFF, Model, ids, ln, shake

D, HEADS, VOCAB = 16, 2, 99
EPS = 1e-5


# --- sublayers -----------------------------------------------------------------------------------------------------------


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Handwritten attention; cross-attention if there is a `memory`."""

    def __init__(self, d=D):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))

    def turned(self, q, k):
        return q, k

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        q, k = self.turned(heads(self.q(x)), heads(self.k(memory)))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mixed = torch.softmax(scores, -1) @ heads(self.v(memory))
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class DropPath(nn.Module):
    """Handwritten stochastic depth. `always` is Monte Carlo dropout: active in eval mode, with its own generator."""

    def __init__(self, always=False):
        super().__init__()
        self.always = always

    def forward(self, x):
        if not (self.training or self.always):
            return x
        kept = torch.rand(x.shape[0], 1, 1, generator=torch.Generator().manual_seed(3)) + 0.8
        return x.div(0.8) * torch.floor(kept)


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

    def __init__(self, f, norm, number):
        super().__init__()
        self.f, self.norm, self.number = f, norm(), number
        self.gamma, self.scale = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(()))
        self.drop, self.path, self.always = nn.Dropout(0.1), DropPath(), DropPath(always=True)


class Tiny(nn.Module):
    """Small transformer whose sublayers run `step`, with optional norms before and after."""

    def __init__(
        self,
        step,
        functions=(Attention, Mlp),
        norm=lambda: nn.LayerNorm(D),
        layers=2,
        embedding_norm=False,
        final_norm=False,
    ):
        super().__init__()
        self.embed, self.positions, self.step = nn.Embedding(VOCAB, D), nn.Embedding(64, D), step
        self.parts = nn.ModuleList(Part(make(), norm, i + 1) for i in range(layers) for make in functions)
        self.first = norm() if embedding_norm else nn.Identity()
        self.last = norm() if final_norm else nn.Identity()

    def embed_tokens(self, ids):
        return self.first(self.embed(ids) + self.positions(torch.arange(ids.shape[-1])))

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for part in self.parts:
            x = self.step(part, x)
        return self.last(x)


# --- families of tiny models -----------------------------------------------------------------------------------------------


def tokens():
    return (ids(),)


def stream(wiring, letters=AAFF, eps=EPS, **facts):
    return families.stream(wiring, **{"norm": ln, "eps": eps, "letters": letters, "width": D} | facts)


def tiny_family(name, step, expected, remark="", **options):
    """Return a chain of sublayers with the expected norms before and after."""
    norms = {name: getattr(expected, name) is not None for name in ("embedding_norm", "final_norm")}
    return Model(name, partial(Tiny, step, **norms | options), tokens, Answer((expected,)), remark)


def chain(*makes):
    return nn.Sequential(nn.Embedding(VOCAB, D), *(make() for make in makes))


post = lambda s, x: s.norm(x + s.f(x))  # noqa: E731 (a step, as the others in the tables)
pre = lambda s, x: x + s.f(s.norm(x))  # noqa: E731 (a step, as the others in the tables)
pre_ln, post_ln = partial(stream, "pre_ln", final_norm=True), partial(stream, "post_ln")
factor = partial(stream, final_norm=True)


# --- one model for many tests --------------------------------------------------------------------------------------------

IDS = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))


def make_input(*shape):
    return families.noise(*(shape or (2, 7, D)), seed=0)


def tiny(step=pre, **options):
    """Return a `Tiny` of two layers with a final norm and random parameters."""
    return shake(Tiny(step, **{"final_norm": True} | options))
