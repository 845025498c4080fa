"""The explorer's server: what it answers is the library's; what it refuses it refuses in a sentence, and goes on."""

import asyncio
import json
import random
import re
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pytest

from loops import apart

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")  # of starlette's test client

from starlette.testclient import TestClient

import addnorm
from addnorm.explorer import guard, race, server, stack
from addnorm.explorer.fields import Choice, Flag, Number
from addnorm.explorer.server import application
from addnorm.lab.flip import Flip
from addnorm.stream.record.store import plain
from addnorm.trace import trace
from explorer_process import RACING, Explorer

HEADERS = {name.lower(): value for name, value in guard.HEADERS.items()}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def process():
    with Explorer(before=RACING) as explorer:
        yield explorer
        assert explorer.end() == 0
        assert explorer.stderr == "Ended.\n"  # whatever came before: not a line, let alone a traceback


@pytest.fixture(scope="module")
def clients():
    with TestClient(application(), "http://localhost:8017") as found:
        yield found


@pytest.fixture
def client(clients, threads):
    threads(1)
    return clients


def measured(**chosen):
    """What the library says, as it comes out of JSON."""
    return json.loads(json.dumps(plain(stack.answer(Flip(**chosen)))))


# What it answers.


def test_a_stack_is_what_the_library_measures(client):
    asked = {
        "placement": "pre",
        "sublayers": 6,
        "d": 16,
        "tokens": 4,
        "seed": 3,
        "gain": 0.7,
        "final": "off",
        "alpha": 2.0,
    }
    found = client.post("/api/stack", json=asked)
    assert found.status_code == 200
    expected = Flip("pre", 6, 16, 4, 0.7, 2.0, 3, final_norm=False).measure()
    assert {name: found.json()[name] for name in expected} == json.loads(json.dumps(plain(expected)))
    assert client.post("/api/stack", json={}).json() == measured()


def test_numbers_that_overflow_come_as_words(client):
    asked = {"placement": "none", "sublayers": 96, "d": 64, "gain": 3.0, "alpha": 8.0}
    text = client.post("/api/stack", json=asked).text
    assert json.loads(text, parse_constant=pytest.fail)["stream"][-1] in ("Infinity", "NaN")


def test_a_trace_is_what_the_library_traces(client):
    asked = {"x": [1, 2, 3], "sublayer": [0.5, -1, 1.5], "placement": "pre", "weight": 2, "eps": 0.001}
    found = client.post("/api/trace", json=asked)
    expected = trace([1, 2, 3], [0.5, -1, 1.5], placement="pre", weight=2, eps=0.001).to_dict()
    assert found.json() == json.loads(json.dumps(plain(expected)))


def test_the_page_its_files_and_what_it_must_know(client):
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    files = re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text)
    assert len(files) > 2
    for path in ["/static/app.js", *files]:
        assert client.get(path).status_code == 200, path
    meta = client.get("/api/meta").json()
    assert meta["version"] == addnorm.__version__
    assert meta["stack"]["fields"]["sublayers"]["most"] == 96
    assert client.get("/healthz").text == "ok"


@pytest.mark.parametrize("path", ["/", "/healthz", "/api/meta", "/static/app.js"])
def test_head_is_get_without_a_body(client, path):
    got, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]


