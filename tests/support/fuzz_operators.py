"""Calls of operators with unchecked arguments, which must not crash."""

import contextlib
import math

import torch

from support.fuzz_calls import FLOATS
from support.operator_calls import Recorder


def call_operators(use, like, rng):
    """Call the operators that a function uses with meaningless arguments. They may raise or return, but must not crash.

    `like` is the call's largest tensor, whose size broadcasting could multiply.
    """
    if like.numel() > 2000:
        return
    with Recorder() as recorder:
        use()
    shape = tuple(like.shape)
    numbers = [-1, 0, 1, 3, 5, 0.5, 2**31, 2**40, 2**62, math.nan, math.inf]
    tensors = [
        None, torch.ones(()), torch.ones(0), torch.ones(shape[-1]), torch.ones(shape[-1] + 1), torch.ones(*shape, 2), torch.ones(3),
        torch.ones(1, *shape).to(rng.choice(FLOATS)), torch.ones(shape, device="meta"), torch.ones(shape).long(),
        torch.ones(shape).transpose(0, -1), torch.ones(*shape[:-1], 0),
    ]  # fmt: skip
    for one in recorder.calls:
        arguments = getattr(torch.ops.addnorm, one.name).default._schema.arguments
        for argument in rng.sample(arguments, 4):
            value = rng.choice(tensors if "Tensor" in str(argument.type) else numbers)
            with contextlib.suppress(Exception):
                one._replace(arguments={**one.arguments, argument.name: value}).repeat()
