"""Adversarial models that are not a plain chain of sublayers (part of adversarial_models.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.answers import Answer, Stream
from support.families import AF, Model, ids, noise, rms
from support.handwritten_models import (
    EPS,
    HEADS,
    VOCAB,
    Attention,
    D,
    Mlp,
    Part,
    Tiny,
    chain,
    factor,
    heads,
    post,
    post_ln,
    pre,
    pre_ln,
    stream,
    tokens,
)


class Residual(nn.Module):
    """Sublayer whose module contains the add."""

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(D), f)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + x


class SharedAlpha(Tiny):
    """ReZero with one factor for both sublayers of a layer."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for attention, mlp in zip(self.parts[::2], self.parts[1::2], strict=True):
            x = x + attention.scale * attention.f(x)
            x = x + attention.scale * mlp.f(x)
        return x


class Delayed(Tiny):
    """Model that adds before the next norm, like models with a fused add and norm (vLLM, Mamba)."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden, residual = self.embed_tokens(ids), None
        for part in self.parts:
            residual = hidden if residual is None else hidden + residual
            hidden = part.f(part.norm(residual))
        return self.last(hidden + residual)


class Functions(nn.Module):
    """Model of functions on a list of tensors, without modules."""

    def __init__(self) -> None:
        super().__init__()
        shapes = 2 * ((D, 3 * D), (D, D), (D, 2 * D), (2 * D, D))
        self.matrices = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in ((VOCAB, D), *shapes))

    @staticmethod
    def block(x: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in (F.rms_norm(x, (D,), eps=EPS) @ qkv).chunk(3, -1))
        mixed = torch.softmax(q @ k.mT * (D // HEADS) ** -0.5, -1) @ v
        x = x + mixed.transpose(1, 2).flatten(-2) @ out
        return x + torch.relu(F.rms_norm(x, (D,), eps=EPS) @ up).square() @ down

    def forward(self, ids: Tensor) -> Tensor:
        table, *matrices = self.matrices
        x = table[ids]
        for i in range(0, len(matrices), 4):
            x = self.block(x, *matrices[i : i + 4])
        return F.rms_norm(x, (D,), eps=EPS)


class Parallel(Tiny):
    """Layers whose two sublayers read the same stream; `add` sums the three terms."""

    def __init__(self, norms: int, add: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(pre, final_norm=True)
        self.norms, self.add = norms, add

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for attention, mlp in zip(self.parts[::2], self.parts[1::2], strict=True):
            first = attention.norm(x)
            second = mlp.norm(x) if self.norms == 2 else first
            x = self.add(x, attention.f(first), mlp.f(second))
        return self.last(x)


class EncoderDecoder(nn.Module):
    """Pre-LN encoder and post-LN decoder: two streams of the same width."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Tiny(pre, final_norm=True)
        self.decoder = Tiny(post, (Attention, Attention, Mlp))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(source)
        x = self.decoder.embed_tokens(target)
        for i, part in enumerate(self.decoder.parts):
            x = part.norm(x + (part.f(x, memory) if i % 3 == 1 else part.f(x)))
        return x


class Towers(nn.Module):
    """Two streams of the same width that meet only in the final product, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Tiny(pre, final_norm=True), Tiny(post)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return F.normalize(self.one(left).mean(1), dim=-1) @ F.normalize(self.two(right).mean(1), dim=-1).mT


class Thrice(Tiny):
    """Model that runs one layer three times."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for _ in range(3):
            for part in self.parts:
                x = self.step(part, x)
        return self.last(x)


class LongSkip(Tiny):
    """Three layers; the output of the first is added again before the last."""

    def forward(self, ids: Tensor) -> Tensor:
        x, states = self.embed_tokens(ids), []
        for i, part in enumerate(self.parts):
            states.append(x)
            x = self.step(part, x + states[2] if i == 4 else x)
        return self.last(x)


class FirstMixed(Tiny):
    """Model with x = a x + b x_0 before each layer, as in nanochat: a and b are learned, x_0 is the normalized embedding."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.x_lambda, self.x0_lambda = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.embed_tokens(ids)
        for i, part in enumerate(self.parts):
            if i % 2 == 0:
                x = self.x_lambda[i // 2] * x + self.x0_lambda[i // 2] * first
            x = self.step(part, x)
        return self.last(x)


class ChannelsFirst(Tiny):
    """Model whose stream has the shape (batch, d, length)."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids).transpose(1, 2).contiguous()
        for part in self.parts:
            x = x + part.f(part.norm(x.transpose(1, 2))).transpose(1, 2)
        return self.last(x.transpose(1, 2))


