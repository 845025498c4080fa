"""A small language model, and ways to shard it."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from support import parallel_models
from support.dtensors import mesh_of
from support.stacks import D as WIDTH
from support.stacks import Mlp
from support.torch_transformers import randomize

HEADS, LAYERS = 4, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Layer with a learned scale of each write. `post` places the norms on the stream."""

    def __init__(self, post=False):
        super().__init__()
        self.attention, self.feed_forward = Attention(), Mlp()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.scale1, self.scale2 = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.post = post

    def forward(self, x):
        if self.post:
            x = self.norm1(x + self.scale1 * self.attention(x))
            return self.norm2(x + self.scale2 * self.feed_forward(x))
        x = x + self.scale1 * self.attention(self.norm1(x))
        return x + self.scale2 * self.feed_forward(self.norm2(x))


class Model(nn.Module):
    def __init__(self, post=False):
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(Block(post) for _ in range(LAYERS))
        self.norm = nn.Identity() if post else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(post=False):
    torch.manual_seed(0)
    return randomize(Model(post), size=0.1)


def tokens():
    return torch.randint(0, 20, (2, 6), generator=torch.Generator().manual_seed(1))


def shard(model, **options):
    return parallel_models.shard(model, *model.layers, **options)


def tensor_parallel(model):
    plan = {}
    for k in range(LAYERS):
        for name in ("attention.q", "attention.k", "attention.v", "feed_forward.up"):
            plan[f"layers.{k}.{name}"] = ColwiseParallel()
        plan[f"layers.{k}.attention.o"] = plan[f"layers.{k}.feed_forward.down"] = RowwiseParallel()
    return parallelize_module(model, mesh_of(), plan)


def sequence_parallel(model):
    """Return a model whose stream is a DTensor, sharded by tokens."""
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)}
    for k in range(LAYERS):
        layer = f"layers.{k}"
        plan[f"{layer}.norm1"] = plan[f"{layer}.norm2"] = SequenceParallel()
        for name in ("attention", "feed_forward"):
            plan[f"{layer}.{name}"] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=False
            )
        for name in ("attention.q", "attention.k", "attention.v", "feed_forward.up"):
            plan[f"{layer}.{name}"] = ColwiseParallel()
        for name in ("attention.o", "feed_forward.down"):
            plan[f"{layer}.{name}"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    plan["norm"] = SequenceParallel()
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    model = parallelize_module(model, mesh_of(), plan)
    for layer in model.layers:
        for name in ("scale1", "scale2"):
            replicated = DTensor.from_local(getattr(layer, name).data, mesh_of(), [Replicate()])
            setattr(layer, name, nn.Parameter(replicated))
    return model