def test_every_answer_says_what_may_be_done_with_it(client):
    etag = client.get("/static/app.js").headers["etag"]
    answers = [
        client.get("/"), client.get("/static/app.js"), client.get("/static/app.js", headers={"If-None-Match": etag}),
        client.get("/api/meta"), client.post("/api/trace", json={"x": [1], "sublayer": [2]}), client.get("/nothing"),
        client.delete("/"), client.post("/api/stack", json={"d": 1}), client.get("/", headers={"Host": "evil.example"}),
        client.post("/api/stack", content=b"{}"), client.head("/"), client.get("/", headers={"Range": "bytes=0-9"}),
    ]  # fmt: skip
    assert [one.status_code for one in answers] == [200, 200, 304, 200, 200, 404, 405, 422, 421, 415, 200, 206]
    for one in answers:
        assert HEADERS.items() <= dict(one.headers).items(), one.url
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_an_answer_to_what_failed_says_so_and_has_the_headers_too(monkeypatch):
    def fails(asked):
        raise OverflowError("it was too much")

    monkeypatch.setattr(stack, "answer", fails)
    client = TestClient(application(), "http://localhost:8017", raise_server_exceptions=False)
    found = client.post("/api/stack", json={})
    assert (found.status_code, found.json()) == (
        500,
        {"error": "The computation failed: OverflowError: it was too much"},
    )
    assert HEADERS.items() <= dict(found.headers).items()


def test_a_method_that_is_not_for_an_address_is_told_which_is(client):
    assert client.get("/api/stack").headers["allow"] == "POST"
    assert set(client.post("/static/app.js").headers["allow"].split(", ")) == {"GET", "HEAD"}


# Who may ask.


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8017", "[::1]:8017", "[::1]"])
def test_it_may_be_called_by_the_names_of_this_machine(client, host):
    assert client.get("/healthz", headers={"Host": host}).status_code == 200
    assert client.get("/healthz", headers={"Host": host, "Origin": f"http://{host}"}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "evil.example:8017", "", "127.0.0.2", "127.1", "2130706433", "[::2]", "[::1",
     "user@localhost", "localhost/evil.example", "localhost:8017:1", "localhost:", "local host", "evil.example#localhost",
     "evil.example\\@localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "ｌocalhost".encode().decode("latin-1")],
)  # fmt: skip
def test_another_name_is_refused(client, host):
    found = client.get("/healthz", headers={"Host": host.encode("latin-1")})
    assert found.status_code == 421
    assert found.json()["error"].startswith("Host is ")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://localhost:3000"},
        {"Origin": "https://localhost:8017"}, {"Origin": ""}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"},
    ],
)  # fmt: skip
@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("GET", "/static/app.js"), ("POST", "/api/stack")])
def test_another_site_is_refused(client, method, path, headers):
    found = client.request(method, path, json={}, headers=headers)
    assert found.status_code == 403
    assert found.json()["error"].endswith(".")


def test_a_link_on_another_site_opens_the_page_and_posts_nothing(client):
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert client.get("/", headers=followed).status_code == 200
    assert client.post("/api/stack", json={}, headers=followed).status_code == 403


def test_with_a_token_nothing_is_answered_without_it():
    paths = ["/", "/healthz", "/api/meta", "/static/app.js", "/nothing", "/api/recording/0"]
    client = TestClient(application(hosts=None, token="secret"), "http://any.example:8017")
    for path in paths:
        for more in (
            "",
            "?token=",
            "?token=Secret",
            "?token=secret2",
            "?token=%F0%9F%92%A9&x=%ff",
            "?token&token=secre",
        ):
            found = client.get(path + more)
            assert (found.status_code, list(found.cookies)) == (401, [])
            assert "The token is missing" in found.json()["error"]
    assert client.post("/api/stack", json={}).status_code == 401
    assert client.get("/", headers={"Cookie": f"{guard.COOKIE}=wrong"}).status_code == 401
    first = client.get("/?token=secret")
    assert first.status_code == 200
    assert first.headers["set-cookie"] == f"{guard.COOKIE}=secret; HttpOnly; SameSite=Strict; Path=/"
    assert "set-cookie" not in client.get("/").headers
    for path in paths[:4]:
        assert client.get(path).status_code == 200
    client.cookies.clear()
    others = f'theme={{"a":1}}; broken; =; {guard.COOKIE}=secret; x="y'  # a name on this machine may have set any
    assert client.get("/healthz", headers={"Cookie": others}).status_code == 200
    assert client.get("/?token=secret", headers={"Origin": "http://evil.example"}).status_code == 403


