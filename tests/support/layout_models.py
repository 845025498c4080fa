"""Small models whose streams have different layouts. Each logs the tensors of its sublayers, as (sequences, tokens, features).

The statistics of `record` are compared with numbers computed from these tensors by their formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D = 8
Arrange = Callable[[Tensor], Tensor]  # from a tensor of the model to (sequences, tokens, features)


@dataclass
class Sublayer:
    """Tensors of one sublayer; `arrange` brings the stream into (sequences, tokens, features)."""

    x: Tensor
    read: Tensor
    raw: Tensor
    out: Tensor
    arrange: Arrange
    normed: Tensor | None


def same(t):
    return t


def transposed(t):
    return t.transpose(0, 1)


def channels_first(t):
    return t.flatten(2).transpose(1, 2)


def grid(t):
    return t.flatten(1, 2)


class Logged(nn.Module):
    """Model that logs the tensors of its sublayers by stream, and can replace a write by its mean over all tokens."""

    def __init__(self):
        super().__init__()
        self.seen = None
        self.averaged = None  # stream and number of the sublayer whose write is replaced
        self._count = {}

    def add(
        self,
        x,
        read,
        raw,
        arrange,
        *,
        name="",
        norm=True,
        dim=-1,
    ):
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

    def __call__(self, *args):
        self._count = {}
        return super().__call__(*args)


class Attention(nn.Module):
    """Attention over the second to last dimension."""

    def __init__(self, d=D, heads=2):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(d, 3 * d), nn.Linear(d, d), heads

    def forward(self, x, context=None):
        q, _, _ = self.qkv(x).chunk(3, -1)
        _, k, v = self.qkv(x if context is None else context).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


def feed_forward(d=D):
    return nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))


class Blocks(Logged):
    """Layers with a norm, a token mixer and a feed-forward sublayer."""

    def __init__(self, layers=2, mixer=Attention, d=D):
        super().__init__()
        self.n1, self.n2 = (nn.ModuleList(nn.LayerNorm(d) for _ in range(layers)) for _ in range(2))
        self.mix = nn.ModuleList(mixer() for _ in range(layers))
        self.mlp = nn.ModuleList(feed_forward(d) for _ in range(layers))

    def run(self, x, k, arrange, mix=None):
        """Return the stream after layer k; `mix` calls the token mixer on the normed stream."""
        read = self.n1[k](x)
        x = self.add(x, read, self.mix[k](read) if mix is None else mix(self.mix[k], read), arrange)
        read = self.n2[k](x)
        return self.add(x, read, self.mlp[k](read), arrange)


def over_first(attention, read):
    """Apply attention over the first dimension, as models with (tokens, batch, features) do."""
    return attention(read.transpose(0, 1)).transpose(0, 1)


class SequenceFirst(Blocks):
    """The stream is (tokens, batch, features) from the model's input on."""

    def forward(self, x):
        for k in range(2):
            x = self.run(x, k, transposed, over_first)
        return x


class TorchSequenceFirst(Logged):
    """torch's own attention, sequence first."""

    def __init__(self):
        super().__init__()
        self.n, self.f = nn.LayerNorm(D), feed_forward()
        self.attention = nn.ModuleList(nn.MultiheadAttention(D, 2) for _ in range(2))

    def forward(self, x):
        for attention in self.attention:
            read = self.n(x)
            x = self.add(x, read, attention(read, read, read, need_weights=False)[0], transposed)
            read = self.n(x)
            x = self.add(x, read, self.f(read), transposed)
        return x


