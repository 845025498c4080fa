"""Computations that bench_compile.py compiles: Add & Norms with the operations around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm.bench.cases import expressions
from addnorm.reference import Norm

EPS = 1e-5
LAYERS = 2  # of the stack

Outputs = tuple[Tensor, ...]


class AddNorm(NamedTuple):
    """Implementation of an Add & Norm: functions of (x, s, weight, bias) that return y; (y, z); (y, z) with dropout."""

    y: Callable[..., Tensor]
    both: Callable[..., tuple[Tensor, Tensor]]
    dropped: Callable[..., tuple[Tensor, Tensor]]


def implementation(norm: Norm, variant: str, d: int) -> AddNorm:
    """Return the Add & Norm of a variant: "eager" is plain PyTorch, "addnorm" this library."""
    return AddNorm(*(expressions(norm, job, d, EPS)[variant] for job in ("forward", "forward_stream", "dropout")))


def y_alone(op: AddNorm, x: Tensor, s: Tensor, w: Tensor, b: Tensor, *_: Tensor) -> Outputs:
    """Return y."""
    return (op.y(x, s, w, b),)


def y_and_stream(op: AddNorm, x: Tensor, s: Tensor, w: Tensor, b: Tensor, *_: Tensor) -> Outputs:
    """Return y and z."""
    return op.both(x, s, w, b)


def with_dropout(op: AddNorm, x: Tensor, s: Tensor, w: Tensor, b: Tensor, *_: Tensor) -> Outputs:
    """Return y and z after dropout of the branch."""
    return op.dropped(x, s, w, b)


def around(op: AddNorm, x: Tensor, s: Tensor, w: Tensor, b: Tensor, gate: Tensor, *_: Tensor) -> Outputs:
    """Return y and z, with a gelu and a gate before, a scale and a cast after."""
    y, z = op.both(x, F.gelu(s) * gate, w, b)
    return (0.5 * y).to(torch.float32 if y.dtype == torch.bfloat16 else torch.bfloat16), z


def chain(op: AddNorm, x: Tensor, s: Tensor, w: Tensor, b: Tensor, gate: Tensor, *_: Tensor) -> Outputs:
    """Return y and z of two Add & Norms in a row."""
    y, z = op.both(x, s, w, b)
    return op.both(z, F.gelu(y) * gate, w, b)


def stack(op: AddNorm, x: Tensor, s: Tensor, w: Tensor, b: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Outputs:
    """Return y and z of a pre-LN stack of feed-forward sublayers."""
    y, z = op.both(x, s, w, b)
    for _ in range(LAYERS):
        y, z = op.both(z, F.linear(F.gelu(F.linear(y, up)), down) * gate, w, b)
    return y, z


class Job(NamedTuple):
    """Compiled computation: title, function, whether gradients are computed, its inputs besides (x, s, w, b)."""

    title: str
    function: Callable[..., Outputs]
    backward: bool
    extra: int = 0


JOBS = {
    "y": Job("y", y_alone, False),
    "stream": Job("y and the stream", y_and_stream, False),
    "training": Job("y and the stream, with backward", y_and_stream, True),
    "dropout": Job("dropout, with backward", with_dropout, True),
    "around": Job("gelu, gate, add & norm, scale, cast", around, False, 1),
    "around_training": Job("gelu, gate, add & norm, scale, cast, with backward", around, True, 1),
    "chain": Job("add & norm, gelu, gate, add & norm", chain, False, 1),
    "chain_training": Job("add & norm, gelu, gate, add & norm, with backward", chain, True, 1),
    "stack": Job("pre-LN stack", stack, False, 3),
    "stack_training": Job("pre-LN stack, with backward", stack, True, 3),
}  # fmt: skip
