"""Sublayers in the spellings of real code, for any layout of the stream."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Sublayer(nn.Module):
    """Function of the stream in a layout; `core` computes it in the canonical layout (B, T, D)."""

    kind = "feed-forward"
    tokenwise = False  # `core` accepts any layout with the features last

    def __init__(self, layout):
        super().__init__()
        self.layout = layout
        self.d, self.heads, self.tokens = layout.sizes.features, layout.sizes.heads, layout.sizes.tokens
        self.make_parts()

    def make_parts(self):
        """Make the modules."""

    def core(self, x):
        raise NotImplementedError

    def forward(self, x):
        if self.tokenwise and self.layout.features_last:
            return self.core(x)
        return self.layout.apply(self.core(self.layout.undo(x)))

    def by_hand(self, x):
        """Return the function of a canonical tensor."""
        return self.layout.undo(self(self.layout.apply(x)))


# --- attention -----------------------------------------------------------------------------------------------------------


class Attention(Sublayer):
    """Attention written out."""

    kind = "attention"

    def make_parts(self):
        self.q, self.k, self.v, self.out = (nn.Linear(self.d, self.d) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def weigh(self, scores):
        return scores.softmax(-1)

    def attend(self, q, k, v):
        return self.weigh(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])) @ v

    def core(self, x, memory=None):
        memory = x if memory is None else memory
        mixed = self.attend(self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory)))
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Scaled(Attention):
    """F.scaled_dot_product_attention."""

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Causal(Attention):
    """Attention with a mask of the tokens after each token."""

    def weigh(self, scores):
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -1e9).softmax(-1)


class TalkingHeads(Attention):
    """Attention whose heads are mixed before and after the softmax (CaiT)."""

    def make_parts(self):
        super().make_parts()
        self.before, self.after = nn.Linear(self.heads, self.heads), nn.Linear(self.heads, self.heads)

    def weigh(self, scores):
        mixed = self.before(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.after(mixed.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Packed(Attention):
    """Attention whose queries, keys and values are one product; sums as einsum."""

    def make_parts(self):
        super().make_parts()
        del self.q, self.k, self.v
        self.qkv = nn.Linear(self.d, 3 * self.d)

    def core(self, x, memory=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = torch.einsum("bhid,bhjd->bhij", q * q.shape[-1] ** -0.5, k).softmax(-1)
        return self.out(torch.einsum("bhij,bhjd->bihd", weights, v).flatten(-2))


class GatedAttention(Attention):
    """Attention whose output is gated by a sigmoid of its input."""

    def make_parts(self):
        super().make_parts()
        self.gate = nn.Linear(self.d, self.d)

    def core(self, x, memory=None):
        return super().core(x, memory) * torch.sigmoid(self.gate(x))


class Multihead(Sublayer):
    """nn.MultiheadAttention, native in batch-first and sequence-first layouts."""

    kind = "attention"

    def make_parts(self):
        self.attention = nn.MultiheadAttention(self.d, self.heads, batch_first=self.layout.name != "sequence")

    def core(self, x):
        return self.attention(x, x, x, need_weights=False)[0]

    def forward(self, x):
        return self.core(x) if self.layout.name == "sequence" else super().forward(x)


# --- feed-forward --------------------------------------------------------------------------------------------------------


class Mlp(Sublayer):
    tokenwise = True
    widens = 2

    def make_parts(self):
        self.up, self.down = nn.Linear(self.d, self.widens * self.d), nn.Linear(self.widens * self.d, self.d)

    def act(self, x):
        return F.gelu(x)

    def core(self, x):
        return self.down(self.act(self.up(x)))


class Relu(Mlp):
    """Feed-forward as a Sequential."""

    def make_parts(self):
        super().make_parts()
        self.net = nn.Sequential(self.up, nn.ReLU(), nn.Dropout(0.1), self.down)
        del self.up, self.down

    def core(self, x):
        return self.net(x)


class WrittenGelu(Mlp):
    """GELU written out at the width of the stream: its x + 0.044715 x^3 is no residual add."""

    widens = 1

    def act(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


class Gated(Mlp):
    """SwiGLU."""

    def make_parts(self):
        super().make_parts()
        self.gate = nn.Linear(self.d, self.widens * self.d)

    def core(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Chunked(Mlp):
    """GEGLU of one product."""

    def make_parts(self):
        super().make_parts()
        self.up = nn.Linear(self.d, 2 * self.widens * self.d)

    def core(self, x):
        value, gate = self.up(x).chunk(2, -1)
        return self.down(value * F.gelu(gate))


class Experts(Sublayer):
    """Mixture of two experts of three for each token."""

    tokenwise = True

    def make_parts(self):
        self.router = nn.Linear(self.d, 3)
        self.experts = nn.ModuleList(Relu(self.layout) for _ in range(3))

    def core(self, x):
        tokens = x.reshape(-1, self.d)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == i)
            out.index_add_(0, token, expert.core(tokens[token]) * weights[token, rank, None])
        return out.view(x.shape)


class Pointwise(Sublayer):
    """Feed-forward as 1 x 1 convolutions, native where the channels are first."""

    def make_parts(self):
        conv = nn.Conv2d if self.layout.name == "image channels" else nn.Conv1d
        self.up, self.down = conv(self.d, 2 * self.d, 1), conv(2 * self.d, self.d, 1)

    def forward(self, x):
        if not self.layout.features_last:
            return self.down(F.gelu(self.up(x)))
        return super().forward(x)

    def core(self, x):
        return self.down(F.gelu(self.up(x.transpose(1, 2)))).transpose(1, 2)


# --- others --------------------------------------------------------------------------------------------------------------


class Mixer(Pointwise):
    """Product over the tokens (MLP-Mixer)."""

    kind = "other"
    forward = Sublayer.forward

    def make_parts(self):
        self.up, self.down = nn.Linear(self.tokens, 9), nn.Linear(9, self.tokens)


class Convolution(Sublayer):
    """Convolution over the tokens and one of single tokens (ConvNeXt, Conformer)."""

    kind = "other"

    def make_parts(self):
        self.depthwise = nn.Conv1d(self.d, self.d, 3, padding=1, groups=self.d)
        self.pointwise = nn.Conv1d(self.d, self.d, 1)

    def core(self, x):
        return self.pointwise(F.silu(self.depthwise(x.transpose(1, 2)))).transpose(1, 2)


class Pool(Sublayer):
    """Mean over neighbours without the token itself, pool(x) - x, and a product (PoolFormer)."""

    kind = "other"

    def make_parts(self):
        self.out = nn.Linear(self.d, self.d)

    def core(self, x):
        pooled = F.avg_pool1d(x.transpose(1, 2), 3, 1, 1, count_include_pad=False).transpose(1, 2)
        return self.out(pooled - x)


class Recurrence(Sublayer):
    """nn.GRU over the tokens."""

    kind = "other"

    def make_parts(self):
        self.gru = nn.GRU(self.d, self.d, batch_first=True)

    def core(self, x):
        return self.gru(x)[0]


ATTENTIONS = (Attention, Scaled, Causal, TalkingHeads, Packed, GatedAttention, Multihead)
FEED_FORWARDS = (Mlp, Relu, WrittenGelu, Gated, Chunked, Experts)
OTHERS = (Mixer, Convolution, Pool, Recurrence)
SUBLAYERS = {"a": ATTENTIONS, "f": FEED_FORWARDS, "o": OTHERS}
PLAIN = {"a": (Attention, Scaled), "f": (Mlp, Gated), "o": (Convolution,)}


def draw_sublayer(rng, letter, is_plain):
    """Return a class of sublayers of a kind: "a" attention, "f" feed-forward, "o" other."""
    make = rng.choice((PLAIN if is_plain else SUBLAYERS)[letter])
    if letter == "f" and not is_plain and rng.random() < 0.2:
        return Pointwise
    return make
