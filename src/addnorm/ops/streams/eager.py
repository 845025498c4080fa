"""The reference of the operators of n streams, registered for every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from addnorm.ops.schema import Kernel, empty_placeholder, kernels_of, library
from addnorm.ops.streams import formula, validation
from addnorm.ops.streams.gradients import gradients
from addnorm.ops.streams.schema import GRADIENTS, fill_gradients, gradient_shape, requested


def add_norm_streams(a: Any) -> tuple[Tensor, ...]:
    """Return the outputs of the forward, by the formula without autocast, after a check of the arguments."""
    validation.check(a)
    with torch.autocast(a.streams.device.type, enabled=False):
        outputs = formula.boundary(a)
    return tuple(empty_placeholder(a.streams) if t is None else t.contiguous() for t in outputs)


def add_norm_streams_backward(a: Any) -> tuple[Tensor, ...]:
    """Return the gradients that `grad_mask` requests, in the order of `GRADIENTS`."""
    validation.check_backward(a, GRADIENTS)
    with torch.autocast(a.streams.device.type, enabled=False):
        grads = gradients(a, validation.compute_dtype(a))

    def own(name: str, grad: Tensor) -> Tensor:
        return grad.to(gradient_shape(a, name)[1], memory_format=torch.contiguous_format, copy=True)

    wanted = requested(a)
    return fill_gradients(a, {name: own(name, t) for name, t in grads.items() if t is not None and name in wanted})


KERNELS: dict[str, Kernel] = {
    "add_norm_streams": add_norm_streams,
    "add_norm_streams_backward": add_norm_streams_backward,
}
for _name, _kernel in KERNELS.items():
    for _op, _function in kernels_of(_name, _kernel):
        library.impl(_op, _function, "CompositeExplicitAutograd")
