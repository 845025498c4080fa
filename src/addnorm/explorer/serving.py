"""The server's process: it says when it listens, lets go of who sends nothing, and ends at once."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from addnorm.explorer.scheduler import Desk
from addnorm.explorer.security import Guard

__all__ = ["serve"]

IDLE = 30  # seconds without a request after which a connection ends: at the latest after twice as many
TICKS = 10  # of uvicorn's a second


def serve(page: Guard, desk: Desk, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Answers until Ctrl-C, or SIGTERM.

    Args:
        page: the application.
        desk: where it computes.
        listening: where.
        ready: called once, when it answers and can be ended.
    """
    config = uvicorn.Config(
        page, http=_Protocol, loop="asyncio", ws="none", lifespan="on", log_level="error", access_log=False, server_header=False,
        date_header=False, proxy_headers=False, timeout_graceful_shutdown=1, timeout_keep_alive=IDLE, limit_concurrency=256,
    )  # fmt: skip
    with suppress(KeyboardInterrupt), _interrupted():
        _Server(config, desk, ready).run(sockets=[listening])


class _Protocol(H11Protocol):
    """uvicorn's, which fails with a traceback where a request goes wrong in its body while it is answered."""

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # its answer has nowhere to go
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, desk: Desk, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.desk, self.ready = desk, ready
        self._idle: dict[Any, Any] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % (IDLE * TICKS) == 0:
            self._sweep()
        return await super().on_tick(counter)

    def _sweep(self) -> None:
        """Ends the connections that wait for the same request as the last time: uvicorn waits for a request's head for ever."""
        connections: Any = self.server_state.connections
        waiting = {one: one.cycle for one in connections if one.cycle is None or one.cycle.response_complete}
        for one, cycle in waiting.items():
            if self._idle.get(one, self) is cycle:
                one.transport.close()
        self._idle = waiting

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # who is cut off now is no error
        self.desk.close()
        await super().shutdown(sockets)


@contextmanager
def _interrupted() -> Iterator[None]:
    """SIGTERM is Ctrl-C here: uvicorn raises again what ended it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {one: signal.signal(one, interrupt) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
