"""The reference of the operators of n streams, registered for every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm.ops.schema import empty_placeholder, library
from addnorm.ops.streams import formula, validation
from addnorm.ops.streams.gradients import gradients
from addnorm.ops.streams.schema import ARGUMENTS, GRADIENTS, INPUTS

_BACKWARD = tuple(argument.name for argument in ARGUMENTS["add_norm_streams_backward"])
_PER_ROW = ("mix", "inject", "collapse")


def add_norm_streams(*args: Any) -> tuple[Tensor, ...]:
    """Return the outputs of the forward."""
    validation.check(**dict(zip(INPUTS, args, strict=True)))
    with torch.autocast(args[0].device.type, enabled=False):
        return tuple(t.contiguous() for t in formula.boundary(*args))


def add_norm_streams_backward(*args: Any) -> tuple[Tensor, ...]:
    """Return the gradients that `grad_mask` requests, in the order of `GRADIENTS`."""
    a = dict(zip(_BACKWARD, args, strict=True))
    validation.check_backward(a, GRADIENTS)
    wide = validation.compute_dtype(**{name: a[name] for name in INPUTS})
    with torch.autocast(a["streams"].device.type, enabled=False):
        grads = gradients(a, wide)

    def make(name: str) -> Tensor:
        dtype = wide if name in _PER_ROW else a[name].dtype
        grad = grads[name]
        if grad is not None:
            return (
                grad.to(dtype).contiguous()
                if grad.dtype != dtype
                else grad.clone(memory_format=torch.contiguous_format)
            )
        streams: Tensor = a["streams"]
        shape = a[name].shape
        if name == "collapse":
            shape = streams.shape if a["collapse"].dim() == streams.dim() else streams.shape[:-1]
        return streams.new_zeros(shape, dtype=dtype)

    placeholder = empty_placeholder(a["streams"])
    return tuple(make(name) if a["grad_mask"] >> bit & 1 else placeholder.clone() for bit, name in enumerate(GRADIENTS))


for _suffix in ("", "_reference"):
    library.impl(f"add_norm_streams{_suffix}", add_norm_streams, "CompositeExplicitAutograd")
    library.impl(f"add_norm_streams_backward{_suffix}", add_norm_streams_backward, "CompositeExplicitAutograd")
