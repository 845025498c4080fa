"""`addnorm explore`: the explorer's server, from the terminal."""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import threading
import webbrowser
from functools import partial
from pathlib import Path

import click
import torch

from addnorm._util.optional import require
from addnorm.cli._output import ArgumentError

__all__ = ["run"]

REMEDY = "write it again with `addnorm record MODEL --out FILE`"  # of a recording that cannot be read
SUFFIXES = (".json", ".parquet")
PORT = 8017  # by default; another one where it is in use
ANY_ADDRESS = {
    "0.0.0.0": "127.0.0.1",
    "::": "::1",
}  # hosts that listen at all addresses, and this machine


def run(port: int | None, host: str, recordings: tuple[Path, ...], opens_browser: bool) -> None:
    """Serve the explorer until Ctrl-C."""
    try:
        for package in ("starlette", "uvicorn"):
            require(package, "explore")
    except ImportError as error:
        raise ArgumentError(error) from None
    from addnorm.explorer.scheduler import Scheduler
    from addnorm.explorer.security import LOOPBACK
    from addnorm.explorer.server import create_app, serve

    if not host.strip():
        raise ArgumentError(f"--host is {host!r}, expected a name or an address: 0.0.0.0 listens at all addresses")
    for path in recordings:
        if path.suffix not in SUFFIXES:
            raise ArgumentError(f"--recording is '{path}', expected a file that ends in {' or '.join(SUFFIXES)}")
        if path.exists() and not path.is_file():
            raise ArgumentError(f"--recording is '{path}', which is no file, expected one of `addnorm record --out`")
    token = None if host in LOOPBACK else secrets.token_urlsafe(16)
    scheduler = Scheduler()
    with _bind(host, port) as listener:
        try:
            hosts = LOOPBACK if token is None else None
            app = create_app(recordings, hosts=hosts, token=token, scheduler=scheduler)
        except (ValueError, ImportError, OSError) as error:
            sentence = re.sub("save the recording again with Recording.save", REMEDY, str(error))
            raise ArgumentError(f"--recording: {sentence}") from None
        torch.set_num_threads(1)  # small matrices gain nothing by more threads, and two clients are served at once
        serve(app, scheduler, listener, partial(_announce, host, listener.getsockname()[1], token, opens_browser))
    click.echo("Interrupted.", err=True)
    if scheduler.is_busy:
        os._exit(0)  # Python would wait for running computations, whose results have no reader


def _bind(host: str, port: int | None) -> socket.socket:
    """Return a listening socket. Without a port it is the usual one, or any other if that is in use."""
    ports = (PORT, 0) if port is None else (port,)
    for attempt in ports:
        try:
            return _listen(host, attempt)
        except (OSError, UnicodeError, TypeError) as error:  # the last two: a name that no host can have
            in_use = getattr(error, "errno", None) == errno.EADDRINUSE
            if in_use and attempt != ports[-1]:
                continue
            if in_use:
                raise ArgumentError(
                    f"--port is {attempt}, which is in use: choose another, or 0 for any free one"
                ) from None
            option, value = ("--port", f"{attempt}") if isinstance(error, PermissionError) else ("--host", f"{host!r}")
            reason = getattr(error, "strerror", None) or error
            raise ArgumentError(f"{option} is {value}, where this machine cannot listen ({reason})") from None
    raise AssertionError("unreachable")  # the last attempt returns or raises


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def _announce(host: str, port: int, token: str | None, opens_browser: bool) -> None:
    """Print the address, once the server answers."""
    name = ANY_ADDRESS.get(host, host)
    name = f"[{name}]" if ":" in name else name
    address = f"http://{name}:{port}/" + ("" if token is None else f"?token={token}")
    click.echo(f"The explorer is at {address}")
    if host in ANY_ADDRESS:
        click.echo(f"From other machines: replace {name} by the name of this machine.")
    click.echo("Press Ctrl-C to end it.")
    if opens_browser:  # in a thread, since a browser in the terminal returns when it is closed
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
