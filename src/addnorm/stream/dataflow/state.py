"""State that exists once for the whole process: random generators, and settings of torch.

Several threads may observe models at a time, so `fork_rng` and `share_context` protect it.
"""

from __future__ import annotations

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
MAX_OBJECTS = 10_000  # maximum number of objects that are searched for tensors


def find_tensors(argument: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument: in containers and attributes, at any depth."""
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


_generator = threading.RLock()


@contextmanager
def fork_rng(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Restore the global random generators of torch, Python and numpy after the block.

    Only one thread at a time runs such a block, since concurrent blocks would restore wrong states.
    """
    numpy = sys.modules.get("numpy")
    with _generator, torch.random.fork_rng([*devices]):
        python_state = random.getstate()
        numpy_state = numpy.random.get_state() if numpy is not None else None
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def share_context(change: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Decorate a context manager that changes the whole process, so that several threads can be inside at a time.

    The first thread to enter makes the change. The last thread to leave undoes it.

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
