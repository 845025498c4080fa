"""Adversarial models with misleading names or code, and correct models beside them, each with the expected streams.

    model, args, kwargs = adversarial_models()["alpha on the branch"].build()

Models in `WRONG` have typical mistakes (a norm or a factor at the wrong place). Models in `RIGHT` are correct in a spelling that the
random models do not have; `OTHER` has a model without modules.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from addnorm import Row
from support.answers import Answer
from support.families import AF, Model, rms, table
from support.handwritten_models import (
    EPS,
    HEADS,
    VOCAB,
    Attention,
    D,
    Mlp,
    chain,
    factor,
    heads,
    post_ln,
    pre,
    pre_ln,
    stream,
    tiny_family,
    tokens,
)

ALPHA = 4 ** (1 / 4)  # DeepNorm's constants for two layers


# --- mistakes -----------------------------------------------------------------------------------------------------------


class PreNormBlock(nn.Module):
    """A pre-LN block: the input of each sublayer is normalized first, x + f(norm(x))."""

    def __init__(self):
        super().__init__()
        self.pre_norm_attention, self.pre_norm_mlp = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x):
        x = self.pre_norm_attention(x + self.attention(x))  # the block is post-LN
        return self.pre_norm_mlp(x + self.mlp(x))


def from_the_norm(part, x):
    z = part.norm(x)
    return z + part.f(z)


def half(which):
    """Take the residual of one kind of sublayers from the normalized input (wrong), and that of the others from the stream."""
    return lambda part, x: (from_the_norm if isinstance(part.f, which) else pre)(part, x)


BOTH = Row(norm_in=True, norm_out=True)
WRONG = (
    tiny_family("alpha on the branch", lambda s, x: s.norm(x + ALPHA * s.f(x)),
         stream(None, rows=[Row(norm_out=True, b=ALPHA)]), "DeepNorm with alpha on the wrong term"),
    tiny_family("alpha on the sum", lambda s, x: s.norm(ALPHA * (x + s.f(x))),
         stream(None, rows=[Row(norm_out=True, a=ALPHA, b=ALPHA)])),
    tiny_family("alpha on a pre-LN stream", lambda s, x: ALPHA * x + s.f(s.norm(x)),
         stream(None, rows=[Row(norm_in=True, a=ALPHA)], final_norm=True), "the stream grows by alpha each time"),
    Model("named pre-LN, is post-LN", partial(chain, PreNormBlock, PreNormBlock), tokens, Answer((post_ln(),))),
    tiny_family("attention's residual from the norm", half(Attention),
         stream(None, embedding_norm=True, rows={0: Row(), 1: BOTH, 2: Row(), 3: Row(norm_in=True)}), embedding_norm=False),
    tiny_family("feed-forward's residual from the norm", half(Mlp),
         stream(None, rows={0: BOTH, 1: Row(), 2: BOTH, 3: Row()}, final_norm=True)),
    tiny_family("pre-LN that forgets the add", lambda s, x: s.f(s.norm(x)) if s.number == 2 else pre(s, x),
         pre_ln(AF, remark="the second layer's sublayers replace the stream: to it they are a head after a final norm"),
         final_norm=False),
)  # fmt: skip


# --- correct --------------------------------------------------------------------------------------------------------------


class Rotary(Attention):
    """Rotary embedding. Its q * cos + rotate(q) * sin adds two functions of one tensor, but is not a residual add."""

    def turned(self, q, k):
        half = q.shape[-1] // 2
        angle = torch.arange(q.shape[-2])[:, None] * 10.0 ** -torch.arange(half)
        cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()

        def turn(x):
            return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

        return turn(q), turn(k)


class NormedHeads(Attention):
    """Attention with norms of queries and keys, which are not on the stream, as in OLMo 2."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(D, eps=1e-3), nn.RMSNorm(D, eps=1e-3)
        self.q, self.k = nn.Sequential(self.q, self.q_norm), nn.Sequential(self.k, self.k_norm)


RIGHT = (
    tiny_family("no norm, half of the branch", lambda s, x: x + 0.5 * s.f(x), stream(None, norm=None, eps=None, rows=[Row(b=0.5)])),
    tiny_family("x - f", lambda s, x: x - s.f(s.norm(x)), factor("residual_multiplier", options={"multiplier": -1.0})),
    tiny_family("drop path at work", lambda s, x: x + s.always(s.f(s.norm(x))),
         pre_ln(remark="a sample's branch is times 0 or 1.25, by chance")),
    tiny_family("rotary", pre, pre_ln(), functions=(Rotary, Mlp)),
    tiny_family("normed queries", pre, pre_ln(), functions=(NormedHeads, Mlp)),
)  # fmt: skip


# --- no chain of sublayers ------------------------------------------------------------------------------------------------


class Functions(nn.Module):
    """Model of functions on a list of tensors, without modules."""

    def __init__(self):
        super().__init__()
        shapes = 2 * ((D, 3 * D), (D, D), (D, 2 * D), (2 * D, D))
        self.matrices = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in ((VOCAB, D), *shapes))

    @staticmethod
    def block(x, qkv, out, up, down):
        q, k, v = (heads(part) for part in (F.rms_norm(x, (D,), eps=EPS) @ qkv).chunk(3, -1))
        mixed = torch.softmax(q @ k.mT * (D // HEADS) ** -0.5, -1) @ v
        x = x + mixed.transpose(1, 2).flatten(-2) @ out
        return x + torch.relu(F.rms_norm(x, (D,), eps=EPS) @ up).square() @ down

    def forward(self, ids):
        table, *matrices = self.matrices
        x = table[ids]
        for i in range(0, len(matrices), 4):
            x = self.block(x, *matrices[i : i + 4])
        return F.rms_norm(x, (D,), eps=EPS)


OTHER = (
    Model("functions", Functions, tokens, Answer((pre_ln(norm=rms),)), "its norms have no weights"),
)  # fmt: skip


def adversarial_models():
    return table(WRONG + RIGHT + OTHER)
