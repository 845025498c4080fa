"""Search for a stack's connections, also inside wrappers, and copies of a stack in which one connection adds zero."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from addnorm.nn.connection import SublayerConnection

Kind = TypeVar("Kind", bound=nn.Module)


def find_inside(module: nn.Module | None, kind: type[Kind]) -> list[Kind]:
    """Return the outermost modules of class `kind` in a module, in order. A module used twice is returned twice.

    Wrappers, such as those of activation checkpoints and `torch.compile`, are searched too.
    """
    if isinstance(module, kind):
        return [module]
    children = () if module is None else module._modules.values()
    return [found for child in children for found in find_inside(child, kind)]


def without_write(module: Any, i: int) -> Any:
    """Return a copy of `module` in which connection `i` adds zero to the stream. The other modules keep their places."""
    if isinstance(module, SublayerConnection):
        silent = copy_tables(module)
        accepted = module.accepted_kwargs
        silent._modules.pop("sublayer", None)  # `ZeroSublayer` is no module
        silent.sublayer = ZeroSublayer(accepted)
        silent._modules["norm_branch"] = None
        return silent
    if hasattr(module, "_orig_mod"):  # compiled code would call the original module
        return without_write(module._orig_mod, i)
    other = copy_tables(module)
    for name, child in module._modules.items():
        n = len(find_inside(child, SublayerConnection))
        if i < n:
            other._modules[name] = without_write(child, i)
            break
        i -= n
    return other


def copy_tables(module: Any) -> Any:
    """Return a copy of `module` that shares parameters and submodules, but has its own tables of submodules and hooks.

    The table of parameters is shared, since FSDP replaces its entries in each call.
    """
    other = nn.Module.__new__(
        type(module)
    )  # not copy.copy: a class of FSDP2 has a __new__ of its own, which calls __init__
    for name, value in module.__getstate__().items():
        other.__dict__[name] = copy.copy(value) if isinstance(value, dict) and name != "_parameters" else value
    return other


class ZeroSublayer:
    """A sublayer that returns zeros and accepts the keyword arguments of the sublayer that it replaces."""

    def __init__(self, accepted_kwargs: frozenset[str] | None) -> None:
        self.accepted_kwargs = accepted_kwargs

    def __call__(self, read: Tensor, *_: Tensor, **__: Any) -> Tensor:
        """Return zeros in the shape of the input."""
        return torch.zeros_like(read)
