"""`addnorm explore`: the explorer's server, from the terminal."""

from __future__ import annotations

import errno
import secrets
import socket
import webbrowser
from pathlib import Path
from typing import Any

import click

__all__ = ["explore"]

PORT = 8017  # by default; another where it is taken
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Refused(click.ClickException):
    """The arguments were wrong, and the sentence says how."""

    exit_code = 2


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), metavar="N", help=f"0 is any that is free (default {PORT}).")
@click.option(
    "--host", default="127.0.0.1", metavar="NAME", help="For other machines to reach it; they need the token."
)
@click.option(
    "--recording", "recordings", type=click.Path(path_type=Path), multiple=True, metavar="FILE",
    help="What `addnorm record --out FILE` wrote (repeatable).",
)  # fmt: skip
@click.option("--open", "opened", is_flag=True, help="Also open it in the browser.")
def explore(port: int | None, host: str, recordings: tuple[Path, ...], opened: bool) -> None:
    r"""Open the explorer: a local page to flip the LayerNorm and watch the stream and the gradients.

    It is served to this machine alone, and asks nobody else for anything. Ctrl-C ends it.

    \b
      addnorm explore
      addnorm record minilm --out minilm.json --memory-map
      addnorm explore --recording minilm.json
    """
    from addnorm.stream.record.extras import need

    try:
        for package in ("starlette", "uvicorn"):
            need(package, "explore")
    except ImportError as error:
        raise Refused(f"{error}.") from None
    import torch

    from addnorm.explorer.server import application

    token = None if host in LOOPBACK else secrets.token_urlsafe(16)
    with _bound(host, port) as listening:
        try:
            page = application(recordings, hosts=frozenset(LOOPBACK) if token is None else None, token=token)
        except (ValueError, ImportError, OSError) as error:
            raise Refused(f"--recording: {str(error).rstrip('.')}.") from None
        torch.set_num_threads(1)  # small matrices gain nothing by more, and two clients are computed at once
        address = _address(host, listening, token)
        click.echo(f"The explorer is at {address}\nCtrl-C ends it.")
        if opened:
            webbrowser.open(address)
        _serve(page, listening)
    click.echo("Ended.", err=True)


def _bound(host: str, port: int | None) -> socket.socket:
    """A socket that listens; where nobody asked for a port and the usual one is taken, at another."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for attempt in (PORT, 0) if port is None else (port,):
        try:
            listening.bind((host, attempt))
            listening.listen(128)
            return listening
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port is None and attempt:
                continue
            listening.close()
            if error.errno == errno.EADDRINUSE:
                raise Refused(f"--port is {port}, which is in use: give another, or 0 for any that is free.") from None
            name = "--host" if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL else "--port"
            given = host if name == "--host" else port
            raise Refused(f"{name} is {given}, which cannot be listened at ({error.strerror or error}).") from None
    raise AssertionError("unreachable")  # the last attempt returns or raises


def _address(host: str, listening: socket.socket, token: str | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}/" + ("" if token is None else f"?token={token}")


def _serve(page: Any, listening: socket.socket) -> None:
    """Until Ctrl-C."""
    import uvicorn

    config = uvicorn.Config(
        page, log_level="warning", access_log=False, server_header=False, date_header=False, lifespan="on",
        timeout_graceful_shutdown=1, timeout_keep_alive=30, limit_concurrency=256, ws="none",
    )  # fmt: skip
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:  # uvicorn has ended, and raises the signal again
        pass
