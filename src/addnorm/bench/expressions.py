"""What is compared, as a user writes it: each job in eager PyTorch and in addnorm, and the tensors it is given.

Both are functions of the same tensors, and each is one Python frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm import add_layer_norm, add_layer_norm_, add_rms_norm, add_rms_norm_
from addnorm.bench.jobs import DROPOUT
from addnorm.reference import Norm

EPS = {"layer": 1e-5, "rms": 1e-6}
# In place, a call's y is the next call's branch. With a weight and a bias of a millionth all the calls of a cell, some
# 100,000, move the stream by a tenth: the values stay ordinary, and every call moves the bytes that it would have moved.
IN_PLACE_SCALE = 2.0**-20

Call = Callable[..., Any]
Pair = tuple[Call, Call]


def expressions(norm: Norm, job: str, d: int) -> dict[str, Call]:
    """`eager` and `addnorm`, as functions of `inputs`' tensors: (residual, branch, weight, bias, ...)."""
    pairs = {"layer": _layer_norm, "rms": _rms_norm}[norm]((d,), EPS[norm])
    pairs["forward_backward"] = pairs["forward_stream"]
    return dict(zip(("eager", "addnorm"), pairs[job], strict=True))


def _layer_norm(shape: tuple[int], eps: float) -> dict[str, Pair]:
    return {
        "forward": (
            lambda x, s, w, b: F.layer_norm(x + s, shape, w, b, eps),
            lambda x, s, w, b: add_layer_norm(x, s, w, b, eps),
        ),
        "forward_stream": (
            lambda x, s, w, b: (F.layer_norm(z := x + s, shape, w, b, eps), z),
            lambda x, s, w, b: add_layer_norm(x, s, w, b, eps, return_residual=True),
        ),
        "dropout": (
            lambda x, s, w, b: (F.layer_norm(z := x + F.dropout(s, DROPOUT), shape, w, b, eps), z),
            lambda x, s, w, b: add_layer_norm(x, s, w, b, eps, dropout_p=DROPOUT, return_residual=True),
        ),
        "everything": (
            lambda x, s, w, b, g, c: (F.layer_norm(z := x + g * F.dropout(s + c, DROPOUT), shape, w, b, eps), z),
            lambda x, s, w, b, g, c: add_layer_norm(
                x, s, w, b, eps, layer_scale=g, branch_bias=c, dropout_p=DROPOUT, return_residual=True
            ),
        ),
        "in_place": (
            lambda x, s, w, b: (F.layer_norm(z := x + s, shape, w, b, eps), z),
            lambda x, s, w, b: (add_layer_norm_(x, s, w, b, eps), x),
        ),
        "reuse": (
            lambda x, s, w, b, y: F.layer_norm(x + s, shape, w, b, eps),
            lambda x, s, w, b, y: add_layer_norm(x, s, w, b, eps, out=y),
        ),
    }


def _rms_norm(shape: tuple[int], eps: float) -> dict[str, Pair]:
    return {
        "forward": (
            lambda x, s, w, b: F.rms_norm(x + s, shape, w, eps),
            lambda x, s, w, b: add_rms_norm(x, s, w, None, eps),
        ),
        "forward_stream": (
            lambda x, s, w, b: (F.rms_norm(z := x + s, shape, w, eps), z),
            lambda x, s, w, b: add_rms_norm(x, s, w, None, eps, return_residual=True),
        ),
        "dropout": (
            lambda x, s, w, b: (F.rms_norm(z := x + F.dropout(s, DROPOUT), shape, w, eps), z),
            lambda x, s, w, b: add_rms_norm(x, s, w, None, eps, dropout_p=DROPOUT, return_residual=True),
        ),
        "everything": (
            lambda x, s, w, b, g, c: (F.rms_norm(z := x + g * F.dropout(s + c, DROPOUT), shape, w, eps), z),
            lambda x, s, w, b, g, c: add_rms_norm(
                x, s, w, None, eps, layer_scale=g, branch_bias=c, dropout_p=DROPOUT, return_residual=True
            ),
        ),
        "in_place": (
            lambda x, s, w, b: (F.rms_norm(z := x + s, shape, w, eps), z),
            lambda x, s, w, b: (add_rms_norm_(x, s, w, None, eps), x),
        ),
        "reuse": (
            lambda x, s, w, b, y: F.rms_norm(x + s, shape, w, eps),
            lambda x, s, w, b, y: add_rms_norm(x, s, w, None, eps, out=y),
        ),
    }


def inputs(
    job: str, rows: int, d: int, dtype: torch.dtype, parameters: torch.dtype | None = None, grad: bool = False
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """(residual, branch, weight, bias) and what else the job takes, and the gradients of y and z.

    Random, the same every time: for `everything` layer scale and branch bias too, for `reuse` the memory of y.
    """
    rng = torch.Generator().manual_seed(0)
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    x, s, dy, dz = (torch.randn(rows, d, generator=rng, dtype=drawn).to(dtype) for _ in range(4))
    count = 4 if job == "everything" else 2
    vectors = [torch.rand(d, generator=rng, dtype=drawn).add_(0.5).to(parameters or dtype) for _ in range(count)]
    if job == "in_place":
        vectors = [t.mul_(IN_PLACE_SCALE) for t in vectors]
    args = [t.requires_grad_(grad) for t in (x, s, *vectors)]
    return [*args, torch.empty_like(dy)] if job == "reuse" else args, (dy, dz)


def learned(norm: Norm, args: list[Tensor]) -> list[Tensor]:
    """Those of the arguments that have a gradient: RMSNorm has no bias."""
    return args if norm == "layer" else [t for k, t in enumerate(args) if k != 3]
