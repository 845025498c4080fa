"""What a run must leave as it was, beside the memory of tensors: arguments, what modules hold, random states."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from addnorm.stream.dataflow.threads import forked

__all__ = ["UNMADE", "as_it_was", "copied", "tensors_in"]

UNMADE = (UninitializedBuffer, UninitializedParameter)  # those of lazy modules

PLAIN = (Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Generator, nn.Module)
MANY = 10_000  # objects that are looked into for tensors


def copied(given: Any) -> Any:
    """A copy of an argument that a forward may change, such as a cache, with the same tensors; what cannot be copied as it is."""
    if isinstance(given, PLAIN) or callable(given):
        return given
    try:
        return copy.deepcopy(given, {id(tensor): tensor for tensor in tensors_in(given)})
    except Exception:  # an object may refuse to be copied in any way
        return given


def tensors_in(given: Any) -> Iterator[Tensor]:
    """The tensors that an argument holds."""
    seen: set[int] = set()
    todo = [given]
    while todo and len(seen) < MANY:
        one = todo.pop()
        if isinstance(one, Tensor):
            yield one
        if isinstance(one, PLAIN) or callable(one) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, list | tuple | set):
            todo += one
        todo += getattr(one, "__dict__", {}).values()


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """After the block modules have the buffers and tensors that they had, and the random generators their states."""
    held = [(table, dict(table)) for module in model.modules() for table in (module._buffers, vars(module)) if table]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        with forked(devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        for table, before in held:
            for name, value in before.items():
                if table.get(name) is not value and _is_state(value) and _is_state(table.get(name)):
                    table[name] = value


def _is_state(value: Any) -> bool:
    """Whether a module may keep its state in it. What is not made yet is not: it becomes a buffer when it is."""
    return value is None or (isinstance(value, Tensor) and not isinstance(value, UNMADE))
