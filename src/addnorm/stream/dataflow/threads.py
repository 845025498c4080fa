"""What torch has once for all threads, so that models can be watched in several at a time.

A change to the whole process is made by the first thread that wants it and undone by the last: each undoing what itself found,
in whatever order they end, one would leave the change behind. And torch's random generator belongs to one thread at a time
while it is forked: what another draws meanwhile would be put back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps

import torch

__all__ = ["forked", "shared"]

_generator = threading.RLock()


@contextmanager
def forked(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Inside the block the random generators of CPU and devices are this thread's alone; after it they are as they were."""
    with _generator, torch.random.fork_rng([*devices]):
        yield


def shared(change: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    """A block that changes the whole process, as one in which several threads may be at a time.

    Example:
        >>> from contextlib import contextmanager
        >>> @shared
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