class TransposedAfterEmbedding(Blocks):
    """An embedding (batch, tokens, features) is transposed, and the result is the stream."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, D)

    def forward(self, ids):
        x = self.embed(ids).transpose(0, 1)
        for k in range(2):
            x = self.run(x, k, transposed, over_first)
        return x.transpose(0, 1)


class TransposedAfterLinear(Blocks):
    """A projection, whose product has flat tokens, is transposed, and no sublayer mixes tokens."""

    def __init__(self):
        super().__init__(mixer=feed_forward)
        self.project = nn.Linear(3, D)

    def forward(self, x):
        x = self.project(x).transpose(0, 1)
        for k in range(2):
            x = self.run(x, k, transposed)
        return x


class ChannelsFirst(Logged):
    """ConvNeXt: the stream is (batch, features, height, width), and its norm reads a permuted view of a convolution."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, D, 2, 2)
        self.conv = nn.ModuleList(nn.Conv2d(D, D, 3, padding=1, groups=D) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.mlp = nn.ModuleList(feed_forward() for _ in range(2))

    def forward(self, image):
        x = self.stem(image)
        for conv, norm, mlp in zip(self.conv, self.norm, self.mlp, strict=True):
            raw = mlp(norm(conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
            x = self.add(x, x, raw, channels_first, norm=False, dim=-3)
        return x


class Windows(Blocks):
    """Swin: the stream is (batch, height, width, features), attention runs in windows of 2 x 2, shifted in the second layer."""

    def forward(self, x):
        for k in range(2):
            x = self.run(x, k, grid, lambda attention, read, k=k: self.attend(attention, read, k))
        return x

    def attend(self, attention, x, shift):
        batch, height, width, d = x.shape
        if shift:
            x = x.roll((-shift, -shift), (1, 2))
        windows = x.view(batch, height // 2, 2, width // 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, d)
        y = attention(windows).view(batch, height // 2, width // 2, 2, 2, d).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(batch, height, width, d)
        return y.roll((shift, shift), (1, 2)) if shift else y


class Expanded(Blocks):
    """x_0 is a learned token sequence, expanded over the batch."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(5, D))

    def forward(self, context):
        x = self.query.expand(context.shape[0], 5, D)
        for k in range(2):
            x = self.run(x, k, same, lambda attention, read: attention(read, torch.cat([read, context], 1)))
        return x


class Flat(Blocks):
    """The stream is (batch * tokens, features); attention separates the sequences."""

    def forward(self, x):
        batch = x.shape[0]
        x = x.flatten(0, 1)
        for k in range(2):
            x = self.run(
                x, k, lambda t: t.unflatten(0, (batch, -1)),
                lambda attention, read: attention(read.view(batch, -1, D)).reshape(-1, D),
            )  # fmt: skip
        return x


class TwoLayouts(Logged):
    """Attention adds to (batch, tokens, features), a convolution to (batch, features, height, width)."""

    def __init__(self):
        super().__init__()
        self.n, self.attention = (
            nn.ModuleList(nn.LayerNorm(D) for _ in range(2)),
            nn.ModuleList(Attention() for _ in range(2)),
        )
        self.conv = nn.ModuleList(nn.Conv2d(D, D, 3, padding=1) for _ in range(2))

    def forward(self, x):
        batch, height, width, _ = x.shape
        x = x.flatten(1, 2)
        for n, attention, conv in zip(self.n, self.attention, self.conv, strict=True):
            read = n(x)
            x = self.add(x, read, attention(read), same)
            image = x.transpose(1, 2).reshape(batch, D, height, width)
            image = self.add(image, image, torch.tanh(conv(image)), channels_first, norm=False, dim=-3)
            x = image.flatten(2).transpose(1, 2)
        return x


class ClassToken(Blocks):
    """A class token joins the tokens before the second layer."""

    def __init__(self):
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x):
        x = self.run(x, 0, same)
        x = torch.cat([self.cls.expand(x.shape[0], 1, D), x], 1)
        return self.run(x, 1, same)


class Sliced(Blocks):
    """Every second token leaves the stream before the second layer."""

    def forward(self, x):
        return self.run(self.run(x, 0, same)[:, ::2], 1, same)


class Recurrent(Blocks):
    """One block of two sublayers is used three times."""

    def __init__(self):
        super().__init__(layers=1)

    def forward(self, x):
        for _ in range(3):
            x = self.run(x, 0, same)
        return x


class Mixer(Blocks):
    """MLP-Mixer, sequence first: products with parameters mix the tokens."""

    def __init__(self):
        super().__init__(mixer=lambda: feed_forward(5))

    def forward(self, x):
        for k in range(2):
            x = self.run(x, k, transposed, lambda mlp, read: mlp(read.transpose(0, 2)).transpose(0, 2))
        return x


class TwoStreams(Logged):
    """Two streams, (batch, tokens, features) and (tokens, batch, features), whose sublayers run in one block."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.n, self.m = Attention(), Attention(), nn.LayerNorm(D), nn.LayerNorm(D)

        def forward(self, x, c):
            r, s = self.n(x), self.m(c)
            y, e = self.a(r, torch.cat([r, s.transpose(0, 1)], 1)), self.b(s.transpose(0, 1), r).transpose(0, 1)
            return r, s, y, e

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x, c):
        for block in self.blocks:
            r, s, y, e = block(x, c)
            x = self.add(x, r, y, same, name="0")
            c = self.add(c, s, e, transposed, name="1")
        return x, c


class EncoderDecoder(Logged):
    """An encoder and a decoder that reads its result, both sequence first."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (nn.ModuleList(Attention() for _ in range(4)) for _ in range(2))
        self.n = nn.ModuleList(nn.LayerNorm(D) for _ in range(8))
        self.last = nn.LayerNorm(D)

    def forward(self, source, target):
        x, y = source, target
        for k, attention in enumerate(self.encoder):
            read = self.n[k](x)
            x = self.add(x, read, over_first(attention, read), transposed, name="0")
        memory = self.last(x).transpose(0, 1)
        for k, attention in enumerate(self.decoder):
            read = self.n[4 + k](y)
            context = memory if k % 2 else None
            y = self.add(y, read, attention(read.transpose(0, 1), context).transpose(0, 1), transposed, name="1")
        return y


# For each model the shapes of its inputs; a dtype of integers for token numbers. Sizes that could be confused are equal.
MODELS = {
    "sequence first": (SequenceFirst, ((5, 3, D),)),
    "sequence first, as many tokens as sequences": (SequenceFirst, ((4, 4, D),)),
    "torch, sequence first": (TorchSequenceFirst, ((3, 5, D),)),
    "transposed after an embedding": (TransposedAfterEmbedding, ((3, 5),)),
    "transposed after a projection": (TransposedAfterLinear, ((3, 5, 3),)),
    "channels first": (ChannelsFirst, ((2, 3, 6, 2 * D),)),
    "windows": (Windows, ((2, 4, 6, D),)),
    "expanded": (Expanded, ((3, 4, D),)),
    "flat tokens": (Flat, ((3, 5, D),)),
    "two layouts in turn": (TwoLayouts, ((2, 3, D, D),)),
    "class token": (ClassToken, ((3, 5, D),)),
    "sliced": (Sliced, ((3, 6, D),)),
    "recurrent": (Recurrent, ((3, 5, D),)),
    "mixer, sequence first": (Mixer, ((5, 3, D),)),
    "two streams": (TwoStreams, ((3, 5, D), (4, 3, D))),
    "encoder and decoder": (EncoderDecoder, ((6, 3, D), (4, 3, D))),
}


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
