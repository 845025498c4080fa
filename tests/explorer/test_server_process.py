"""Tests of the explorer's server as a process: invalid requests, many clients, races, the address."""

import json
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from addnorm.explorer import security
from support.explorer_process import RACING, Explorer
from support.explorer_requests import CUT, JSON, NO_HTTP, bad_requests, measured

HEADERS = {name.lower(): value for name, value in security.HEADERS.items()}


@pytest.fixture(scope="module")
def process():
    with Explorer(before=RACING) as explorer:
        yield explorer
        assert explorer.end() == 0
        assert explorer.stderr == "Interrupted.\n"  # whatever requests came before, stderr has no other line


def sent(process, method, path, headers, body):
    """Return the bytes of a request, unchecked: http.client would refuse to send many of them."""
    lines = [f"{method} {path} HTTP/1.1", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in ({"Host": f"127.0.0.1:{process.port}"} | headers).items()]
    lines += [] if body is None else [f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")


def raw(process, data, timeout=20):
    """Return the response to these bytes."""
    with process.connect(timeout) as connection, suppress(ConnectionError):
        connection.sendall(data)
        received = bytearray()
        while part := connection.recv(65536):
            received += part
            head, end, rest = bytes(received).partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            if end and length and len(rest) >= int(length[1]):
                break
        return bytes(received)
    return b""


def judged(process, method, path, headers, body, statuses):
    """Return the error of a response, or an empty string."""
    response = raw(process, sent(process, method, path, headers, body))
    head, _, rest = response.partition(b"\r\n\r\n")
    what = f"{method[:20]} {path[:60]} {dict(list(headers.items())[:3])} {str(body)[:80]}: {response[:300]!r}"
    if not re.match(rb"HTTP/1.1 4\d\d ", head):
        return (
            "" if not response and body and len(body) > security.MAX_BYTES else what
        )  # closed while the client was sending
    status = int(head[9:12])
    if status not in statuses and not (status == 400 and b"Invalid HTTP request" in rest):
        return f"{status}: {what}"
    if b"Invalid HTTP" in rest or method == "HEAD":
        return ""
    error = json.loads(rest)["error"]
    return "" if 10 < len(error) < 600 and error[-1] == "." and HEADERS.keys() <= set(re.findall(r"(?m)^([a-z-]+):", head.decode().lower())) else what  # fmt: skip


def test_server_survives_bad_requests(process, one_thread):
    asked = {"placement": "sandwich", "sublayers": 8, "seed": 5}
    assert process.ask("POST", "/api/stack", asked).json() == measured(**asked)
    before = process.memory() if sys.platform == "linux" else 0
    bad = [*bad_requests()]
    with ThreadPoolExecutor(8) as pool:
        troubles = [trouble for trouble in pool.map(lambda request: judged(process, *request), bad) if trouble]
        assert troubles == []
        answers = [*pool.map(lambda data: raw(process, data + b"\r\n\r\n", 5), NO_HTTP * 3)]
        assert [
            response for response in answers if response and not re.match(rb"HTTP/1.1 (4\d\d|200) ", response)
        ] == []

        def cut(data):
            with process.connect() as connection, suppress(ConnectionError):
                connection.sendall(data)
                if len(data) % 2:  # reset instead of closed
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")

        [*pool.map(cut, CUT * 15)]
    assert len(bad) >= 900
    assert process.ask("GET", "/healthz").content == b"ok"
    assert process.ask("POST", "/api/stack", asked).json() == measured(**asked)
    if before:
        assert process.memory() - before < 64 * 2**20
    assert process.stderr == ""


def test_race_stream_ends_with_client(process):
    def begun(client):
        connection = process.connect()
        connection.sendall(sent(process, "POST", "/api/race", JSON | {"Addnorm-Client": client}, b"{}"))
        return connection, connection.recv(65536)

    first, said = begun("a")
    assert b"content-type: text/event-stream" in said
    while b'"step":3' not in said:
        said += first.recv(65536)
    assert said.count(b"data: ") >= 4
    second, _ = begun("b")
    third, refused = begun("c")
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"Two races are running already: stop one, or wait until it ends." in refused + third.recv(65536)
    first.close()
    deadline = time.monotonic() + 10
    while third and refused.startswith(b"HTTP/1.1 503 "):
        assert time.monotonic() < deadline
        third.close()
        third, refused = begun("c")
    assert process.ask("GET", "/healthz").content == b"ok"
    second.close()
    third.close()
