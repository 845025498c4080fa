"""What stands before every request: it must be for this machine, from this page, and not too large; and what every answer says.

A server on one's own machine can be reached by any page that is open in the browser: through a name that resolves to 127.0.0.1
(so the Host is checked), or by a form (so the Origin is).
"""

from __future__ import annotations

import asyncio
import hmac
import json
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard", "Refused", "body_of", "refusal"]

MOST = 64 * 1024  # bytes of a request
PATIENCE = 10.0  # seconds in which it must be there
COOKIE = "addnorm-token"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

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


def refusal(status: int, sentence: str) -> JSONResponse:
    """The sentence, for the page to show."""
    return JSONResponse({"error": sentence}, status)


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
        headers = Headers(scope=scope)
        try:
            self._check(headers)
            bring = self._token(scope, headers)
        except Refused as error:
            await refusal(error.status, str(error))(scope, receive, guarded)
            return
        await self.app(scope, receive, guarded)

    def _check(self, headers: Headers) -> None:
        host = headers.get("host", "")
        name = _name(f"http://{host}")
        if self.hosts is not None and name not in self.hosts:
            raise Refused(
                421, f"Host is {host[:60]!r}, expected localhost: open the address that `addnorm explore` printed."
            )
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            raise Refused(
                403, f"Origin is {origin[:60]!r}, expected http://{host[:60]}: only this server's own page may ask."
            )
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Refused(403, "The request came from another site, expected this server's own page.")

    def _token(self, scope: Scope, headers: Headers) -> str | None:
        """The token to be kept in a cookie, if it came in the address."""
        if self.token is None:
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if _same(given, self.token):
            return given
        try:
            kept = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            kept = None
        if kept is None or not _same(kept.value, self.token):
            raise Refused(401, "The token is missing: open the address that `addnorm explore` printed, with all of it.")
        return None


def _name(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())


async def body_of(request: Request) -> Any:
    """The JSON of a request.

    Raises:
        Refused: it is too large, too slow, or no JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
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
