"""Small models whose streams have different layouts. Each logs the tensors of its sublayers, as (sequences, tokens, features).

The statistics of `record` are compared with numbers computed from these tensors by their formulas.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from support import handwritten_models

D = 8


@dataclass
class Sublayer:
    """Tensors of one sublayer; `arrange` brings the stream into (sequences, tokens, features)."""

    x: Tensor
    read: Tensor
    raw: Tensor
    out: Tensor
    arrange: Any
    normed: Tensor | None


def same(t):
    return t


def transposed(t):
    return t.transpose(0, 1)


def channels_first(t):
    return t.flatten(2).transpose(1, 2)


def grid(t):
    return t.flatten(1, 2)


Attention = partial(handwritten_models.Attention, D)


def feed_forward(d=D):
    return nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))


class Logged(nn.Module):
    """Model that logs the tensors of its sublayers by stream, and can replace a write by its mean over all tokens.

    Args:
        run: the forward, a function of the model and its inputs.
        mixer: makes the token mixer of each layer.
        layers: number of layers; each has a norm and a token mixer, and a norm and a feed-forward sublayer.
        parts: other modules and parameters.
    """

    def __init__(self, run, mixer=Attention, layers=2, **parts):
        super().__init__()
        self.run = run
        self.n1, self.n2 = (nn.ModuleList(nn.LayerNorm(D) for _ in range(layers)) for _ in range(2))
        self.mix = nn.ModuleList(mixer() for _ in range(layers))
        self.mlp = nn.ModuleList(feed_forward() for _ in range(layers))
        for name, part in parts.items():
            setattr(self, name, part)
        self.seen = None  # the sublayers of each stream
        self.averaged = None  # stream and number of the sublayer whose write is replaced
        self._count = {}

    def add(self, x, read, raw, arrange, *, name="", norm=True, dim=-1):
        """Return x + raw and log the sublayer; `dim` is the dimension of the features."""
        number = self._count[name] = self._count.get(name, -1) + 1
        if self.averaged == (name, number):
            mean = arrange(raw).mean((0, 1))
            raw = mean.reshape(*mean.shape, *(1,) * (-1 - dim)).expand_as(raw)
        out = x + raw
        if self.seen is not None:
            for tensor in (x, out):
                if tensor.requires_grad:
                    tensor.retain_grad()
            self.seen.setdefault(name, []).append(Sublayer(x, read, raw, out, arrange, x if norm else None))
        return out

    def layer(self, x, k, arrange, mix=None):
        """Return the stream after layer k; `mix` calls the token mixer on the normed stream."""
        read = self.n1[k](x)
        x = self.add(x, read, self.mix[k](read) if mix is None else mix(self.mix[k], read), arrange)
        read = self.n2[k](x)
        return self.add(x, read, self.mlp[k](read), arrange)

    def forward(self, *args):
        self._count = {}
        return self.run(self, *args)


def chain(arrange, mix=None, begin=None):
    """Return the forward of two layers after `begin(model, x)`."""

    def run(m, x):
        x = begin(m, x) if begin else x
        for k in range(2):
            x = m.layer(x, k, arrange, mix)
        return x

    return run


def over_first(attention, read):
    """Apply attention over the first dimension, as models with (tokens, batch, features) do."""
    return attention(read.transpose(0, 1)).transpose(0, 1)


def transposed_after_embedding(m, ids):
    """Transpose an embedding (batch, tokens, features): the result is the stream."""
    return chain(transposed, over_first)(m, m.embed(ids).transpose(0, 1)).transpose(0, 1)


def windows(m, x):
    """Run a Swin: (batch, height, width, features), with attention in windows of 2 x 2, shifted in the second layer."""
    for k in range(2):
        x = m.layer(x, k, grid, partial(attend_windows, shift=k))
    return x


def attend_windows(attention, x, shift):
    batch, height, width, d = x.shape
    if shift:
        x = x.roll((-shift, -shift), (1, 2))
    tokens = x.view(batch, height // 2, 2, width // 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, d)
    y = attention(tokens).view(batch, height // 2, width // 2, 2, 2, d).permute(0, 1, 3, 2, 4, 5)
    y = y.reshape(batch, height, width, d)
    return y.roll((shift, shift), (1, 2)) if shift else y


def flat(m, x):
    """Run on (batch * tokens, features); attention separates the sequences."""
    batch = x.shape[0]
    run = chain(
        lambda t: t.unflatten(0, (batch, -1)),
        lambda attention, read: attention(read.view(batch, -1, D)).reshape(-1, D),
    )
    return run(m, x.flatten(0, 1))


def two_layouts(m, x):
    """Add attention to (batch, tokens, features), and a convolution to (batch, features, height, width)."""
    batch, height, width, _ = x.shape
    x = x.flatten(1, 2)
    for n, attention, conv in zip(m.n1, m.mix, m.conv, strict=True):
        read = n(x)
        x = m.add(x, read, attention(read), same)
        image = x.transpose(1, 2).reshape(batch, D, height, width)
        image = m.add(image, image, torch.tanh(conv(image)), channels_first, norm=False, dim=-3)
        x = image.flatten(2).transpose(1, 2)
    return x


def class_token(m, x):
    """Join a class token to the tokens before the second layer."""
    x = m.layer(x, 0, same)
    return m.layer(torch.cat([m.cls.expand(x.shape[0], 1, D), x], 1), 1, same)


class Block(nn.Module):
    """Two sublayers, one of each stream."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.n, self.m = Attention(), Attention(), nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x, c):
        r, s = self.n(x), self.m(c)
        y, e = self.a(r, torch.cat([r, s.transpose(0, 1)], 1)), self.b(s.transpose(0, 1), r).transpose(0, 1)
        return r, s, y, e


