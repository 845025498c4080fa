"""The explorer's web server: the page's files, and a route for the data of each view.

GET  /                       the page; its files are under /static/
GET  /api/meta               parameters with their bounds, wirings, worked examples, recordings
POST /api/stack              a stack before training, by depth
POST /api/streams            a stack with several streams before training, by depth
POST /api/recording          a recording of the command line
POST /api/race               two trainings, as server-sent events
GET  /healthz                "ok"
"""

import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from addnorm._util.jsonio import dumps_line
from addnorm.explorer import race, stack, streams
from addnorm.explorer.page import STATIC, describe
from addnorm.explorer.recording import Recordings
from addnorm.explorer.scheduler import Scheduler
from addnorm.explorer.security import LOOPBACK, SecurityMiddleware, error_response, read_json

IDLE = 30  # seconds without a request after which a connection is closed, at the latest after twice as many
TICKS = 10  # calls of `on_tick` by uvicorn in a second


def create_app(
    recordings: Sequence[Path] = (),
    *,
    hosts: frozenset[str] | None = LOOPBACK,
    token: str | None = None,
    scheduler: Scheduler | None = None,
) -> SecurityMiddleware:
    """Return the server as an ASGI application.

    Args:
        recordings: files that `addnorm record` wrote.
        hosts: allowed names of the server; None: any.
        token: secret that every request must carry; None: no token.
        scheduler: scheduler of the computations; None: a new one.

    Raises:
        ValueError: a file is not a recording.
    """
    loaded, scheduler = Recordings(recordings), scheduler or Scheduler()
    routes = [
        Route("/", FileResponse(STATIC / "index.html"), methods=["GET"]),
        Route("/healthz", PlainTextResponse("ok"), methods=["GET"]),
        Route("/api/meta", _json_response(dumps_line(describe(loaded))), methods=["GET"]),
        Route("/api/stack", partial(_compute, scheduler, stack), methods=["POST"]),
        Route("/api/streams", partial(_compute, scheduler, streams), methods=["POST"]),
        Route("/api/recording", partial(_compute, scheduler, loaded), methods=["POST"]),
        Route("/api/race", partial(_race, scheduler), methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        scheduler.close()

    app = Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=lifespan)
    app.router.redirect_slashes = False
    return SecurityMiddleware(app, hosts, token)


async def _compute(scheduler: Scheduler, view: Any, request: Request) -> Response:
    """Return the data of a view as JSON, with the time that it took. A view has the functions `parse` and `compute`."""
    params = await _parse(view, request)

    def work() -> Response:
        start = time.perf_counter()
        response = _json_response(dumps_line(view.compute(params)))
        seconds = time.perf_counter() - start
        response.headers["Server-Timing"] = f"compute;dur={seconds * 1e3:.1f}"  # for the browser's developer tools
        return response

    return await scheduler.compute(
        _client(request), work, kind=request.url.path, is_disconnected=request.is_disconnected
    )


async def _race(scheduler: Scheduler, request: Request) -> Response:
    runs = await _parse(race, request)
    events = scheduler.stream(_client(request), partial(race.run_race, runs))
    first = await anext(events, None)
    if first is None:
        raise HTTPException(409, "The race was stopped before its first step.")
    return _EventResponse(_encode_events(first, events))


class _EventResponse(StreamingResponse):
    """Server-sent events. The generator is closed with the response, also when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events)
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.events.aclose()


async def _encode_events(first: Any, events: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        yield f"data: {dumps_line(first)}\n\n"
        try:
            async for event in events:
                yield f"data: {dumps_line(event)}\n\n"
        except Exception as error:  # the response has begun, so the error becomes an event
            yield f"data: {dumps_line({'event': 'failed', 'error': str(error)})}\n\n"


async def _parse(view: Any, request: Request) -> Any:
    """Return the parsed parameters of a request, or raise an HTTPException with what is wrong."""
    params = await read_json(request)
    try:
        return view.parse(params)
    except (ValueError, TypeError) as error:
        raise HTTPException(422, str(error)) from None


def _client(request: Request) -> str:
    """Return the client's name: the page sends its own name; other clients share one name for each address."""
    name = request.headers.get("addnorm-client", "")
    return name[:64] if name else f"address {request.client.host if request.client else ''}"


def _json_response(text: str) -> Response:
    return Response(text, media_type="application/json")


# Errors, as a status and a sentence.


async def _http_error(request: Request, error: Any) -> Response:
    """Return a response with the sentence of an error. Starlette's own errors have none: they get one here."""
    status, sentence = error.status_code, error.detail
    if sentence == HTTPStatus(status).phrase:
        what = f"{request.method[:20]} {request.scope['path'][:80]}"
        reasons = {404: "there is no such address", 405: "this address does not allow the method"}
        sentence = f"{what}: {reasons.get(status, status)}."
    return error_response(status, sentence, error.headers)


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=400)


async def _failure(request: Request, error: Exception) -> Response:
    return error_response(500, f"The computation failed: {type(error).__name__}: {str(error)[:200]}")


HANDLERS: dict[Any, Any] = {HTTPException: _http_error, ClientDisconnect: _disconnected, Exception: _failure}


# The process.


def serve(app: SecurityMiddleware, scheduler: Scheduler, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        app: the application.
        scheduler: scheduler of its computations.
        listener: a listening socket.
        on_ready: called once, when the server answers and can be interrupted.
    """
    config = uvicorn.Config(
        app, http=_Protocol, loop="asyncio", ws="none", lifespan="on", log_level="error", access_log=False, server_header=False,
        date_header=False, proxy_headers=False, timeout_graceful_shutdown=1, timeout_keep_alive=IDLE, limit_concurrency=256,
    )  # fmt: skip
    with suppress(KeyboardInterrupt):
        _Server(config, scheduler, on_ready).run(sockets=[listener])


class _Protocol(H11Protocol):
    """HTTP protocol without the traceback that uvicorn prints when a request breaks in its body while it is answered."""

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()


class _Server(uvicorn.Server):
    """Server that reports when it is ready and closes idle connections."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.scheduler, self.on_ready = scheduler, on_ready
        self._idle: dict[Any, Any] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % (IDLE * TICKS) == 0:
            self._close_idle()
        return await super().on_tick(counter)

    def _close_idle(self) -> None:
        """Close connections that have been idle since the previous call; uvicorn has no timeout for a request's head."""
        connections: Any = self.server_state.connections
        waiting = {
            connection: connection.cycle
            for connection in connections
            if connection.cycle is None or connection.cycle.response_complete
        }
        for connection, cycle in waiting.items():
            if self._idle.get(connection, self) is cycle:
                connection.transport.close()
        self._idle = waiting

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # closing connections now is not an error
        self.scheduler.close()
        await super().shutdown(sockets)
