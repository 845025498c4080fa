"""Who computes when: one thing at a time for each client, so many at once for all, and what nobody waits for any more not at all.

A page that is dragged asks faster than it is answered. Of a client's questions one is computed and the newest of each kind
waits; an older one that still waits is answered at once that it is superseded. A client's turn ends with the thread that
computes for it, whoever still listens: there are never more threads than turns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any, TypeVar

__all__ = ["Busy", "Desk", "Ended", "Gone", "Superseded"]

A = TypeVar("A")
AT_ONCE = 2  # computations, of all clients
WAITING = 128  # questions that may wait, of all clients
RACES = 2  # at once, of all clients

_END = object()  # of a race's events


class Superseded(Exception):
    """A newer question of the same client came before this one was computed."""


class Busy(Exception):
    """Too many wait already."""


class Ended(Exception):
    """The server ends."""


class Gone(Exception):
    """Whoever asked does not listen any more."""


async def _there() -> bool:
    return False


class _Turns:
    """One for each client and `most` for all; who comes while there is none waits for it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.having: set[str] = set()
        self._waiting: dict[tuple[str, str], asyncio.Future[type[Exception] | None]] = {}  # in order of arrival
        self._closed = False

    async def take(self, client: str, kind: str) -> None:
        """Returns when it is this client's turn, which `leave` ends."""
        if self._closed:
            raise Ended
        older = self._waiting.get((client, kind))
        if older is None and len(self._waiting) >= WAITING:
            raise Busy
        mine = self._waiting[client, kind] = asyncio.get_running_loop().create_future()  # at the place of the older one
        if older is not None and not older.done():
            older.set_result(Superseded)
        self._next()
        try:
            refused = await mine
        except asyncio.CancelledError:
            if self._waiting.get((client, kind)) is mine:
                del self._waiting[client, kind]
            elif mine.done() and not mine.cancelled() and mine.result() is None:
                self.leave(client)  # it was my turn, and I am gone
            raise
        if refused is None and self._closed:  # meanwhile
            self.leave(client)
            refused = Ended
        if refused is not None:
            raise refused

    def leave(self, client: str) -> None:
        """The turn is over."""
        self.having.discard(client)
        self._next()

    def close(self) -> None:
        """Nobody gets a turn any more."""
        self._closed = True
        for mine in self._waiting.values():
            if not mine.done():
                mine.set_result(Ended)
        self._waiting.clear()

    def _next(self) -> None:
        for client, kind in [*self._waiting]:
            if len(self.having) >= self.most:
                return
            if client not in self.having:
                mine = self._waiting.pop((client, kind))
                if not mine.done():
                    self.having.add(client)
                    mine.set_result(None)


class Desk:
    """Where questions are handed in; of one event loop."""

    def __init__(self) -> None:
        self._questions, self._races = _Turns(AT_ONCE), _Turns(RACES)
        self._stops: dict[str, Callable[[], None]] = {}  # of the races, by client
        self._pool = ThreadPoolExecutor(AT_ONCE + RACES, "addnorm explorer")
        self._running: set[Future[Any]] = set()

    async def compute(
        self, client: str, work: Callable[[], A], *, kind: str = "", gone: Callable[[], Awaitable[bool]] = _there
    ) -> A:
        """What `work` returns, from a thread.

        Args:
            client: who asks.
            work: what is asked.
            kind: a newer question takes the place of one of its kind that waits.
            gone: whether nobody waits for it any more; asked when its turn has come.

        Raises:
            Superseded: while it waited the same client asked anew.
            Busy: too many wait.
            Ended: the server ends.
            Gone: as `gone` said.
        """
        await self._questions.take(client, kind)
        try:
            if await gone():
                raise Gone
            running = self._pool.submit(work)
        except BaseException:
            self._questions.leave(client)
            raise
        self._until(running, self._questions, client)
        return await asyncio.wrap_future(running)

    async def follow(self, client: str, events: Callable[[], Generator[A, None, None]]) -> AsyncGenerator[A, None]:
        """What a generator yields, as it does, all of it in one thread: what it holds may belong to the thread.

        Closes the generator when nobody listens any more, and when the client begins a new one, which waits for that.

        Raises:
            Superseded: the client began yet another one before this one could.
            Busy: as many run already as may.
            Ended: the server ends.
        """
        if client not in self._races.having and len(self._races.having) >= self._races.most:
            raise Busy
        if client in self._stops:
            self._stops[client]()
        await self._races.take(client, "race")
        loop, queue, stopped = asyncio.get_running_loop(), asyncio.Queue[Any](), threading.Event()

        def put(event: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(queue.put_nowait, event)

        def run() -> None:
            try:
                with closing(events()) as found:
                    while not stopped.is_set() and (event := next(found, _END)) is not _END:
                        put(event)
            except Exception as error:  # goes on where it is awaited
                put(error)
            put(_END)

        def stop() -> None:
            stopped.set()
            queue.put_nowait(_END)

        try:
            running = self._pool.submit(run)
        except BaseException:
            self._races.leave(client)
            raise
        self._stops[client] = stop
        self._until(running, self._races, client)
        try:
            while (event := await queue.get()) is not _END:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            stopped.set()
            if self._stops.get(client) is stop:
                del self._stops[client]

    def close(self) -> None:
        """Ends the races at their next event, and refuses who waits. What is computed is computed to its end: see `busy`."""
        for turns in (self._questions, self._races):
            turns.close()
        for stop in [*self._stops.values()]:
            stop()
        self._pool.shutdown(wait=False)

    @property
    def busy(self) -> bool:
        """Whether a thread computes."""
        return bool(self._running)

    def _until(self, running: Future[Any], turns: _Turns, client: str) -> None:
        """The client's turn is over when the thread is."""
        loop = asyncio.get_running_loop()

        def over(_: Any) -> None:
            self._running.discard(running)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(turns.leave, client)

        self._running.add(running)
        running.add_done_callback(over)