class ResiDual(Tiny):
    def forward(self, ids: Tensor) -> Tensor:
        u = v = self.embed_tokens(ids)
        for part in self.parts:
            f = part.f(u)
            u, v = part.norm(u + f), v + f
        return u + self.last(v)


class BottomToTop(Tiny):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for attention, mlp in zip(self.parts[::2], self.parts[1::2], strict=True):
            h = attention.norm(x + attention.f(x))
            x = mlp.norm(h + mlp.f(h) + x)
        return x


class Joined(Tiny):
    """Model that adds a class token after the first layer, so that the stream gets longer."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for i, part in enumerate(self.parts):
            if i == 2:
                x = torch.cat((self.embed.weight[:1].expand(len(x), 1, D), x), 1)
            x = self.step(part, x)
        return self.last(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(VOCAB, D), nn.GRU(D, D, 2, batch_first=True), nn.Linear(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(ids))[0])


def highway(part: Part, x: Tensor) -> Tensor:
    gate = torch.sigmoid(part.norm_2(x))
    return gate * part.f(part.norm(x)) + (1 - gate) * x


def two_texts() -> tuple[Tensor, ...]:
    return ids(), ids(5, seed=2)


def make_family(
    name: str, make: Callable[[], nn.Module], *expected: Stream, remark: str = "", inputs: Any = tokens
) -> Model:
    return Model(name, make, inputs, Answer(expected), remark)


FINAL = partial(Tiny, pre, final_norm=True)
parallel_two = partial(stream, "parallel", final_norm=True, options={"norms": 2})
parallel_one = partial(stream, "parallel", final_norm=True, options={"norms": 1})
OTHER = (
    make_family("ReZero, alpha of a layer", partial(SharedAlpha, pre), stream("rezero", norm=None, eps=None)),
    make_family("delayed add", partial(Delayed, pre, final_norm=True), pre_ln()),
    make_family("add in the module", lambda: chain(*(partial(Residual, make()) for make in (Attention, Mlp) * 2)), stream("pre_ln")),
    make_family("functions", Functions, pre_ln(norm=rms), remark="its norms have no weights"),
    make_family("parallel (x + a) + f", lambda: Parallel(1, lambda x, a, f: x + a + f), parallel_one()),
    make_family("parallel (a + f) + x", lambda: Parallel(1, lambda x, a, f: a + f + x), parallel_one()),
    make_family("parallel, two norms, (f + a) + x", lambda: Parallel(2, lambda x, a, f: f + a + x), parallel_two()),
    make_family("parallel, two norms, in place", lambda: Parallel(2, lambda x, a, f: x + f.add_(a)), parallel_two()),
    make_family("encoder and decoder", EncoderDecoder, pre_ln(), post_ln("acf" * 2), inputs=two_texts),
    make_family("two towers", Towers, pre_ln(), post_ln(), inputs=two_texts),
    make_family("one layer thrice", partial(Thrice, pre, layers=1, final_norm=True), pre_ln(AF * 3, shared=1)),
    make_family("long skip", partial(LongSkip, pre, layers=3, final_norm=True), pre_ln(AF * 3)),
    make_family("x_0 mixed in", lambda: FirstMixed(step=pre, embedding_norm=True, final_norm=True),
         pre_ln(embedding_norm=True), remark="x_0 comes after the embedding norm"),
    make_family("channels first", partial(ChannelsFirst, pre, final_norm=True), pre_ln(), remark="(batch, d, length)"),
    make_family("ResiDual", partial(ResiDual, pre, final_norm=True), factor("resi_dual")),
    make_family("B2T", partial(BottomToTop, pre), stream("b2t")),
    make_family("a class token joins", partial(Joined, pre, final_norm=True), pre_ln()),
    make_family("highway", lambda: Tiny(highway), remark="x' = g f(N(x)) + (1 - g) x, and the gate g depends on x: no stream"),
    make_family("no residual, normed", lambda: Tiny(lambda s, x: s.norm(s.f(x))), remark="nothing is added: no stream"),
    make_family("no residual", lambda: Tiny(lambda s, x: s.f(x)), remark="no stream"),
    make_family("recurrent", Recurrent, remark="no stream"),
    Model("perceptron", lambda: nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D)),
           lambda: (noise(2, D),), Answer(()), "no stream"),
)  # fmt: skip
