"""The copy of a model in float64, and the random numbers of the model in it.

A generator gives other numbers in float64 than in float32, from the same state. Here the operators that draw float64 draw
in the model's own dtype, and what they drew is cast: masks of dropout, noise and layers that are skipped are those of the model.

Not seen are the random numbers that are drawn inside a larger operator: attention with dropout in the fused kernels of a GPU, the
recurrent layers of cuDNN, and rrelu.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from addnorm.stream.dataflow.state import LEAF_TYPES, find_tensors

__all__ = ["exchanged", "same_noise", "widened"]

IN_PLACE = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
}  # fmt: skip
RETURNED = {
    "_sample_dirichlet", "_standard_gamma", "bernoulli", "binomial", "multinomial", "normal", "poisson", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm",
}  # fmt: skip


def widened(model: nn.Module, given: Any, tensors: Sequence[Tensor], wide: torch.dtype) -> tuple[nn.Module, Any]:
    """A copy of the model and of its arguments with those tensors copied, what is floating into a wide dtype."""

    def twin(tensor: Tensor) -> Tensor:
        inexact = tensor.is_floating_point() or tensor.is_complex()
        dtype = torch.promote_types(tensor.dtype, wide) if inexact else tensor.dtype
        copied = tensor.detach().to(dtype, copy=True)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    memo: dict[int, Any] = {id(tensor): twin(tensor) for tensor in tensors}
    return copy.deepcopy(model, dict(memo)), exchanged(given, lambda tensor: memo.get(id(tensor), tensor))


def exchanged(given: Any, exchange: Callable[[Tensor], Tensor]) -> Any:
    """Arguments with their tensors exchanged, one for one; objects that hold some, such as a cache, are copied around them."""
    memo: dict[int, Any] = {id(tensor): exchange(tensor) for tensor in find_tensors(given)}

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return memo[id(value)] if id(value) in memo else exchange(value)
        if isinstance(value, LEAF_TYPES) or callable(value):
            return value
        try:
            return copy.deepcopy(value, memo)  # one memo, so that an object given twice is one still
        except Exception:  # an object may refuse to be copied in any way
            return value

    return pytree.tree_map(one, given)


@contextmanager
def same_noise(dtype: torch.dtype, wide: torch.dtype = torch.float64) -> Iterator[None]:
    """Inside, what is drawn in `wide` is drawn in `dtype`, from the same generator, and cast."""
    with _SameNoise(dtype, wide):
        yield


class _SameNoise(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype, wide: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.dtype, self.wide = dtype, wide

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in IN_PLACE and args[0].dtype == self.wide:
            return args[0].copy_(func(self._like(args[0]), *self._narrow(args[1:]), **self._narrow(kwargs)))
        if name in RETURNED and not func._schema.is_mutable:
            narrow, named = self._narrow((args, kwargs))
            drawn = func(*narrow, **named)
            cast = _differ((args, kwargs), (narrow, named)) and drawn.dtype == self.dtype
            return drawn.to(self.wide) if cast else drawn
        if name == "native_dropout" and args[0].dtype == self.wide:
            _, kept = func(self._narrow(args[0]), *args[1:])
            p, train = args[1:]
            return (args[0] * kept * (1 / (1 - p) if p < 1 else 0.0) if train is not False else args[0].clone()), kept
        return func(*args, **kwargs)

    def _like(self, tensor: Tensor) -> Tensor:
        """A tensor to draw into. The strides are the same too: they decide in which order it is filled."""
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=self.dtype, device=tensor.device)

    def _narrow(self, given: Any) -> Any:
        """The arguments of an operator with `dtype` in the place of `wide`."""
        return pytree.tree_map(self._narrow_one, given)

    def _narrow_one(self, one: Any) -> Any:
        if isinstance(one, Tensor) and one.dtype == self.wide:
            return one.to(self.dtype)
        return self.dtype if one is self.wide else one


def _differ(given: Any, narrow: Any) -> bool:
    return any(a is not b for a, b in zip(pytree.tree_leaves(given), pytree.tree_leaves(narrow), strict=True))
