"""`addnorm explore`: the explorer's server, from the terminal."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import webbrowser
from functools import partial
from pathlib import Path

import click

__all__ = ["explore"]

PORT = 8017  # by default; another where it is taken
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # all addresses of this machine, and how it calls itself


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
    from addnorm._util.optional import require

    try:
        for package in ("starlette", "uvicorn"):
            require(package, "explore")
    except ImportError as error:
        raise Refused(f"{error}.") from None
    import torch

    from addnorm.explorer.scheduler import Desk
    from addnorm.explorer.security import LOOPBACK
    from addnorm.explorer.server import application
    from addnorm.explorer.serving import serve

    token = None if host in LOOPBACK else secrets.token_urlsafe(16)
    desk = Desk()
    with _bound(host, port) as listening:
        try:
            page = application(recordings, hosts=LOOPBACK if token is None else None, token=token, desk=desk)
        except (ValueError, ImportError, OSError) as error:
            raise Refused(f"--recording: {str(error).rstrip('.')}.") from None
        torch.set_num_threads(1)  # small matrices gain nothing by more, and two clients are computed at once
        serve(page, desk, listening, partial(_ready, host, listening.getsockname()[1], token, opened))
    click.echo("Ended.", err=True)
    if desk.busy:
        os._exit(0)  # Python would wait for what is computed, and nobody else does


def _bound(host: str, port: int | None) -> socket.socket:
    """A socket that listens; where nobody asked for a port and the usual one is taken, at another."""
    tries = (PORT, 0) if port is None else (port,)
    for attempt in tries:
        try:
            return _listening(host, attempt)
        except (OSError, UnicodeError, TypeError) as error:  # the last two: a name that cannot be one
            taken = getattr(error, "errno", None) == errno.EADDRINUSE
            if taken and attempt != tries[-1]:
                continue
            if taken:
                raise Refused(
                    f"--port is {attempt}, which is in use: give another, or 0 for any that is free."
                ) from None
            refused, given = ("--port", attempt) if isinstance(error, PermissionError) else ("--host", host)
            why = getattr(error, "strerror", None) or error
            raise Refused(f"{refused} is {given}, which cannot be listened at ({why}).") from None
    raise AssertionError("unreachable")  # the last attempt returns or raises


def _listening(host: str, port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(128)
    except BaseException:
        found.close()
        raise
    return found


def _ready(host: str, port: int, token: str | None, opened: bool) -> None:
    """Says where it is, once it answers."""
    here = ANY.get(host, host)
    name = f"[{here}]" if ":" in here else here
    address = f"http://{name}:{port}/" + ("" if token is None else f"?token={token}")
    click.echo(f"The explorer is at {address}")
    if host in ANY:
        click.echo(f"From other machines: the same with this machine's name for {name}.")
    click.echo("Ctrl-C ends it.")
    if opened:
        threading.Thread(
            target=webbrowser.open, args=(address,), daemon=True
        ).start()  # one in the terminal stays in it
