"""Small models of handwritten sublayers, from which the adversarial models are built, and norms in the spellings of real code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm import Row
from support import families
from support.answers import Answer, Stream
from support.families import AAFF, Model, ids, ln, shake

D, HEADS, VOCAB = 16, 2, 99
EPS = 1e-5


# --- sublayers -----------------------------------------------------------------------------------------------------------


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Handwritten attention; cross-attention if there is a `memory`."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k = self.turned(heads(self.q(x)), heads(self.k(memory)))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mixed = torch.softmax(scores, -1) @ heads(self.v(memory))
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class DropPath(nn.Module):
    """Handwritten stochastic depth. `always` is Monte Carlo dropout: active in eval mode, with its own generator."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training or self.always):
            return x
        kept = torch.rand(x.shape[0], 1, 1, generator=torch.Generator().manual_seed(3)) + 0.8
        return x.div(0.8) * torch.floor(kept)


# --- norms ---------------------------------------------------------------------------------------------------------------


def llama(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return w * (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def gemma(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + w.float())).type_as(x)


def square_root(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w


def inverse_root(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return (wide * (1 / ((wide**2).mean(-1, keepdim=True) + eps).sqrt())).to(x.dtype) * w


def root_plus_eps(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    """RMSNorm of Zhang and Sennrich's code: eps is outside the root."""
    rms = x.norm(2, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
    return w * (x / (rms + eps))


def unit_length(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return F.normalize(x, dim=-1, eps=eps) * math.sqrt(x.shape[-1]) * w


def functional_rms(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, eps)


def bare_rms(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=eps)


def annotated(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    """The Annotated Transformer's: the unbiased deviation, and eps added to it."""
    return w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps) + b


def variance(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(torch.var(x, -1, unbiased=False, keepdim=True) + eps) * w + b


def var_mean(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return torch.addcmul(b, (x - mean) / torch.sqrt(var + eps), w)


def centered(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    c = x.float() - x.float().mean(-1, keepdim=True)
    return (c * (c * c).mean(-1, keepdim=True).add(eps).rsqrt()).to(x.dtype) * w + b


def moments(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    """The variance as E[x^2] - E[x]^2."""
    mean, square = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(square - mean.square() + eps) * w + b


def sums(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    """Means as sums over the width."""
    d = x.shape[-1]
    c = x - x.sum(-1, keepdim=True) / d
    return c / (c.pow(2).sum(-1, keepdim=True) / d + eps) ** 0.5 * w + b


def functional_layer(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b, eps)


def native_layer(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return torch.native_layer_norm(x, (x.shape[-1],), w, b, eps)[0]


RMS_FORMULAS = (llama, gemma, square_root, inverse_root, root_plus_eps, unit_length, functional_rms, bare_rms)
LAYER_FORMULAS = (annotated, variance, var_mean, centered, moments, sums, functional_layer, native_layer)


# --- models --------------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """One sublayer: its function, two norms and learned factors, which a `Step` combines."""

    def __init__(self, f: nn.Module, norm: Callable[[], nn.Module], number: int) -> None:
        super().__init__()
        self.f, self.norm, self.norm_2, self.number = f, norm(), norm(), number
        self.gamma, self.scale = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(()))
        self.drop, self.path, self.always = nn.Dropout(0.1), DropPath(), DropPath(always=True)


Step = Callable[[Part, Tensor], Tensor]


class Tiny(nn.Module):
    """Small transformer whose sublayers run `step`, with optional norms before and after."""

    def __init__(
        self,
        step: Step,
        functions: Iterable[Callable[[], nn.Module]] = (Attention, Mlp),
        norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(D),
        layers: int = 2,
        embedding_norm: bool = False,
        final_norm: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.positions, self.step = nn.Embedding(VOCAB, D), nn.Embedding(64, D), step
        self.parts = nn.ModuleList(Part(make(), norm, i + 1) for i in range(layers) for make in functions)
        self.first = norm() if embedding_norm else nn.Identity()
        self.last = norm() if final_norm else nn.Identity()

    def embed_tokens(self, ids: Tensor) -> Tensor:
        return self.first(self.embed(ids) + self.positions(torch.arange(ids.shape[-1])))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for part in self.parts:
            x = self.step(part, x)
        return self.last(x)


# --- families of tiny models -----------------------------------------------------------------------------------------------


def tokens() -> tuple[Tensor, ...]:
    return (ids(),)


def stream(wiring: str | None, letters: str = AAFF, eps: float | None = EPS, **facts: Any) -> Stream:
    return families.stream(wiring, **{"norm": ln, "eps": eps, "letters": letters, "width": D} | facts)


def tiny_family(name: str, step: Step, expected: Stream, remark: str = "", **options: Any) -> Model:
    """Return a chain of sublayers with the expected norms before and after."""
    norms = {name: getattr(expected, name) is not None for name in ("embedding_norm", "final_norm")}
    return Model(name, partial(Tiny, step, **norms | options), tokens, Answer((expected,)), remark)


def every(row: Row, n: int = 4) -> dict[int, Row]:
    """Return the same row for all sublayers."""
    return dict.fromkeys(range(n), row)


def chain(*makes: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, D), *(make() for make in makes))


post: Step = lambda s, x: s.norm(x + s.f(x))  # noqa: E731 (a step, as the others in the tables)
pre: Step = lambda s, x: x + s.f(s.norm(x))  # noqa: E731 (a step, as the others in the tables)
pre_ln, post_ln = partial(stream, "pre_ln", final_norm=True), partial(stream, "post_ln")
factor = partial(stream, final_norm=True)


# --- one model for many tests --------------------------------------------------------------------------------------------

IDS = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))


def make_input(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 7, D), generator=torch.Generator().manual_seed(0))


def tiny(step: Step = pre, **options: Any) -> nn.Module:
    """Return a `Tiny` of two layers with a final norm and random parameters."""
    return shake(Tiny(step, **{"final_norm": True} | options))
