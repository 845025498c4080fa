"""How a model is called: what tells one kind of forward from another, and which tokens of it count."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = ["Mask", "Masks", "copied", "kind_of", "mask_of"]

Mask = Tensor | str
Masks = Mask | Mapping[str, Mask] | None
PLAIN = (int, float, str, bool, bytes, type(None), Tensor)


def kind_of(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """What decides which operators run, as far as can be seen from outside; last, whether gradients are wanted."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given = tuple(
        (x.dtype, x.dim()) if isinstance(x, Tensor) else x if isinstance(x, bool | str) else type(x) for x in leaves
    )
    training = tuple(module.training for module in model.modules())
    casts = tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return str(spec), given, training, casts, torch.is_grad_enabled()


def copied(args: Any, kwargs: Any) -> Any:
    """The same call with copies of what a forward may change: a cache."""
    return pytree.tree_map_only(lambda x: not isinstance(x, PLAIN), _copy, (args, kwargs))


class _Cloned(TorchFunctionMode):
    """In which tensors that have been computed can be copied too: torch refuses those of a graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[1].setdefault(id(args[0]), args[0].clone())
        return func(*args, **(kwargs or {}))


def _copy(value: Any) -> Any:
    try:
        with _Cloned():
            return copy.deepcopy(value)
    except Exception:
        return value  # whatever cannot be copied is given as it is


def mask_of(which: Masks, stream: str, kwargs: dict[str, Any]) -> Tensor | None:
    """Which tokens of a stream count; None for all."""
    one = which.get(stream) if isinstance(which, Mapping) else which
    if one is None or isinstance(one, Tensor):
        return one
    found = kwargs.get(one)
    if not isinstance(found, Tensor):
        raise ValueError(
            f"tokens is {one!r}, expected the name of a keyword argument of the model that is a tensor; it was called "
            f"with {', '.join(kwargs) or 'none'}."
        )
    return found
