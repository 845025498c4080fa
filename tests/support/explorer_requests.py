"""Requests to the explorer's server, right and wrong, with the expected responses."""

import json
import random

from addnorm._util.jsonio import to_jsonable
from addnorm.explorer import race, stack, streams
from addnorm.explorer.params import Choice, Flag
from addnorm.lab.init_probe import InitProbe

SMALL_RACE = {"layers": 2, "steps": 6, "d_model": 16, "tokens": 8, "batch": 2}
RACE_ADDRESS = "#v=1&view=race&L=2&steps=6&rd=16&rT=8&rB=2"
"""The same race as the server and the page name it."""

JSON = {"Content-Type": "application/json"}


def measured(**chosen):
    """Return the library's result after a round trip through JSON."""
    return json.loads(json.dumps(to_jsonable(stack.compute(InitProbe(**chosen)))))


# Requests in valid HTTP.

STRANGE = [
    None, True, False, [], {}, [1], {"a": 1}, "", "x", "24", "NaN", "Infinity", -1, 0.5, 3, 10**9, -(10**9), 10**400, 1e300, -1e300,
    "x" * 5000, "\ud800", "\x00", "٣", [[[]]], -0.1,
]  # fmt: skip
WORDS = ["NaN", "Infinity", "-Infinity", "1e999", "9" * 4301, "9" * 20_000, "01", "0x10", "1_000", "+1", ".5", "'1'"]


def is_valid(field, value):
    """Return whether a value is right for a field."""
    if isinstance(field, Choice | Flag):
        return value in field.choices if isinstance(field, Choice) else isinstance(value, bool)
    in_range = type(value) in (int, float) and field.minimum <= value <= field.maximum
    return in_range and (field.step is None or (value == int(value) and (value - field.minimum) % field.step == 0))


BROKEN = [
    b"", b"{", b"{}{}", b'{"a":1,}', b"\xff\xfe", b'{"placement":"\xff"}', b"\x00", b"[" * 60_000, b'{"a":' * 10_000,
    b"{" + b" " * 70_000 + b"}", b"1" * 5000, b"\xef\xbb\xbf{", *(b"[" * n + b"]" * n for n in range(900, 1000, 7)),
]  # fmt: skip
PATHS = [
    "/nothing", "//healthz", "/healthz/x", "/index.html", "/static", "/static/", "/static//etc/passwd", "/static/../server.py",
    "/static/%2e%2e/server.py", "/static/..%2f..%2fserver.py", "/static/%2e%2e%5cserver.py", "/static/app.js/x", "/static/a%00b",
    "/static/" + "a" * 300, "/static/%ff%fe", "/static/stack", "/%zz", "/api/", "/api/Stack", "/api/recording/", "/api/recording/0",
    "/api/recording%2f..%2fmeta", "/../../etc/passwd", "*", "x", "http://evil.example/", "/\\", "/healthz%0d%0aX:y",
]  # fmt: skip


def bad_requests():
    """Yield (method, path, headers, body, statuses) of wrong requests in valid HTTP, in a deterministic order."""
    for path, fields in (("/api/stack", stack.FIELDS), ("/api/streams", streams.FIELDS), ("/api/race", race.FIELDS)):
        for name, field in fields.items():
            wrong = [json.dumps(value) for value in STRANGE if not is_valid(field, value)]
            for text in wrong + WORDS:
                yield "POST", path, JSON, f'{{"{name}":{text}}}'.encode(), {400, 422}
    for body in BROKEN:
        yield "POST", "/api/stack", JSON, body, {400, 413, 422}
    for value in (*STRANGE[:4], [1], {"placment": "pre"}, {"x" * 5000: 1}, {"\ud800": 1}):
        yield "POST", "/api/stack", JSON, json.dumps(value).encode(), {422}
    for size in (65_537, 100_000, 1_000_000, 5_000_000):
        yield "POST", "/api/stack", JSON, b" " * size, {413}
    for body in mangled_requests(400):
        yield "POST", "/api/stack", JSON, body, {400, 422}
    kinds = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonp",
             "text/json", "application", "\xff", "a" * 5000)  # fmt: skip
    methods = ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "BREW", "CONNECT", "x" * 100)
    for path in ("/api/stack", "/api/recording", "/api/race"):
        yield from (("POST", path, {"Content-Type": kind}, b"{}", {415}) for kind in kinds)
        yield from ((method, path, {}, None, {405}) for method in methods)
    for path in ("/", "/healthz", "/api/meta", "/static/app.js"):
        yield from ((method, path, {}, None, {405}) for method in methods if method not in ("GET", "HEAD"))
    yield from (("GET", path, {}, None, {404}) for path in PATHS)
    numbers = (0, -1, "x", 10**50, 1.5, None)  # the server has no recording
    for value in (*STRANGE, *({"recording": number} for number in numbers), {"step": "9" * 5000}, {"x": 1}):
        yield "POST", "/api/recording", JSON, json.dumps(value).encode(), {422}


def mangled_requests(count):
    """Yield bytes that resemble a valid request."""
    rng = random.Random(8)
    for _ in range(count):
        body = bytearray(json.dumps({"placement": "pre", "sublayers": 48, "gain": 1.5, "residual": True}).encode())
        for _ in range(rng.randint(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            stack.parse(json.loads(bytes(body)))
        except ValueError:
            yield bytes(body)


# Truncated requests, and invalid HTTP.

CUT = [
    b"", b"GET / HTTP/1.1\r\nHost: lo", b"GET /static/app.js HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /api/stack HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
    b"POST /api/stack HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /api/race HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /api/stack HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
]  # fmt: skip
# Few requests for the parser, which is another library's: its errors must not be printed, and no response may be another one.
NO_HTTP = [
    bytes(range(256)) * 4, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 200, b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000, b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    b"POST /api/stack HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
]  # fmt: skip
