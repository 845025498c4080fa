"""A copy of a model in float64, with the random numbers of the model.

From the same state a generator draws other numbers in float64 than in float32. Inside `RngReplay`, operators that draw float64
draw in the model's dtype instead, and the result is cast. So dropout masks, noise and skipped layers are those of the model.

Random numbers drawn inside a larger operator are not covered: attention with dropout in fused GPU kernels, recurrent layers of
cuDNN, and rrelu.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from addnorm.fusion.runs import map_tensors
from addnorm.stream.dataflow.operators import find_traits, operator_name


def copy_in_dtype(
    model: nn.Module, arguments: Any, tensors: Sequence[Tensor], wide: torch.dtype
) -> tuple[nn.Module, Any]:
    """Return copies of a model and of its arguments; floating-point tensors among `tensors` get a wide dtype."""

    def convert(tensor: Tensor) -> Tensor:
        inexact = tensor.is_floating_point() or tensor.is_complex()
        dtype = torch.promote_types(tensor.dtype, wide) if inexact else tensor.dtype
        copied = tensor.detach().to(dtype, copy=True)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    memo: dict[int, Any] = {id(tensor): convert(tensor) for tensor in tensors}
    return copy.deepcopy(model, dict(memo)), map_tensors(arguments, lambda tensor: memo.get(id(tensor), tensor))


class RngReplay(TorchDispatchMode):
    """Mode in which operators that draw random numbers of dtype `wide` draw them in `dtype` and cast them."""

    def __init__(self, dtype: torch.dtype, wide: torch.dtype = torch.float64) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.dtype, self.wide = dtype, wide

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        is_random = "random" in find_traits(operator_name(func)) and name != "native_dropout"
        if is_random and name.endswith("_") and args[0].dtype == self.wide:
            return args[0].copy_(func(self._empty_like(args[0]), *self._narrow(args[1:]), **self._narrow(kwargs)))
        if is_random and not func._schema.is_mutable:
            narrow_args, narrow_kwargs = self._narrow((args, kwargs))
            drawn = func(*narrow_args, **narrow_kwargs)
            is_narrowed = _differ((args, kwargs), (narrow_args, narrow_kwargs)) and drawn.dtype == self.dtype
            return drawn.to(self.wide) if is_narrowed else drawn
        if name == "native_dropout" and args[0].dtype == self.wide:
            _, mask = func(self._narrow(args[0]), *args[1:])
            p, train = args[1:]
            return (args[0] * mask * (1 / (1 - p) if p < 1 else 0.0) if train is not False else args[0].clone()), mask
        return func(*args, **kwargs)

    def _empty_like(self, tensor: Tensor) -> Tensor:
        """Return a tensor to draw into, with the same strides: they decide the order in which it is filled."""
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=self.dtype, device=tensor.device)

    def _narrow(self, arguments: Any) -> Any:
        """Return the arguments of an operator with `dtype` in place of `wide`."""

        def narrow(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dtype == self.wide:
                return value.to(self.dtype)
            return self.dtype if value is self.wide else value

        return pytree.tree_map(narrow, arguments)


def _differ(arguments: Any, narrowed: Any) -> bool:
    return any(a is not b for a, b in zip(pytree.tree_leaves(arguments), pytree.tree_leaves(narrowed), strict=True))
