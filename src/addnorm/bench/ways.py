"""What is compiled in `compiles`: jobs with an Add & Norm in them, each written once for any `Way` to compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm import add_layer_norm, add_rms_norm
from addnorm.bench.jobs import DROPOUT

EPS = 1e-5
LAYERS = 2  # of the stack


class Way(NamedTuple):
    """How an Add & Norm is computed: (x, s, weight, bias) -> y, or (y, z), or that with dropout."""

    y: Callable[..., Tensor]
    both: Callable[..., tuple[Tensor, Tensor]]
    dropped: Callable[..., tuple[Tensor, Tensor]]


WAYS = {
    ("layer", "addnorm"): Way(
        lambda x, s, w, b: add_layer_norm(x, s, w, b, EPS),
        lambda x, s, w, b: add_layer_norm(x, s, w, b, EPS, return_residual=True),
        lambda x, s, w, b: add_layer_norm(x, s, w, b, EPS, dropout_p=DROPOUT, return_residual=True),
    ),
    ("layer", "torch"): Way(
        lambda x, s, w, b: F.layer_norm(x + s, w.shape, w, b, EPS),
        lambda x, s, w, b: (F.layer_norm(z := x + s, w.shape, w, b, EPS), z),
        lambda x, s, w, b: (F.layer_norm(z := x + F.dropout(s, DROPOUT), w.shape, w, b, EPS), z),
    ),
    ("rms", "addnorm"): Way(
        lambda x, s, w, b: add_rms_norm(x, s, w, None, EPS),
        lambda x, s, w, b: add_rms_norm(x, s, w, None, EPS, return_residual=True),
        lambda x, s, w, b: add_rms_norm(x, s, w, None, EPS, dropout_p=DROPOUT, return_residual=True),
    ),
    ("rms", "torch"): Way(
        lambda x, s, w, b: F.rms_norm(x + s, w.shape, w, EPS),
        lambda x, s, w, b: (F.rms_norm(z := x + s, w.shape, w, EPS), z),
        lambda x, s, w, b: (F.rms_norm(z := x + F.dropout(s, DROPOUT), w.shape, w, EPS), z),
    ),
}

Outputs = tuple[Tensor, ...]


def _alone(way: Way, x: Tensor, s: Tensor, w: Tensor, b: Tensor, *_: Tensor) -> Outputs:
    return (way.y(x, s, w, b),)


def _both(way: Way, x: Tensor, s: Tensor, w: Tensor, b: Tensor, *_: Tensor) -> Outputs:
    return way.both(x, s, w, b)


def _dropped(way: Way, x: Tensor, s: Tensor, w: Tensor, b: Tensor, *_: Tensor) -> Outputs:
    return way.dropped(x, s, w, b)


def _around(way: Way, x: Tensor, s: Tensor, w: Tensor, b: Tensor, gate: Tensor, *_: Tensor) -> Outputs:
    y, z = way.both(x, F.gelu(s) * gate, w, b)
    return (0.5 * y).to(torch.float32 if y.dtype == torch.bfloat16 else torch.bfloat16), z


def _chain(way: Way, x: Tensor, s: Tensor, w: Tensor, b: Tensor, gate: Tensor, *_: Tensor) -> Outputs:
    y, z = way.both(x, s, w, b)
    return way.both(z, F.gelu(y) * gate, w, b)


def _stack(way: Way, x: Tensor, s: Tensor, w: Tensor, b: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Outputs:
    y, z = way.both(x, s, w, b)
    for _ in range(LAYERS):
        y, z = way.both(z, F.linear(F.gelu(F.linear(y, up)), down) * gate, w, b)
    return y, z


class Job(NamedTuple):
    """What is compiled: its title, the function, whether gradients are taken too, and what else than (x, s, w, b) it reads."""

    title: str
    function: Callable[..., Outputs]
    backward: bool
    extra: int = 0


JOBS = {
    "y": Job("y", _alone, False),
    "stream": Job("y and the stream", _both, False),
    "training": Job("y and the stream, with backward", _both, True),
    "dropout": Job("dropout, with backward", _dropped, True),
    "around": Job("gelu, gate, add & norm, scale, cast", _around, False, 1),
    "around_training": Job("gelu, gate, add & norm, scale, cast, with backward", _around, True, 1),
    "chain": Job("add & norm, gelu, gate, add & norm", _chain, False, 1),
    "chain_training": Job("add & norm, gelu, gate, add & norm, with backward", _chain, True, 1),
    "stack": Job("pre-LN stack", _stack, False, 3),
    "stack_training": Job("pre-LN stack, with backward", _stack, True, 3),
}  # fmt: skip
