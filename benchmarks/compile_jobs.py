"""Computations that bench_compile.py compiles: Add & Norms with the operations around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm.bench.case import Case
from addnorm.bench.jobs import Call, eager, ours

LAYERS = 2  # of the stack

Outputs = tuple[Tensor, ...]


class AddNorm(NamedTuple):
    """Implementation of an Add & Norm: functions of (x, s, weight, bias) that return y; (y, z); (y, z) with dropout."""

    y: Call
    both: Call
    dropped: Call


def implementation(case: Case, *, plain: bool) -> AddNorm:
    """Return the Add & Norm of plain PyTorch, or of this library."""
    make = eager if plain else ours
    return AddNorm(*(make(case.but(job=job, dtype="float32")) for job in ("forward", "forward_stream", "dropout")))


def cast(t: Tensor) -> Tensor:
    """Return a tensor in the other one of float32 and bfloat16."""
    return t.to(torch.float32 if t.dtype == torch.bfloat16 else torch.bfloat16)


def around(op: AddNorm, x: Tensor, s: Tensor, w: Tensor, b: Tensor, gate: Tensor) -> Outputs:
    """Return y and z, with a gelu and a gate before, a scale and a cast after."""
    y, z = op.both(x, F.gelu(s) * gate, w, b)
    return cast(0.5 * y), z


def chain(op: AddNorm, x: Tensor, s: Tensor, w: Tensor, b: Tensor, gate: Tensor) -> Outputs:
    """Return y and z of two Add & Norms in a row."""
    y, z = op.both(x, s, w, b)
    both: Outputs = op.both(z, F.gelu(y) * gate, w, b)
    return both


def stack(op: AddNorm, x: Tensor, s: Tensor, w: Tensor, b: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Outputs:
    """Return y and z of a pre-LN stack of feed-forward sublayers."""
    y, z = op.both(x, s, w, b)
    for _ in range(LAYERS):
        y, z = op.both(z, F.linear(F.gelu(F.linear(y, up)), down) * gate, w, b)
    return y, z


class Job(NamedTuple):
    """Compiled computation: title, function, its inputs besides (x, s, w, b), whether gradients are computed."""

    title: str
    function: Callable[..., Outputs]
    extra: int = 0
    backward: bool = False

    def trained(self) -> Job:
        """Return the job with gradients."""
        return self._replace(title=f"{self.title}, with backward", backward=True)


Y = Job("y", lambda op, *tensors: (op.y(*tensors),))
STREAM = Job("y and the stream", lambda op, *tensors: op.both(*tensors))
AROUND = Job("gelu, gate, add & norm, scale, cast", around, 1)
CHAIN = Job("add & norm, gelu, gate, add & norm", chain, 1)
STACK = Job("pre-LN stack", stack, 3)
JOBS = {
    "y": Y, "stream": STREAM, "training": STREAM.trained(),
    "dropout": Job("dropout", lambda op, *tensors: op.dropped(*tensors)).trained(), "around": AROUND,
    "around_training": AROUND.trained(), "chain": CHAIN, "chain_training": CHAIN.trained(), "stack": STACK,
    "stack_training": STACK.trained(),
}  # fmt: skip
