"""The sublayers of a stack in a plain PyTorch loop, which benchmarks compare with it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from addnorm import ResidualStack, fuse
from addnorm.nn import Decoder, Encoder, KeyValueCache, RMSNorm, SelfAttention
from addnorm.ops.streams import formula
from addnorm.ops.streams.kinds import GATE_KINDS

JOBS = {"inference": "inference", "training": "forward + backward"}
LAYERS, HEAD_DIM = 4, 64
PAST = 512  # tokens in the cache of a step that decodes one
TITLES = {**JOBS, "decode": f"one token after {PAST} in the cache"}  # of a decoder's jobs
DECODED = (("inference", 1, 512), ("decode", 1, 1), ("training", 1, 512))  # job, batch and tokens of a decoder


def encoder(d: int, wiring: str) -> Encoder:
    """Return an encoder of a wiring with LayerNorm, as wide as `d`."""
    return Encoder(LAYERS, d, d // HEAD_DIM, dim_feedforward=4 * d, wiring=wiring, norm="layer")


def decoder(d: int, wiring: str, dtype: torch.dtype) -> Decoder:
    """Return a decoder with RMSNorm and SwiGLU: in pre_ln like Llama and Qwen, in sandwich like Gemma."""
    return Decoder(
        LAYERS,
        d,
        d // HEAD_DIM,
        wiring=wiring,
        cross_attention=False,
        activation="swiglu",
        norm="rms",
        eps=1e-6,
        bias=False,
        dtype=dtype,
    )


def fill_cache(module: nn.Module, past: Tensor) -> KeyValueCache:
    """Return a cache with the tokens `past` of a decoder."""
    cache = KeyValueCache()
    with torch.no_grad():
        module(past, cache=cache)
    return cache


def decode(module: nn.Module, past: Tensor) -> Any:
    """Return a call of a decoder that has `past` tokens in its cache before each call."""
    cache, (_, tokens, _) = fill_cache(module, past), past.shape

    def call(x: Tensor) -> Tensor:
        y: Tensor = module(x, cache=cache)
        cache.truncate(tokens)
        return y

    return call


def measure_share(module: nn.Module, x: Tensor, past: Tensor | None) -> float | None:
    """Return the share of Add & Norm in a forward pass of a decoder with `past` tokens in its cache, as `fuse` measures it."""
    module = copy.deepcopy(module)  # which is fused
    return fuse(module, x.detach(), benchmark=False, cache=None if past is None else fill_cache(module, past)).share


class WrittenOut(nn.Module):
    """RMSNorm in torch's operators, as Llama's code has it."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        assert norm.eps is not None, "a decoder's norms have a number for eps"
        self.weight, self.eps = norm.weight, float(norm.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of `x`, in its dtype."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Plain(nn.Module):
    """The very sublayers and parameters of a stack in the loop that most people write, with torch's own operators."""

    def __init__(self, stack: ResidualStack) -> None:
        super().__init__()
        connections: Any = stack.connections
        self.wiring = stack.wiring.name
        self.sublayers = nn.ModuleList(one.sublayer for one in connections)
        self.has_context = [isinstance(sublayer, SelfAttention) for sublayer in self.sublayers]
        self.norms = nn.ModuleList(torch_norm(one.norm_in or one.norm_out) for one in connections)
        self.norms_branch = nn.ModuleList(
            torch_norm(norm) for one in connections if (norm := one.norm_branch) is not None
        )
        self.coefficients = nn.ModuleList(one.coefficients for one in connections if not stack.wiring.has_rows)
        self.head: Any = stack.head.coefficients if stack.head is not None else None
        self.final = nn.Identity() if stack.norm_final is None else torch_norm(stack.norm_final)

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        """Return the norm of the last read, or in post-LN the stream. `context` is for attention."""
        y: Tensor = self.final(LOOPS[self.wiring](self, x, **context))
        return y

    def pre(self, x: Tensor, **context: Any) -> Tensor:
        """Return the stream of pre-LN after all sublayers."""
        for sublayer, norm, has_context in zip(self.sublayers, self.norms, self.has_context, strict=True):
            x = x + (sublayer(norm(x), **context) if has_context else sublayer(norm(x)))
        return x

    def sandwich(self, x: Tensor, **context: Any) -> Tensor:
        """Return the stream of sandwich norms after all sublayers."""
        parts = zip(self.sublayers, self.norms, self.norms_branch, self.has_context, strict=True)
        for sublayer, norm, norm_branch, has_context in parts:
            x = x + norm_branch(sublayer(norm(x), **context) if has_context else sublayer(norm(x)))
        return x

    def post(self, x: Tensor) -> Tensor:
        """Return the stream of post-LN after all sublayers."""
        for sublayer, norm in zip(self.sublayers, self.norms, strict=True):
            x = norm(x + sublayer(x))
        return x

    def attend(self, x: Tensor) -> Tensor:
        """Return the last read of attention residuals."""
        sources = [x]
        for k, sublayer, norm in zip(self.coefficients, self.sublayers, self.norms, strict=True):
            sources.append(sublayer(norm(attend(k, sources))))
        return attend(self.head, sources)

    def connect(self, x: Tensor) -> Tensor:
        """Return the last read of hyper-connections or mHC."""
        streams = x.unsqueeze(-2).expand(*x.shape[:-1], 4, x.shape[-1])
        for k, sublayer, norm in zip(self.coefficients, self.sublayers, self.norms, strict=True):
            collapse, mix, inject = gates(k, streams)
            w = sublayer(norm(formula.read(streams, collapse, x.dtype)))
            streams = formula.write(streams, w, mix, inject, x.dtype, x.dtype)
        return streams.sum(-2) if self.head is None else formula.read(streams, gates(self.head, streams)[0], x.dtype)


LOOPS = {
    "pre_ln": Plain.pre, "sandwich": Plain.sandwich, "post_ln": Plain.post, "attention_residuals": Plain.attend,
    "hyper_connections": Plain.connect, "mhc": Plain.connect,
}  # fmt: skip


def torch_norm(norm: Any) -> nn.Module:
    """Return a norm in torch's operators with the parameters of addnorm's: torch's LayerNorm, or RMSNorm written out."""
    if isinstance(norm, RMSNorm):
        return WrittenOut(norm)
    made = nn.LayerNorm(norm.normalized_shape, norm.eps)
    made.weight, made.bias = norm.weight, norm.bias
    return made


def attend(k: Any, sources: list[Tensor]) -> Tensor:
    """Return the sum of the sources, weighted by attention with a learned query."""
    if k is None:  # of one source
        return sources[0]
    values = torch.stack(sources, -2)
    scores = F.rms_norm(values, values.shape[-1:], k.weight, k.eps) @ k.query[0]
    return (torch.softmax(scores, -1).unsqueeze(-1) * values).sum(-2)


def gates(k: Any, streams: Tensor) -> tuple[Tensor, Any, Any]:
    """Return C, A and B that a module of coefficients computes from the norm of the streams; a head has C alone."""
    g = k.gates()
    if g.kind == "hyper":
        normed = F.layer_norm(streams, streams.shape[-1:], eps=g.project_eps)
        logits = F.linear(normed, g.project, g.base[-len(g.project) :])
    else:
        flat = streams.flatten(-2)
        logits = F.linear(F.rms_norm(flat, flat.shape[-1:], eps=g.project_eps), g.project)
    return formula.gates(GATE_KINDS[g.kind], logits, g.scale, g.base, g.iterations, g.gate_eps, g.magnitude)
