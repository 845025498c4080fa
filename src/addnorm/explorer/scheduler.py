"""Scheduling of requests: one computation at a time for each client, two in all, and at most two races.

While the user drags a control, the page sends requests faster than they are answered. Of a client's requests one is computed
and the newest of each kind waits; an older one that still waits is refused (`SUPERSEDED`). A client's slot is released when its
thread ends, even if the client has disconnected, so that there are never more threads than slots.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

T = TypeVar("T")
MAX_COMPUTATIONS = 2  # at once, for all clients
MAX_WAITING = 128  # requests of all clients
MAX_RACES = 2  # at once, for all clients

_END = object()  # marks the end of a race's events


# Refusals of requests: the status and the sentence.
SUPERSEDED = 409, "A newer request came before this one was computed."
BUSY = 503, "Too many requests are waiting: try again in a moment."
RACING = 503, "Two races are running already: stop one, or wait until it ends."
CLOSED = 503, "The server is shutting down."


async def _never() -> bool:
    return False


class _Slots:
    """Slots for computations: at most one for each client, and `limit` in all."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.holders: set[str] = set()
        self._waiting: dict[
            tuple[str, str], object
        ] = {}  # the newest request of each client and kind, in order of arrival
        self._changed = asyncio.Event()
        self._closed = False

    async def acquire(self, client: str, kind: str) -> None:
        """Wait for a slot of the client. Call `release` afterwards."""
        key, mine = (client, kind), object()
        if key not in self._waiting and len(self._waiting) >= MAX_WAITING:
            raise HTTPException(*BUSY)
        self._waiting[key] = mine  # replaces an older request
        self._notify()
        try:
            while self._waiting.get(key) is mine and not self._closed and self._find_next() != key:
                await self._changed.wait()
            if self._closed:
                raise HTTPException(*CLOSED)
            if self._waiting.get(key) is not mine:
                raise HTTPException(*SUPERSEDED)
            self.holders.add(client)
        finally:
            if self._waiting.get(key) is mine:
                del self._waiting[key]
            self._notify()

    def release(self, client: str) -> None:
        """Give the client's slot back."""
        self.holders.discard(client)
        self._notify()

    def close(self) -> None:
        """End all waits with `CLOSED`."""
        self._closed = True
        self._notify()

    def _find_next(self) -> tuple[str, str] | None:
        """Return the request that gets the next slot, or None if none can get one now."""
        ready = (key for key in self._waiting if key[0] not in self.holders)
        return next(ready, None) if len(self.holders) < self.limit else None

    def _notify(self) -> None:
        """Wake all waiting requests."""
        self._changed.set()
        self._changed = asyncio.Event()


class Scheduler:
    """Runner of computations and races in threads, for one event loop."""

    def __init__(self) -> None:
        self._computations, self._races = _Slots(MAX_COMPUTATIONS), _Slots(MAX_RACES)
        self._stops: dict[str, Callable[[], None]] = {}  # of the races, by client
        self._pool = ThreadPoolExecutor(MAX_COMPUTATIONS + MAX_RACES, "addnorm explorer")
        self._running: set[Future[Any]] = set()

    async def compute(
        self,
        client: str,
        work: Callable[[], T],
        *,
        kind: str = "",
        is_disconnected: Callable[[], Awaitable[bool]] = _never,
    ) -> T:
        """Return the result of `work`, which runs in a thread.

        Args:
            client: name of the client.
            work: the computation.
            kind: a newer request replaces a waiting one of the same client and kind.
            is_disconnected: whether the client has disconnected; called when the slot is assigned.

        Raises:
            HTTPException: a newer request of the client replaced this one, too many requests are waiting, the server is shutting
                down, or the client has disconnected.
        """
        return await asyncio.wrap_future(await self._start(self._computations, client, kind, work, is_disconnected))

    async def stream(self, client: str, events: Callable[[], Generator[T, None, None]]) -> AsyncGenerator[T, None]:
        """Yield the events of a generator, which runs in one thread from its first event to its end.

        The generator is closed when the consumer stops, or when the client starts a new generator. The new one waits until the
        old one is closed.

        Raises:
            HTTPException: the client started another generator before this one could begin, too many generators are running, or
                the server is shutting down.
        """
        if client not in self._races.holders and len(self._races.holders) >= self._races.limit:
            raise HTTPException(*RACING)
        if client in self._stops:
            self._stops[client]()
        loop, queue, stopped = asyncio.get_running_loop(), asyncio.Queue[Any](), threading.Event()

        def put(event: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, event)

        def run() -> None:
            try:
                with closing(events()) as generator:
                    while not stopped.is_set() and (event := next(generator, _END)) is not _END:
                        put(event)
            except Exception as error:  # raised again in the consumer
                put(error)
            put(_END)

        def stop() -> None:
            stopped.set()
            queue.put_nowait(_END)

        await self._start(self._races, client, "race", run)
        self._stops[client] = stop
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
        """Stop the races after their next event and end all waits. Running computations are not interrupted: see `is_busy`."""
        for slots in (self._computations, self._races):
            slots.close()
        for stop in [*self._stops.values()]:
            stop()
        self._pool.shutdown(wait=False)

    @property
    def is_busy(self) -> bool:
        """Whether a thread is running."""
        return bool(self._running)

    async def _start(
        self, slots: _Slots, client: str, kind: str, work: Callable[[], T],
        is_disconnected: Callable[[], Awaitable[bool]] = _never,
    ) -> Future[T]:  # fmt: skip
        """Wait until the client has a slot, start `work` in a thread, and return its future; the end of `work` frees the slot."""
        await slots.acquire(client, kind)
        try:
            if await is_disconnected():
                raise HTTPException(400)
            running = self._pool.submit(work)
        except BaseException:
            slots.release(client)
            raise
        loop = asyncio.get_running_loop()

        def release(_: Any) -> None:
            self._running.discard(running)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(slots.release, client)

        self._running.add(running)
        running.add_done_callback(release)
        return running