# A thousand bad requests.

STRANGE = [
    None, True, False, [], {}, [1], {"a": 1}, "", "x", "24", "NaN", "Infinity", -1, 0.5, 10**9, -(10**9), 10**400, 1e300, -1e300,
    "x" * 5000, "\ud800", "\x00", "٣", [[[]]], -0.1,
]  # fmt: skip
WORDS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "9" * 4301,
    "9" * 20_000,
    "01",
    "0x10",
    "1_000",
    "+1",
    ".5",
    "'1'",
]


def strange(field):
    """What does not fit a field, as JSON."""
    fits = {Number: lambda one: type(one) in (int, float) and field.least <= one <= field.most
            and (not field.whole or (one == int(one) and (one - field.least) % field.step == 0)),
            Choice: lambda one: one in field.among, Flag: lambda one: isinstance(one, bool)}[type(field)]  # fmt: skip
    return [json.dumps(one) for one in STRANGE if not fits(one)] + WORDS


TRACED = {"x": [1, 2], "sublayer": [3, 4]}
WRONG_TRACES = [
    {}, {"x": [1]}, {"x": [1], "sublayer": [1, 2]}, TRACED | {"x": []}, TRACED | {"x": [1] * 17, "sublayer": [1] * 17},
    TRACED | {"x": 1}, TRACED | {"x": ["1", 2]}, TRACED | {"x": [True, 2]}, TRACED | {"x": [[1], 2]}, TRACED | {"x": [10**400, 1]},
    TRACED | {"x": [None, 1]}, TRACED | {"weight": "1"}, TRACED | {"weight": [1]}, TRACED | {"bias": {}}, TRACED | {"grad": 1},
    TRACED | {"read_grad": [1, 2]}, TRACED | {"eps": -1}, TRACED | {"eps": True}, TRACED | {"eps": "1"}, TRACED | {"eps": None},
    TRACED | {"eps": 10**400}, TRACED | {"placement": "mid"}, TRACED | {"placement": None}, TRACED | {"norm": 1},
    TRACED | {"norm": ["layer"]}, TRACED | {"variance": "unbiased", "norm": "rms"}, TRACED | {"digits": 3}, TRACED | {"title": "x"},
    TRACED | {"": 1}, [TRACED], "x", 3, None, True,
]  # fmt: skip
BROKEN = [
    b"", b"{", b"}", b"{}{}", b"[1,]", b'{"a":1,}', b"\xff\xfe", b'{"placement":"\xff"}', b"\xed\xa0\x80", b"\x00", b"nul",
    b"[" * 60_000, b'{"a":' * 10_000, b"[" * 30_000 + b"]" * 30_000, b'{"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}", b"{" + b" " * 70_000 + b"}",
    b'"' + b"x" * 70_000, b"1" * 5000, b"\xef\xbb\xbf{", b"\xff\xfe{\x00", *(b"[" * n + b"]" * n for n in range(900, 1000, 7)),
]  # fmt: skip
PATHS = [
    "/nothing", "//", "//healthz", "/healthz/", "/healthz/x", "/index.html", "/static", "/static/", "/static//etc/passwd",
    "/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2f..%2fserver.py", "/static/%2e%2e%5cserver.py",
    "/static/....//server.py", "/static/app.js/x", "/static/a%00b", "/static/%00", "/static/" + "a" * 300,
    "/static/" + "a/" * 2000, "/static/%ff%fe", "/static/%E2%80%AE", "/static/~root", "/static/.", "/static/stack", "/%", "/%zz",
    "/api", "/api/", "/api/stack/", "/api/Stack", "/api/recording", "/api/recording/", "/api/recording/0/1",
    "/api/recording/0%2f..%2f1", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/etc/passwd", "/favicon.ico", "*", "x",
    "http://evil.example/", "/\\", "/;a", "/static;a/app.js", "/healthz%20", "/healthz%0d%0aX:y",
]  # fmt: skip


