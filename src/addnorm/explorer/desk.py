"""Who computes when: one thing at a time for each client, so many at once for all, and what nobody waits for any more not at all.

A page that is dragged asks faster than it is answered. Of a client's questions one is computed and the newest waits; an older one
that still waits is answered at once that it is superseded.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread

__all__ = ["Busy", "Desk", "Superseded"]

A = TypeVar("A")
AT_ONCE = 2  # computations, of all clients
WAITING = 128  # questions that may wait, of all clients
RACES = 2  # at once


class Superseded(Exception):
    """A newer question of the same client came while this one waited."""


class Busy(Exception):
    """Too many wait already."""


class _Client:
    """One who asks."""

    def __init__(self) -> None:
        self.next: asyncio.Future[bool] | None = None  # the question that waits


class Desk:
    """Where questions are handed in; of one event loop."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}  # those of whom something is computed
        self._limiter = CapacityLimiter(AT_ONCE)
        self._waiting = 0
        self._races: dict[str, threading.Event] = {}

    async def compute(self, client: str, work: Callable[[], A]) -> A:
        """What `work` returns, from a thread.

        Raises:
            Superseded: while it waited the same client asked anew.
            Busy: too many wait.
        """
        if self._waiting >= WAITING:
            raise Busy
        self._waiting += 1
        try:
            await self._turn(client)
            try:
                return await to_thread.run_sync(work, limiter=self._limiter)
            finally:
                self._over(client)
        finally:
            self._waiting -= 1

    async def _turn(self, client: str) -> None:
        here = self._clients.get(client)
        if here is None:
            self._clients[client] = _Client()
            return
        if here.next is not None and not here.next.done():
            here.next.set_result(False)
        mine = here.next = asyncio.get_running_loop().create_future()
        try:
            if not await mine:
                raise Superseded
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled() and mine.result():
                self._over(client)  # it was my turn, and I am gone
            raise

    def _over(self, client: str) -> None:
        """The next of this client, if one waits."""
        here = self._clients[client]
        waits, here.next = here.next, None
        if waits is not None and not waits.done():
            waits.set_result(True)
        else:
            del self._clients[client]

    async def follow(self, client: str, events: Callable[[], Iterator[A]]) -> AsyncIterator[A]:
        """What a generator yields, as it does, from a thread of its own: what it holds may belong to the thread.

        Ends the generator where nobody listens any more. A client's new one ends its old one.

        Raises:
            Busy: as many run already as may.
        """
        if (old := self._races.pop(client, None)) is not None:
            old.set()
        if len(self._races) >= RACES:
            raise Busy
        stop = self._races[client] = threading.Event()
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def put(what: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, what)

        def run() -> None:
            found = events()
            try:
                for event in found:
                    put((True, event))
                    if stop.is_set():
                        break
                put((False, None))
            except Exception as error:  # goes on where it is awaited
                put((False, error))
            finally:
                found.close()  # type: ignore[attr-defined]  # a generator

        threading.Thread(target=run, name="addnorm race", daemon=True).start()
        try:
            while True:
                more, event = await queue.get()
                if not more:
                    if event is not None:
                        raise event
                    return
                yield event
        finally:
            stop.set()
            if self._races.get(client) is stop:
                del self._races[client]

    def close(self) -> None:
        """Ends all that run."""
        for stop in self._races.values():
            stop.set()