def two_streams(m, x, c):
    """Run two streams, (batch, tokens, features) and (tokens, batch, features), whose sublayers run in one block."""
    for block in m.mix:
        r, s, y, e = block(x, c)
        x = m.add(x, r, y, same, name="0")
        c = m.add(c, s, e, transposed, name="1")
    return x, c


def encoder_decoder(m, source, target):
    """Run an encoder and a decoder that reads its result, both sequence first."""
    x, y = source, target
    for norm, attention in zip(m.n1, m.mix, strict=True):
        read = norm(x)
        x = m.add(x, read, over_first(attention, read), transposed, name="0")
    memory = m.last(x).transpose(0, 1)
    for k, (norm, attention) in enumerate(zip(m.n2, m.decoder, strict=True)):
        read = norm(y)
        context = memory if k % 2 else None
        y = m.add(y, read, attention(read.transpose(0, 1), context).transpose(0, 1), transposed, name="1")
    return y


def make_list(make, count=2):
    return nn.ModuleList(make() for _ in range(count))


def make_sequence_first():
    return Logged(chain(transposed, over_first))


# For each model the shapes of its inputs. Sizes that could be confused are equal.
MODELS = {
    "sequence first": (make_sequence_first, ((5, 3, D),)),
    "sequence first, as many tokens as sequences": (make_sequence_first, ((4, 4, D),)),
    "torch, sequence first": (
        lambda: Logged(
            chain(transposed, lambda attention, read: attention(read, read, read, need_weights=False)[0]),
            lambda: nn.MultiheadAttention(D, 2),
        ),
        ((3, 5, D),),
    ),
    "transposed after an embedding": (lambda: Logged(transposed_after_embedding, embed=nn.Embedding(11, D)), ((3, 5),)),
    "transposed after a projection": (  # whose product has flat tokens, and no sublayer mixes tokens
        lambda: Logged(
            chain(transposed, begin=lambda m, x: m.project(x).transpose(0, 1)), feed_forward, project=nn.Linear(3, D)
        ),
        ((3, 5, 3),),
    ),
    "windows": (lambda: Logged(windows), ((2, 4, 6, D),)),
    "flat tokens": (lambda: Logged(flat), ((3, 5, D),)),
    "two layouts in turn": (
        lambda: Logged(two_layouts, conv=make_list(lambda: nn.Conv2d(D, D, 3, padding=1))), ((2, 3, D, D),),
    ),
    "class token": (lambda: Logged(class_token, cls=nn.Parameter(torch.randn(1, 1, D))), ((3, 5, D),)),
    "mixer, sequence first": (
        lambda: Logged(
            chain(transposed, lambda mlp, read: mlp(read.transpose(0, 2)).transpose(0, 2)), lambda: feed_forward(5)
        ),
        ((5, 3, D),),
    ),
    "two streams": (lambda: Logged(two_streams, Block), ((3, 5, D), (4, 3, D))),
    "encoder and decoder": (
        lambda: Logged(encoder_decoder, layers=4, decoder=make_list(Attention, 4), last=nn.LayerNorm(D)),
        ((6, 3, D), (4, 3, D)),
    ),
}  # fmt: skip


def make(name, seed=0):
    """Return a model in float64 with random norms, and its inputs."""
    torch.manual_seed(seed)
    build, shapes = MODELS[name]
    model = build().double()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(std=0.2)
    is_ids = name == "transposed after an embedding"
    return model, tuple(
        torch.randint(11, shape) if is_ids else torch.randn(shape, dtype=torch.float64) for shape in shapes
    )
