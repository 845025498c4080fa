"""RMSNorm beside the formulas of models in bfloat16: how many elements differ, by the order in which it rounds.

The kernels add the squares in another order than torch does, so that now and then an element that lies at the edge of a rounding
falls to its other side. An order of rounding that is not the model's changes a quarter of the elements.

Source: LlamaRMSNorm, GemmaRMSNorm and T5LayerNorm of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from addnorm.functional import NormOptions, add_rms_norm
from addnorm.reference import Casting

SHAPE = (2048, 768)
EPS = 1e-6
OTHER: dict[Casting, Casting] = {"float32": "llama", "llama": "float32", "t5": "float32"}


class Model(NamedTuple):
    """A model's formula of (x, weight), and what add_rms_norm is to be told."""

    formula: Callable[[Tensor, Tensor], Tensor]
    casting: Casting
    weight_offset: float


def _llama(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _gemma(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + weight.float())).type_as(x)


def _t5(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).to(weight.dtype)


MODELS = {
    "Llama": Model(_llama, "llama", 0.0),
    "Gemma": Model(_gemma, "float32", 1.0),
    "T5": Model(_t5, "t5", 0.0),
}


def unlike(name: str) -> tuple[float, float]:
    """The share of elements that are not the model's: in its order of rounding, and in another."""
    formula, casting, offset = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    x, branch = (torch.randn(SHAPE, generator=generator).bfloat16() for _ in range(2))
    weight = torch.randn(SHAPE[1:], generator=generator).bfloat16()
    want = formula(x + branch, weight)
    options: NormOptions = {"weight_offset": offset}
    found = (add_rms_norm(x, branch, weight, eps=EPS, casting=one, **options) for one in (casting, OTHER[casting]))
    right, other = (float((y != want).double().mean()) for y in found)
    return right, other
