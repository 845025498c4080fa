"""Calls with DTensors: registration of the rules at the first of them, and values that all processes of a mesh share.

`import addnorm` does not import `torch.distributed.tensor`, which takes longer than the rest. The operators have no rule for
DTensors until the first call with one fails; the rules are then registered, and the call is made again. Calls without DTensors
pay nothing.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from addnorm._util.torch_internals import mark_as_constant

_TORCH = "torch.distributed.tensor"
_RULES = "addnorm.ops.streams.sharding"  # which imports `ops/sharding.py`
_randint = torch.randint


def is_dtensor(t: Any) -> bool:
    """Return whether `t` is a DTensor."""
    module = sys.modules.get(_TORCH)
    return module is not None and isinstance(t, module.DTensor)


@mark_as_constant
def register_rules() -> bool:
    """Register the operators' rules for DTensors if torch's DTensor is imported; return whether this call did so."""
    if _TORCH not in sys.modules or _RULES in sys.modules:
        return False
    importlib.import_module(_RULES)
    return True


def draw_seed(like: Tensor) -> Tensor:
    """Return a seed for a dropout mask from torch's generator, the same in all processes that hold a part of `like`."""
    return share(_randint(-(2**63), 2**63 - 1, (), device=like.device), like)


def rules_for(t: Any) -> Any:
    """Return the module `ops/sharding.py` if `t` is a DTensor, else None."""
    if t.__class__ is Tensor or not is_dtensor(t):
        return None
    from addnorm.ops import sharding

    return sharding


def share(value: Tensor, like: Tensor) -> Tensor:
    """Return the value that the first process of `like`'s mesh drew, as a replicated DTensor.

    The value is returned unchanged if `like` is an ordinary tensor, or if the value requires a gradient or is a DTensor already.
    """
    rules = rules_for(like)
    is_final = rules is None or value.requires_grad or is_dtensor(value)
    return value if is_final else rules.replicate(value, like)


def spread(value: Tensor, like: Tensor) -> Tensor:
    """Return a value that is equal in all processes as a replicated DTensor, if `like` is a DTensor.

    A value that is a DTensor already, or beside an ordinary tensor `like`, is returned unchanged.
    """
    rules = rules_for(like)
    return value if rules is None or is_dtensor(value) else rules.spread(value, like)


def replicate_dimensions(t: Any, first: int) -> Any:
    """Return a DTensor that is not sharded on dimensions from `first` on, so that these can be flattened.

    A value that is no DTensor is returned unchanged.
    """
    rules = rules_for(t)
    return t if rules is None else rules.replicate_dimensions(t, first)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T, also for a DTensor x whose rows are sharded unevenly."""
    rules = rules_for(x)
    return (F if rules is None else rules).linear(x, weight)  # type: ignore[no-any-return]
