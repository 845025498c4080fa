"""Tests of `addnorm explore`: its address, its token, and its end without a traceback."""

import json
import signal
import socket
import sys
import threading
import time

import pytest
import torch

import addnorm
from addnorm.cli import explore
from addnorm.explorer import export, stack
from support.commands import assert_one_sentence
from support.commands import run as run_command
from support.explorer_process import RACING, Explorer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_server(monkeypatch):
    """Fail the test if the server starts."""
    monkeypatch.setattr("addnorm.explorer.server.serve", lambda *_: pytest.fail("it served"))


def run(*arguments):
    return run_command("explore", *arguments)


@pytest.fixture
def used_port():
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_explore_reports_used_port(used_port, no_server):
    sentence = f"Error: --port is {used_port}, which is in use: choose another, or 0 for any free one.\n"
    assert_one_sentence(run("--port", used_port), 2, sentence)


@pytest.fixture
def served(monkeypatch):
    """Return what the command would serve, and its address."""
    arguments = {}

    def serve(app, scheduler, listener, on_ready):
        arguments.update(page=app, scheduler=scheduler, at=listener.getsockname()[:2])
        on_ready()

    monkeypatch.setattr("addnorm.explorer.server.serve", serve)
    return arguments


def test_explore_falls_back_to_free_port(used_port, served, monkeypatch):
    monkeypatch.setattr(explore, "PORT", used_port)
    result = run()
    host, port = served["at"]
    assert host == "127.0.0.1"
    assert port not in (0, used_port)
    assert result.stdout == f"The explorer is at http://127.0.0.1:{port}/\nPress Ctrl-C to end it.\n"
    assert (result.exit_code, result.stderr) == (0, "Interrupted.\n")


def test_explore_uses_default_port(used_port, served, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    monkeypatch.setattr(explore, "PORT", free)
    run()
    assert served["at"] == ("127.0.0.1", free)


@pytest.mark.parametrize(
    ("host", "here"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")],
)
def test_explore_other_hosts_need_a_token(host, here, served):
    tokens = set()
    for _ in range(2):
        lines = run("--port", 0, "--host", host).stdout.splitlines()
        page, address = served["page"], f"The explorer is at http://{here}:{served['at'][1]}/"
        assert lines[0] == address + ("" if page.token is None else f"?token={page.token}")
        assert page.hosts == ({"localhost", "127.0.0.1", "::1"} if page.token is None else None)
        assert any(line.startswith("From other machines") for line in lines) == (host == "0.0.0.0")
        tokens.add(page.token)
    if host in ("127.0.0.1", "localhost"):
        assert tokens == {None}
    else:
        assert len(tokens) == 2
        assert min(map(len, tokens)) >= 20


def ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not ipv6(), reason="this machine has no IPv6")
def test_explore_listens_on_ipv6(served):
    message = run("--port", 0, "--host", "::1").stdout
    assert (served["at"][0], served["page"].token) == ("::1", None)
    assert message.startswith(f"The explorer is at http://[::1]:{served['at'][1]}/\n")


def test_explore_opens_on_the_recording(served, tmp_path):
    path = tmp_path / "run.json"
    model = addnorm.nn.Encoder(2, 8, nhead=2).eval()
    with addnorm.record(model) as rec:
        model(torch.randn(2, 3, 8)).square().mean().backward()
    rec.save(path)
    first = run("--port", 0, path).stdout.splitlines()[0]
    assert first == f"The explorer is at http://127.0.0.1:{served['at'][1]}/#v=1&view=recording"


def test_explore_reports_forbidden_port(monkeypatch, no_server):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", denied)
    sentence = "--port is 80, where this machine cannot listen (Permission denied)."
    assert_one_sentence(run("--port", 80), 2, sentence)


def test_explore_opens_browser(served, monkeypatch):
    opened, go = [], threading.Event()

    def browse(address):
        go.wait(10)  # like a process in a terminal
        opened.append(address)

    monkeypatch.setattr("webbrowser.open", browse)
    run("--port", 0)
    assert run("--port", 0, "--open").exit_code == 0
    assert opened == []
    go.set()
    deadline = time.monotonic() + 10
    while not opened:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert opened == [f"http://127.0.0.1:{served['at'][1]}/"]


# The export.


def test_explore_exports_page(no_server, tmp_path, monkeypatch):
    grid = export.Grid(stack, {"sublayers": (2,), "seed": (0, 1)}, ("seed",))
    monkeypatch.setattr(export, "GRIDS", {"stack": grid})
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setitem(sys.modules, "starlette", None)  # the export needs no server
    result = run("--export", tmp_path / "page", "--open")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"The page is in {tmp_path}/page/index.html (")
    assert opened == [(tmp_path / "page" / "index.html").as_uri()]
    assert (tmp_path / "page" / "data" / "stack-1.js").is_file()


# How it ends.

BUSY = """
import time
from addnorm.explorer import stack
compute = stack.compute

def slow(flip):
    time.sleep(30 if flip.seed == 9999 else 0)
    return compute(flip)

stack.compute = slow
"""
"""Seed 9999 takes half a minute."""


def send_request(explorer, path, body, length=None):
    """Return a connection on which the request was sent."""
    text = json.dumps(body)
    connection = explorer.connect()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAddnorm-Client: {id(connection)}\r\n"
    connection.sendall(f"{head}Content-Length: {length or len(text)}\r\n\r\n{text}".encode())
    return connection


@pytest.mark.parametrize(
    "signals", [pytest.param([signal.SIGINT], marks=pytest.mark.slow), [signal.SIGTERM, signal.SIGINT]], ids=len
)
def test_explore_ends_at_once(signals):
    with Explorer(before=RACING + BUSY) as explorer:
        assert explorer.ask("POST", "/api/stack", {"sublayers": 2}).status_code == 200
        race = send_request(explorer, "/api/race", {})
        assert b"text/event-stream" in race.recv(1000)
        connections = [race]
        connections += [
            send_request(explorer, "/api/stack", {"seed": 9999}) for _ in range(4)
        ]  # two are computed, two wait
        connections += [send_request(explorer, "/api/stack", {}, length=100), explorer.connect()]
        explorer.connect().close()
        time.sleep(0.3)
        assert explorer.process.poll() is None
        for signal_number in signals[:-1]:
            explorer.process.send_signal(signal_number)
        assert explorer.end(signals[-1]) == 0
        assert explorer.stderr == "Interrupted.\n"
        waited = [connection.recv(65536) for connection in connections[3:5]]
        assert all(message.startswith(b"HTTP/1.1 503 ") for message in waited)
        for connection in connections:
            connection.close()


def test_explore_closes_idle_connections():
    with Explorer("--host", "0.0.0.0", before="from addnorm.explorer import server; server.IDLE = 1") as explorer:
        idle = [explorer.connect(10) for _ in range(3)]
        idle[1].sendall(b"GET / HTTP/1.1\r\nHost: loc")
        assert explorer.ask("POST", "/api/stack", {}).status_code == 401
        assert explorer.ask("POST", f"/api/stack?token={explorer.token}", {}).status_code == 200
        for connection in idle:
            assert connection.recv(1) == b""  # closed by the server
            connection.close()
    assert explorer.stderr == "Interrupted.\n"
