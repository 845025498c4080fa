"""Tests of the explorer's server: responses, security, failures."""

import asyncio
import json

import pytest
from starlette.testclient import TestClient

from addnorm.explorer import security, server, stack
from addnorm.explorer.server import create_app
from support.threads import run_in_thread

HEADERS = {name.lower(): value for name, value in security.HEADERS.items()}


@pytest.fixture(scope="module")
def clients():
    with TestClient(create_app(), "http://localhost:8017") as test_client:
        yield test_client


@pytest.fixture
def client(clients, one_thread):
    return clients


# Responses.


def test_responses_have_security_headers(client):
    etag = client.get("/static/app.js").headers["etag"]
    answers = [
        client.get("/"), client.get("/static/app.js"), client.get("/static/app.js", headers={"If-None-Match": etag}),
        client.get("/api/meta"), client.post("/api/stack", json={"sublayers": 2}), client.delete("/"), client.head("/"),
        client.get("/", headers={"Host": "evil.example"}), client.get("/", headers={"Range": "bytes=0-9"}),
    ]  # fmt: skip
    statuses = [response.status_code for response in answers]
    assert statuses == [200, 200, 304, 200, 200, 405, 200, 421, 206]
    for response in answers:
        assert HEADERS.items() <= dict(response.headers).items(), response.url
    assert {*answers[5].headers["allow"].split(", ")} == {"GET", "HEAD"}
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_failed_computation_is_reported(monkeypatch):
    def fails(asked):
        raise OverflowError("it was too much")

    monkeypatch.setattr(stack, "compute", fails)
    client = TestClient(create_app(), "http://localhost:8017", raise_server_exceptions=False)
    response = client.post("/api/stack", json={})
    assert response.status_code == 500
    assert response.json() == {"error": "The computation failed: OverflowError: it was too much"}
    assert HEADERS.items() <= dict(response.headers).items()


# Allowed clients.


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8017", "[::1]:8017", "[::1]"])
def test_loopback_hosts_are_allowed(client, host):
    assert client.get("/healthz", headers={"Host": host}).status_code == 200
    assert client.get("/healthz", headers={"Host": host, "Origin": f"http://{host}"}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "evil.example:8017", "", "127.0.0.2", "127.1", "2130706433", "[::2]", "[::1",
     "user@localhost", "localhost/evil.example", "localhost:8017:1", "localhost:", "local host", "evil.example#localhost",
     "evil.example\\@localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "ｌocalhost".encode().decode("latin-1")],
)  # fmt: skip
def test_other_hosts_are_rejected(client, host):
    response = client.get("/healthz", headers={"Host": host.encode("latin-1")})
    assert response.status_code == 421
    assert response.json()["error"].startswith("Host is ")


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
def test_other_origins_are_rejected(client, method, path, headers):
    response = client.request(method, path, json={}, headers=headers)
    assert response.status_code == 403
    assert response.json()["error"].endswith(".")


def test_links_from_other_sites_open_the_page(client):
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert client.get("/", headers=followed).status_code == 200
    assert client.post("/api/stack", json={}, headers=followed).status_code == 403


def test_token_is_required():
    paths = ["/", "/healthz", "/api/meta", "/static/app.js", "/nothing", "/api/nothing"]
    wrong = ["", "?token=", "?token=Secret", "?token=secret2", "?token=%F0%9F%92%A9&x=%ff", "?token&token=secre"]
    client = TestClient(create_app(hosts=None, token="secret"), "http://any.example:8017")
    for path in (f"{path}{query}" for path in paths for query in wrong):
        response = client.get(path)
        assert (response.status_code, list(response.cookies)) == (401, [])
        assert "The token is missing" in response.json()["error"]
    assert client.post("/api/stack", json={}).status_code == 401
    assert client.get("/", headers={"Cookie": f"{security.COOKIE}=wrong"}).status_code == 401
    first = client.get("/?token=secret")
    assert first.status_code == 200
    assert first.headers["set-cookie"] == f"{security.COOKIE}=secret; HttpOnly; SameSite=Strict; Path=/"
    assert "set-cookie" not in client.get("/").headers
    assert [client.get(path).status_code for path in paths] == [200, 200, 200, 200, 404, 404]
    client.cookies.clear()
    others = f'theme={{"a":1}}; broken; =; {security.COOKIE}=secret; x="y'  # other servers on this host name may set any cookies
    assert client.get("/healthz", headers={"Cookie": others}).status_code == 200
    assert client.get("/?token=secret", headers={"Origin": "http://evil.example"}).status_code == 403


# Failing races, slow requests, and disconnected clients.


def test_failed_race_sends_event(client, monkeypatch):
    def fails(asked):
        yield {"event": "start", "loss": float("nan")}
        raise ArithmeticError("so far")

    monkeypatch.setattr(server.race, "run_race", fails)
    lines = client.post("/api/race", json={}).text.split("\n\n")
    assert [json.loads(line.removeprefix("data: ")) for line in lines if line] == [
        {"event": "start", "loss": "NaN"},
        {"event": "failed", "error": "so far"},
    ]


def post(app, *, body=None, is_disconnected=False):
    """Send a request to the stack view without a client in between, and return the messages of the response.

    Without a body the request never ends.
    """
    requests, received = [] if body is None else [{"type": "http.request", "body": body}], []
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/api/stack", "query_string": b"", "http_version": "1.1",
             "headers": headers, "client": ("127.0.0.1", 1)}  # fmt: skip

    async def receive():
        if requests:
            return requests.pop()
        if not is_disconnected:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message):
        received.append(message)

    run_in_thread(app(scope, receive, send))
    return received


def test_slow_request_times_out(client, monkeypatch):
    monkeypatch.setattr(security, "TIMEOUT", 0.05)
    head, body = post(client.app)
    assert head["status"] == 408
    assert (b"connection", b"close") in head["headers"]
    assert json.loads(body["body"]) == {"error": "The request did not arrive within 0.05 seconds."}


def test_abandoned_requests_are_not_computed(monkeypatch):
    computed = []
    monkeypatch.setattr(stack, "compute", lambda asked: computed.append(asked) or {})
    for count, is_disconnected in enumerate((True, False)):
        post(create_app(), body=b"{}", is_disconnected=is_disconnected)
        assert len(computed) == count
