"""The random numbers of a model in the float64 copy of it.

A generator gives other numbers in float64 than in float32, from the same state. Here the operators that draw float64 draw
in the model's own dtype, and what they drew is cast: a mask of dropout, a noise or a layer that is skipped is then that of the model.

Not seen are the random numbers that are drawn inside a larger operator: attention with dropout in the fused kernels of a GPU, the
recurrent layers of cuDNN, and rrelu.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["same_noise"]

IN_PLACE = {
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_",
}  # fmt: skip
RETURNED = {
    "_sample_dirichlet", "_standard_gamma", "bernoulli", "binomial", "multinomial", "normal", "poisson", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm",
}  # fmt: skip


@contextmanager
def same_noise(dtype: torch.dtype) -> Iterator[None]:
    """Inside, what is drawn in float64 is drawn in `dtype`, from the same generator, and cast."""
    with _SameNoise(dtype):
        yield


class _SameNoise(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in IN_PLACE and args[0].dtype == torch.float64:
            return args[0].copy_(func(self._like(args[0]), *self._narrow(args[1:]), **self._narrow(kwargs)))
        if name in RETURNED and not func._schema.is_mutable:
            narrow, named = self._narrow((args, kwargs))
            drawn = func(*narrow, **named)
            in_float64 = _differ((args, kwargs), (narrow, named)) and drawn.dtype == self.dtype
            return drawn.double() if in_float64 else drawn
        if name == "native_dropout" and args[0].dtype == torch.float64:
            _, kept = func(self._narrow(args[0]), *args[1:])
            p, train = args[1:]
            return (args[0] * kept * (1 / (1 - p) if p < 1 else 0.0) if train is not False else args[0].clone()), kept
        return func(*args, **kwargs)

    def _like(self, tensor: Tensor) -> Tensor:
        """A tensor to draw into. The strides are the same too: they decide in which order it is filled."""
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=self.dtype, device=tensor.device)

    def _narrow(self, given: Any) -> Any:
        """The arguments of an operator with `dtype` in the place of float64."""
        return pytree.tree_map(self._narrow_one, given)

    def _narrow_one(self, one: Any) -> Any:
        if isinstance(one, Tensor) and one.dtype == torch.float64:
            return one.to(self.dtype)
        return self.dtype if one is torch.float64 else one


def _differ(given: Any, narrow: Any) -> bool:
    return any(a is not b for a, b in zip(pytree.tree_leaves(given), pytree.tree_leaves(narrow), strict=True))
