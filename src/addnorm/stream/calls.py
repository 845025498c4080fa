"""Calls of a model: a key for the operators that a call runs, and copies of its arguments."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = ["call_key", "copy_arguments"]

UNCOPIED = (int, float, str, bool, bytes, type(None), Tensor)


def call_key(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return a key of the visible state that determines the operators of a forward; its last entry is the grad mode."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    kinds = tuple(
        (x.dtype, x.dim()) if isinstance(x, Tensor) else x if isinstance(x, bool | str) else type(x) for x in leaves
    )
    training = tuple(module.training for module in model.modules())
    autocast = tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return str(spec), kinds, training, autocast, torch.is_grad_enabled()


def copy_arguments(args: Any, kwargs: Any) -> Any:
    """Return the arguments with copies of objects that a forward may change, such as a cache."""
    return pytree.tree_map_only(lambda x: not isinstance(x, UNCOPIED), _copy, (args, kwargs))


class _CloneNonLeaves(TorchFunctionMode):
    """Mode in which `copy.deepcopy` clones tensors of a graph, which torch refuses to copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[1].setdefault(id(args[0]), args[0].clone())
        return func(*args, **(kwargs or {}))


def _copy(value: Any) -> Any:
    try:
        with _CloneNonLeaves():
            return copy.deepcopy(value)
    except Exception:
        return value  # objects that cannot be copied are passed as they are