def bad_requests():
    """(method, path, headers, body, statuses) of what can be sent in good HTTP: a few hundred, always the same ones."""
    rng = random.Random(8)
    for path, fields in (("/api/stack", stack.FIELDS), ("/api/race", race.FIELDS)):
        for name, field in fields.items():
            for text in strange(field):
                yield "POST", path, JSON, b'{"%s":%s}' % (name.encode(), text.encode()), {400, 422}
    for given in WRONG_TRACES:
        yield "POST", "/api/trace", JSON, json.dumps(given).encode(), {422}
    for body in BROKEN:
        for path in ("/api/stack", "/api/trace"):
            yield "POST", path, JSON, body, {400, 413, 422}
    for given in (*STRANGE[:4], *STRANGE[5:6], {"placment": "pre"}, {"x" * 5000: 1}, {"\ud800": 1}):
        if given != {}:
            yield "POST", "/api/stack", JSON, json.dumps(given).encode(), {422}
    for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonp",
                 "text/json", "application", "\xff", "a" * 5000):  # fmt: skip
        for path in ("/api/stack", "/api/trace", "/api/race"):
            yield "POST", path, {"Content-Type": kind}, b"{}", {415}
    for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "BREW", "CONNECT", "x" * 100):
        for path in ("/api/stack", "/api/race", "/api/trace"):
            yield method, path, {}, None, {405}
        if method not in ("GET", "HEAD"):
            for path in ("/", "/healthz", "/api/meta", "/static/app.js", "/api/recording/0"):
                yield method, path, {}, None, {405}
    for path in PATHS:
        yield "GET", path, {}, None, {404}
    for which in (
        "0",
        "-1",
        "x",
        "9" * 20,
        "9" * 5000,
        "1.0",
        "0x0",
        "%00",
        "..",
        "0?step=0",
        "0?step=" + "9" * 5000,
        "0?x=1",
        "٣",
    ):
        yield "GET", f"/api/recording/{quote(which, safe='?=%')}", {}, None, {404, 422}
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        for method, path in (
            ("GET", "/"),
            ("GET", "/static/app.js"),
            ("POST", "/api/stack"),
            ("POST", "/api/race"),
            ("GET", "/no"),
        ):
            yield method, path, JSON | headers, b"{}", {421, 403}
    for size in (65_537, 100_000, 1_000_000, 5_000_000):
        yield "POST", "/api/stack", JSON, b" " * size, {413}
    for _ in range(400):  # bytes that are almost a request
        body = bytearray(json.dumps({"placement": "pre", "sublayers": 48, "gain": 1.5, "residual": True}).encode())
        for _ in range(rng.randint(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        with suppress(ValueError):
            if not isinstance(json.loads(bytes(body)), dict):
                continue
            stack.flip(json.loads(bytes(body)))
            continue  # it is one
        yield "POST", "/api/stack", JSON, bytes(body), {400, 422}


def sent(process, method, path, headers, body):
    """Whatever it says, as it is: http.client would refuse to send much of it."""
    lines = [f"{method} {path} HTTP/1.1", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in ({"Host": f"127.0.0.1:{process.port}"} | headers).items()]
    lines += [] if body is None else [f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")


def raw(process, data, timeout=20):
    """What comes back for these bytes, until the server has said all."""
    with process.connect(timeout) as connection, suppress(ConnectionError):
        connection.sendall(data)
        found = bytearray()
        while part := connection.recv(65536):
            found += part
            head, end, rest = bytes(found).partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            if end and length and len(rest) >= int(length[1]):
                break
        return bytes(found)
    return b""


def judged(process, method, path, headers, body, statuses):
    """The trouble with an answer, if there is any."""
    found = raw(process, sent(process, method, path, headers, body))
    head, _, rest = found.partition(b"\r\n\r\n")
    what = f"{method[:20]} {path[:60]} {dict(list(headers.items())[:3])} {str(body)[:80]}: {found[:300]!r}"
    if not re.match(rb"HTTP/1.1 4\d\d ", head):
        return "" if not found and body and len(body) > guard.MOST else what  # cut off while it was still sending
    status = int(head[9:12])
    if status not in statuses and not (status == 400 and b"Invalid HTTP request" in rest):
        return f"{status}: {what}"
    if b"Invalid HTTP" in rest or method == "HEAD":
        return ""
    error = json.loads(rest)["error"]
    return "" if 10 < len(error) < 400 and error[-1] == "." and HEADERS.keys() <= set(re.findall(r"(?m)^([a-z-]+):", head.decode().lower())) else what  # fmt: skip


CUT = [
    b"", b"G", b"GET /", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: lo", b"GET /static/app.js HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /api/stack HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
    b"POST /api/stack HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /api/race HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /api/stack HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    b"POST /api/stack HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n",
]  # fmt: skip
NO_HTTP = [
    bytes(range(256)) * 4, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 200, b"GET / HTTP/1.1\r\n\r\n", b"GET /\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", b"\r\n" * 50_000, b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n",
    b"POST /api/stack HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /api/stack HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /api/stack HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9" + b"9" * 30 + b"\r\n\r\n{}",
    b"POST /api/stack HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
    b"POST /api/stack HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nZZ\r\n",
    b"POST /api/stack HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nZZ\r\n",
    b"POST /api/race HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n{}", b"GET \x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET / HTTP/1.1\nHost: localhost\nX\n\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n X: y\r\n\r\nQ\r\n\r\n",
]  # fmt: skip


def test_a_thousand_bad_requests_and_it_answers_as_before(process, threads):
    threads(1)
    asked = {"placement": "sandwich", "sublayers": 8, "seed": 5}
    assert process.ask("POST", "/api/stack", asked).json == measured(**asked)
    before = process.memory() if sys.platform == "linux" else 0
    bad = [*bad_requests()]
    with ThreadPoolExecutor(8) as pool:
        troubles = [one for one in pool.map(lambda one: judged(process, *one), bad) if one]
        assert troubles == []
        answers = [*pool.map(lambda data: raw(process, data + b"\r\n\r\n", 5), NO_HTTP * 3)]
        assert [one for one in answers if one and not re.match(rb"HTTP/1.1 (4\d\d|200) ", one)] == []

        def cut(data):
            with process.connect() as connection, suppress(ConnectionError):
                connection.sendall(data)
                if len(data) % 2:  # not closed politely, but reset
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")

        [*pool.map(cut, CUT * 15)]
    assert len(bad) + 3 * len(NO_HTTP) + 15 * len(CUT) >= 1000
    assert process.ask("GET", "/healthz").body == b"ok"
    assert process.ask("POST", "/api/stack", asked).json == measured(**asked)
    if before:
        assert process.memory() - before < 64 * 2**20
    assert process.stderr == ""
    ends = time.monotonic() + 10
    while race_refused(process):  # those that were begun and cut off make room
        assert time.monotonic() < ends
        time.sleep(0.05)


def race_refused(process):
    with process.connect() as connection:
        connection.sendall(sent(process, "POST", "/api/race", JSON | {"Addnorm-Client": "new"}, b"{}"))
        return b" 503 " in connection.recv(100)


def test_fifty_clients_at_once_are_all_answered_rightly(process, threads):
    threads(1)
    asked = [
        {"placement": place, "sublayers": 4, "d": 16, "seed": k}
        for k in range(10)
        for place in list(stack.PLACEMENTS)[:5]
    ]
    together = threading.Barrier(50)

    def ask(k):
        together.wait()
        return process.ask("POST", "/api/stack", asked[k], {"Addnorm-Client": f"page {k}"})

    with ThreadPoolExecutor(50) as pool:
        found = [*pool.map(ask, range(50))]
    assert [one.status for one in found] == [200] * 50
    assert [one.json for one in found] == [measured(**one) for one in asked]


def test_one_client_that_asks_quickly_is_answered_the_newest(process, threads):
    threads(1)
    asked = [{"sublayers": 96, "seed": k} for k in range(30)]
    connections = []
    for one in asked:
        connections.append(process.connect())
        connections[-1].sendall(
            sent(process, "POST", "/api/stack", JSON | {"Addnorm-Client": "quick"}, json.dumps(one).encode())
        )
        time.sleep(0.003)  # or they would come in another order
    found = [b"".join(iter(lambda one=one: one.recv(65536), b"")).partition(b"\r\n\r\n") for one in connections]
    for one in connections:
        one.close()
    statuses = [int(head[9:12]) for head, _, _ in found]
    assert set(statuses) == {200, 409}
    assert statuses[-1] == 200
    assert statuses.count(409) >= 20
    for status, (_, _, body), one in zip(statuses, found, asked, strict=True):
        if status == 200:
            assert json.loads(body) == measured(**one)
        else:
            assert json.loads(body) == {"error": "A newer question came before this one was computed."}


# Races, slow requests, and who is gone.


def test_a_race_is_streamed_as_it_runs_and_ends_with_its_listener(process):
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
    assert b"Two races run already: stop one, or wait until it has ended." in refused + third.recv(65536)
    first.close()
    deadline = time.monotonic() + 10
    while third and refused.startswith(b"HTTP/1.1 503 "):
        assert time.monotonic() < deadline
        third.close()
        third, refused = begun("c")
    assert process.ask("GET", "/healthz").body == b"ok"
    second.close()
    third.close()


def test_a_race_that_fails_says_so_in_its_stream(client, monkeypatch):
    def fails(asked):
        yield {"event": "start", "loss": float("nan")}
        raise ArithmeticError("so far")

    monkeypatch.setattr(server.race, "race", fails)
    lines = client.post("/api/race", json={}).text.split("\n\n")
    assert [json.loads(line.removeprefix("data: ")) for line in lines if line] == [
        {"event": "start", "loss": "NaN"},
        {"event": "failed", "error": "so far"},
    ]


def test_a_slow_request_is_told_so(client, monkeypatch):
    monkeypatch.setattr(guard, "PATIENCE", 0.05)
    received = []

    async def ask():
        async def never():
            await asyncio.sleep(60)

        async def keep(message):
            received.append(message)

        scope = {"type": "http", "method": "POST", "path": "/api/stack", "query_string": b"", "http_version": "1.1",
                 "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "client": ("127.0.0.1", 1)}  # fmt: skip
        await client.app(scope, never, keep)

    apart(ask())
    assert received[0]["status"] == 408
    assert (b"connection", b"close") in received[0]["headers"]
    assert json.loads(received[1]["body"]) == {"error": "The request did not arrive within 0.05 seconds."}


def test_what_its_asker_left_is_not_computed(monkeypatch):
    computed = []
    monkeypatch.setattr(stack, "answer", lambda asked: computed.append(asked) or {})

    async def ask(gone):
        messages = [{"type": "http.request", "body": b"{}"}]

        async def receive():
            if messages:
                return messages.pop()
            await asyncio.sleep(0 if gone else 60)
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        scope = {"type": "http", "method": "POST", "path": "/api/stack", "query_string": b"", "http_version": "1.1",
                 "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "client": ("127.0.0.1", 1)}  # fmt: skip
        await application()(scope, receive, send)

    apart(ask(gone=False))
    assert len(computed) == 1


def test_it_listens_to_this_machine_alone(process):
    if sys.platform != "linux":
        pytest.skip("/proc/net is Linux's")
    port = f"{process.port:04X}"
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        if (table := Path(f"/proc/net/{name}")).exists()
        for line in table.read_text().splitlines()[1:]
    ]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port}")]
    assert listening == [f"0100007F:{port}"]
