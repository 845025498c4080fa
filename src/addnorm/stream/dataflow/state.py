"""State that a run must restore, besides the memory of tensors: arguments, the modules' attributes, random generators.

Torch has some state once for the whole process. Several threads may observe models at a time, so `share_context` and `fork_rng`
protect it.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

__all__ = ["UNINITIALIZED", "copy_argument", "find_tensors", "fork_rng", "preserve_state", "share_context"]  # fmt: skip

UNINITIALIZED = (UninitializedBuffer, UninitializedParameter)  # of lazy modules

LEAF_TYPES = (
    Tensor,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Generator,
    nn.Module,
)
NUMBERS = (int, float, complex, str, tuple, type(None), torch.dtype, torch.device)  # they describe a cached tensor
MAX_OBJECTS = 10_000  # maximum number of objects that are searched for tensors


def copy_argument(argument: Any) -> Any:
    """Return a copy of an argument that a forward may change, such as a cache, with the same tensors.

    Objects that cannot be copied are returned themselves.
    """
    if isinstance(argument, LEAF_TYPES) or callable(argument):
        return argument
    try:
        return copy.deepcopy(argument, {id(tensor): tensor for tensor in find_tensors(argument)})
    except Exception:  # __deepcopy__ may raise anything
        return argument


def find_tensors(argument: Any) -> Iterator[Tensor]:
    """Return the tensors in an argument: in containers and attributes, at any depth."""
    seen: set[int] = set()
    todo = [argument]
    while todo and len(seen) < MAX_OBJECTS:
        item = todo.pop()
        if isinstance(item, Tensor):
            yield item
        if isinstance(item, LEAF_TYPES) or callable(item) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            todo += item.values()
        elif isinstance(item, list | tuple | set):
            todo += item
        todo += getattr(item, "__dict__", {}).values()


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Restore buffers, tensor attributes, the numbers beside those that changed, and random generators after the block."""
    tables = [(table, dict(table)) for module in model.modules() for table in (module._buffers, vars(module)) if table]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        with fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for table, before in tables:
            changed = [name for name, value in before.items() if table.get(name) is not value]
            tensors = [name for name in changed if _is_state(before[name]) and _is_state(table.get(name))]
            # A cached table without the length it was made for would not be made again: numbers go with the tensors beside them.
            numbers = [n for n in changed if isinstance(before[n], NUMBERS) and isinstance(table.get(n), NUMBERS)]
            for name in [*tensors, *numbers] if tensors else []:
                table[name] = before[name]


def _is_state(value: Any) -> bool:
    """Return whether a module may keep state in an attribute: None or a tensor, but no uninitialized buffer of a lazy module."""
    return value is None or (isinstance(value, Tensor) and not isinstance(value, UNINITIALIZED))


_generator = threading.RLock()


@contextmanager
def fork_rng(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Fork torch's random generators while the block runs. Other threads that fork them wait: they would restore wrong states."""
    with _generator, torch.random.fork_rng([*devices]):
        yield


def share_context(change: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Decorate a context manager that changes the whole process, so that several threads can be inside at a time.

    The first one to enter makes the change; the last one to leave undoes it.

    Example:
        >>> from contextlib import contextmanager
        >>> @share_context
        ... @contextmanager
        ... def change():
        ...     print("made")
        ...     yield
        ...     print("undone")
        >>> with change(), change():
        ...     print("there")
        made
        there
        undone
    """
    lock, stack = threading.Lock(), ExitStack()
    users = 0

    @contextmanager
    @wraps(change)
    def block() -> Iterator[None]:
        nonlocal users
        with lock:
            if not users:
                stack.enter_context(change())
            users += 1
        try:
            yield
        finally:
            with lock:
                users -= 1
                if not users:
                    stack.close()

    return block
