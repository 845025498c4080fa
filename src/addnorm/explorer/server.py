"""The server: the page's files, and what the page asks of the library. Every answer is computed by the library itself.

GET  /                       the page; its files under /static/
GET  /api/meta               what can be chosen, and between which bounds
POST /api/stack              a stack before training, by depth
POST /api/trace              one token, every step
GET  /api/recording/{n}      a recording from the command line
POST /api/race               two wirings trained, as server-sent events
GET  /healthz                "ok"
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

import addnorm
from addnorm._util.jsonio import to_jsonable
from addnorm.explorer import presets, race, stack, tokens
from addnorm.explorer.params import described
from addnorm.explorer.recordings import Recordings
from addnorm.explorer.scheduler import Busy, Desk, Ended, Gone, Superseded
from addnorm.explorer.security import LOOPBACK, Guard, Refused, body_of, refusal

__all__ = ["STATIC", "application"]

STATIC = Path(__file__).parent / "static"


def application(
    recordings: Sequence[Path] = (),
    *,
    hosts: frozenset[str] | None = LOOPBACK,
    token: str | None = None,
    desk: Desk | None = None,
) -> Guard:
    """The whole server, as an ASGI application.

    Args:
        recordings: files that `addnorm record` wrote.
        hosts: the names by which it may be called; None: any.
        token: what a request must bring; None: nothing.
        desk: where it computes; None: one of its own.

    Raises:
        ValueError: a file is no recording.
    """
    server = _Server(Recordings(recordings), desk or Desk())
    routes = [
        Route("/", server.page),
        Route("/healthz", server.health),
        Route("/api/meta", server.meta),
        Route("/api/stack", server.stack, methods=["POST"]),
        Route("/api/trace", server.trace, methods=["POST"]),
        Route("/api/race", server.race, methods=["POST"]),
        Route("/api/recording/{number}", server.recording),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    app = Starlette(routes=routes, exception_handlers=HANDLERS, lifespan=server.lifespan)
    app.router.redirect_slashes = False  # an address is right or wrong
    return Guard(app, hosts, token)


class _Server:
    def __init__(self, recordings: Recordings, desk: Desk) -> None:
        self.recordings = recordings
        self.desk = desk
        self.known = _text(
            {
                "version": addnorm.__version__,
                "stack": {"fields": described(stack.FIELDS), "places": stack.places()},
                "presets": presets.described(),
                "race": race.meta(),
                "recordings": recordings.listed(),
            }
        )

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """While it runs; at its end the races end."""
        yield
        self.desk.close()

    async def page(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("ok")

    async def meta(self, request: Request) -> Response:
        return _json(self.known)

    async def stack(self, request: Request) -> Response:
        asked = _taken(stack.flip, await body_of(request))
        return await self._computed("stack", request, partial(stack.answer, asked))

    async def trace(self, request: Request) -> Response:
        return _json(_text(_taken(tokens.answer, await body_of(request))))

    async def recording(self, request: Request) -> Response:
        asked = _taken(self.recordings.asked, request.path_params["number"], dict(request.query_params))
        return await self._computed("recording", request, partial(self.recordings.answer, asked))

    async def race(self, request: Request) -> Response:
        asked = _taken(race.asked, await body_of(request))
        events = self.desk.follow(_client(request), partial(race.race, asked))
        try:
            first = await anext(events, None)
        except Busy:
            raise Refused(503, "Two races run already: stop one, or wait until it has ended.") from None
        if first is None:
            raise Refused(409, "The race was stopped before its first step.")
        return _Events(_sent(first, events))

    async def _computed(self, kind: str, request: Request, work: Callable[[], Any]) -> Response:
        def timed() -> tuple[str, float]:
            begun = time.perf_counter()
            return _text(work()), time.perf_counter() - begun

        text, seconds = await self.desk.compute(_client(request), timed, kind=kind, gone=request.is_disconnected)
        answer = _json(text)
        answer.headers["Server-Timing"] = f"compute;dur={seconds * 1e3:.1f}"  # the browser's tools show it
        return answer


class _Events(StreamingResponse):
    """Server-sent events. They end with the answer, also where nobody hears them to their end."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events)
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.events.aclose()


async def _sent(first: Any, events: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        yield f"data: {_text(first)}\n\n"
        try:
            async for event in events:
                yield f"data: {_text(event)}\n\n"
        except Exception as error:  # the answer has begun: it can only be told in it
            yield f"data: {_text({'event': 'failed', 'error': str(error)})}\n\n"


def _taken(read: Callable[..., Any], *given: Any) -> Any:
    """What a request asks for, or the sentence about what is wrong with it."""
    try:
        return read(*given)
    except LookupError as error:
        raise Refused(404, str(error.args[0])) from None
    except (ValueError, TypeError) as error:
        raise Refused(422, str(error)) from None


def _client(request: Request) -> str:
    """Who asks: the page says so of itself; of others there is one for each address."""
    given = request.headers.get("addnorm-client", "")
    return given[:64] if given else f"address {request.client.host if request.client else ''}"


def _text(found: Any) -> str:
    """JSON, with words for NaN and inf."""
    return json.dumps(to_jsonable(found), allow_nan=False, separators=(",", ":"))


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


# What goes wrong, as a status and a sentence.


async def _refused(request: Request, error: Exception) -> Response:
    return refusal(error.status if isinstance(error, Refused) else 400, str(error))


async def _undone(request: Request, error: Exception) -> Response:
    return refusal(*UNDONE[type(error)])


async def _missing(request: Request, error: Exception) -> Response:
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (404, None)
    what = f"{request.method[:20]} {request.scope['path'][:80]}"
    sentence = {404: f"{what}: there is nothing here.", 405: f"{what}: this method is not for this address."}
    return refusal(status, sentence.get(status, f"{what}: {status}."), headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _failed(request: Request, error: Exception) -> Response:
    return refusal(500, f"The computation failed: {type(error).__name__}: {str(error)[:200]}")


UNDONE = {
    Superseded: (409, "A newer question came before this one was computed."),
    Busy: (503, "Too many questions wait: ask again in a moment."),
    Ended: (503, "The server ends."),
}
HANDLERS: dict[Any, Any] = {
    Refused: _refused, HTTPException: _missing, ClientDisconnect: _gone, Gone: _gone, Exception: _failed,
    **dict.fromkeys(UNDONE, _undone),
}  # fmt: skip
