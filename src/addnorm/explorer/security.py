"""What stands before every request: it must be for this machine, from this page, and not too large; and what every answer says.

A server on one's own machine can be reached by any page that is open in the browser: through a name that resolves to 127.0.0.1
(so the Host is checked), or by a form (so the Origin is).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard", "Refused", "body_of", "refusal"]

MOST = 64 * 1024  # bytes of a request
PATIENCE = 10.0  # seconds in which it must be there
COOKIE = "addnorm-token"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.IGNORECASE)

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Refused(Exception):
    """A request that is answered with a status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def refusal(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The sentence, for the page to show."""
    if status == 408:  # the rest would come some time, and nobody reads it
        headers = {"Connection": "close"}
    return JSONResponse({"error": sentence}, status, headers)


class Guard:
    """Middleware.

    Args:
        app: what is behind it.
        hosts: the names by which the server may be called; None: any, with a token.
        token: what a request must bring, in `?token=` once and as a cookie from then on; None: nothing.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None = LOOPBACK, token: str | None = None) -> None:
        self.app, self.hosts, self.token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":  # lifespan; nobody listens to web sockets
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if bring is not None:
                    headers.append("Set-Cookie", f"{COOKIE}={bring}; HttpOnly; SameSite=Strict; Path=/")
            await send(message)

        bring = None
        try:
            self._check(scope["method"], Headers(scope=scope))
            bring = self._token(HTTPConnection(scope))
        except Refused as error:
            await refusal(error.status, str(error))(scope, receive, guarded)
            return
        await self.app(scope, receive, guarded)

    def _check(self, method: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if self.hosts is not None and _name(host) not in self.hosts:
            raise Refused(
                421, f"Host is {host[:60]!r}, expected localhost: open the address that `addnorm explore` printed."
            )
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            raise Refused(
                403, f"Origin is {origin[:60]!r}, expected http://{host[:60]}: only this server's own page may ask."
            )
        followed = method == "GET" and headers.get("sec-fetch-mode") == "navigate"  # a link to here, in a chat say
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not (
            followed and headers.get("sec-fetch-dest") == "document"
        ):
            raise Refused(403, "The request came from another site, expected this server's own page.")

    def _token(self, connection: HTTPConnection) -> str | None:
        """The token to be kept in a cookie, if it came in the address."""
        if self.token is None:
            return None
        query = connection.scope["query_string"].decode("latin-1")
        if _same(parse_qs(query).get("token", [""])[0], self.token):
            return self.token
        if not _same(connection.cookies.get(COOKIE, ""), self.token):
            raise Refused(401, "The token is missing: open the address that `addnorm explore` printed, with all of it.")
        return None


def _name(host: str) -> str:
    """The name in a Host, without the port: what is behind a tunnel has another."""
    found = HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found else ""


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())


async def body_of(request: Request) -> Any:
    """The JSON of a request.

    Raises:
        Refused: it is too large, too slow, or no JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which a form of another site cannot send
        raise Refused(415, f"Content-Type is {kind[:60]!r}, expected application/json.")
    found = bytearray()
    try:
        async with asyncio.timeout(PATIENCE):
            async for part in request.stream():
                found += part
                if len(found) > MOST:
                    raise Refused(413, f"The request is larger than {MOST} bytes, expected a few hundred.")
    except TimeoutError:
        raise Refused(408, f"The request did not arrive within {PATIENCE:g} seconds.") from None
    try:
        return json.loads(found, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The request is no JSON ({str(error)[:80]}), expected an object.") from None


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")
