"""Checks of every request before it is handled (host, origin, token, size), and security headers for every response.

Any page that is open in the browser can reach a server on the user's machine: through a name that resolves to 127.0.0.1, which
the check of the Host header prevents, or by a form, which the check of the Origin header prevents.
"""

import asyncio
import hmac
import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from addnorm.explorer.page import CONTENT_SECURITY_POLICY

MAX_BYTES = 64 * 1024  # of a request
TIMEOUT = 10.0  # seconds in which a request must arrive
COOKIE = "addnorm-token"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.IGNORECASE)

HEADERS = {
    "Content-Security-Policy": f"{CONTENT_SECURITY_POLICY}; connect-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def error_response(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return a response with the sentence, for the page to show."""
    return JSONResponse({"error": sentence}, status, headers)


class SecurityMiddleware:
    """ASGI middleware that checks requests and adds security headers.

    Args:
        app: the application.
        hosts: allowed names of the server; None: any, with a token.
        token: secret that every request must carry, once as `?token=` and then as a cookie; None: no token.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None = LOOPBACK, token: str | None = None) -> None:
        self.app, self.hosts, self.token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. Web sockets are not used."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":
            return
        new_headers, app = dict(HEADERS), self.app

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(new_headers)
            await send(message)

        try:
            self._check_headers(scope["method"], Headers(scope=scope))
            if self._check_token(HTTPConnection(scope)):
                new_headers["Set-Cookie"] = f"{COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
        except HTTPException as error:
            app = error_response(error.status_code, error.detail)
        await app(scope, receive, send_with_headers)

    def _check_headers(self, method: str, headers: Headers) -> None:
        """Check the headers that say which server is meant and which page sent the request."""
        host = headers.get("host", "")
        if self.hosts is not None and _host_name(host) not in self.hosts:
            raise HTTPException(
                421, f"Host is {host[:60]!r}, expected localhost: open the address that `addnorm explore` printed."
            )
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            raise HTTPException(
                403,
                f"Origin is {origin[:60]!r}, expected http://{host[:60]}: only this server's own page may send requests.",
            )
        is_navigation = method == "GET" and headers.get("sec-fetch-mode") == "navigate"  # such as a link in a chat
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not (
            is_navigation and headers.get("sec-fetch-dest") == "document"
        ):
            raise HTTPException(403, "The request came from another site, expected this server's own page.")

    def _check_token(self, connection: HTTPConnection) -> bool:
        """Check the token, and return whether it was in the address, so that it must be kept in a cookie."""
        if self.token is None:
            return False
        is_in_address = _equal(connection.query_params.get("token", ""), self.token)
        if not is_in_address and not _equal(connection.cookies.get(COOKIE, ""), self.token):
            raise HTTPException(401, "The token is missing: open the whole address that `addnorm explore` printed.")
        return is_in_address


def _host_name(host: str) -> str:
    """Return the name in a Host header. The port may differ, behind a tunnel for instance."""
    match = HOST.fullmatch(host)
    return (match[1] or match[2]).lower() if match else ""


def _equal(secret: str, other: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(secret.encode("utf-8", "replace"), other.encode())


async def read_json(request: Request) -> Any:
    """Return the JSON of a request.

    Raises:
        HTTPException: the request is too large, too slow, or not JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form of another site cannot send this type
        raise HTTPException(415, f"Content-Type is {kind[:60]!r}, expected application/json.")
    body = bytearray()
    try:
        async with asyncio.timeout(TIMEOUT):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BYTES:
                    raise HTTPException(413, f"The request is larger than {MAX_BYTES} bytes, expected a few hundred.")
    except TimeoutError:
        sentence = f"The request did not arrive within {TIMEOUT:g} seconds."
        raise HTTPException(408, sentence, {"Connection": "close"}) from None  # the rest of it is not read
    try:
        return json.loads(body, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The request is not JSON ({str(error)[:80]}), expected an object.") from None


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number of JSON")
