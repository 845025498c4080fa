"""`addnorm explore`: the explorer's server, or its page as a folder, from the terminal."""

import errno
import os
import secrets
import socket
import threading
import webbrowser
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
import torch
from click.core import ParameterSource

from addnorm._util.numbers import format_bytes
from addnorm._util.optional import require
from addnorm.cli._output import ArgumentError, argument_errors, working

RECORDING_VIEW = "#v=1&view=recording"  # of the page's address
REMEDY = "write it again with `addnorm record MODEL --out FILE`"  # of a recording that cannot be read
SUFFIXES = (".json", ".parquet")
PORT = 8017  # by default; another one where it is in use
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # hosts that listen at all addresses, and this machine


def run(
    port: int | None, host: str, recordings: tuple[Path, ...], opens_browser: bool, folder: Path | None
) -> None:  # fmt: skip
    """Serve the explorer until Ctrl-C, or write its page to a folder."""
    if folder is not None:
        _export(folder, recordings, opens_browser)
        return
    with argument_errors():
        for package in ("starlette", "uvicorn"):
            require(package, "explore")
    from addnorm.explorer.scheduler import Scheduler
    from addnorm.explorer.security import LOOPBACK
    from addnorm.explorer.server import create_app, serve

    if not host.strip():
        raise ArgumentError(f"--host is {host!r}, expected a name or an address: 0.0.0.0 listens at all addresses")
    _check_recordings(recordings)
    token = None if host in LOOPBACK else secrets.token_urlsafe(16)
    scheduler = Scheduler()
    with _listen(host, port) as listener:
        with _recording_errors():
            hosts = LOOPBACK if token is None else None
            app = create_app(recordings, hosts=hosts, token=token, scheduler=scheduler)
        torch.set_num_threads(1)  # small matrices gain nothing by more threads, and two clients are served at once
        view = RECORDING_VIEW if recordings else ""
        serve(app, scheduler, listener, partial(_announce, host, listener.getsockname()[1], token, view, opens_browser))
    click.echo("Interrupted.", err=True)
    if scheduler.is_busy:
        os._exit(0)  # Python would wait for running computations, whose results have no reader


def _check_recordings(recordings: Iterable[Path]) -> None:
    for path in recordings:
        if path.suffix not in SUFFIXES:
            raise ArgumentError(
                f"RECORDING is '{path}', expected a file that ends in {' or '.join(SUFFIXES)}: for a model, "
                "`addnorm record MODEL --out FILE` writes it"
            )
        if path.exists() and not path.is_file():
            raise ArgumentError(f"RECORDING is '{path}', which is no file, expected one of `addnorm record --out`")


@contextmanager
def _recording_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        sentence = str(error).replace("save the recording again with Recording.save", REMEDY)
        raise ArgumentError(f"RECORDING: {sentence}") from None


def _export(folder: Path, recordings: tuple[Path, ...], opens_browser: bool) -> None:
    """Write the page to a folder."""
    context = click.get_current_context()
    for option in ("port", "host"):
        if context.get_parameter_source(option) is ParameterSource.COMMANDLINE:
            raise ArgumentError(f"--export starts no server, so leave out --{option}")
    from addnorm.explorer.export import check_target, count_files, export
    from addnorm.explorer.recording import Recordings

    _check_recordings(recordings)
    with argument_errors({"folder": "--export"}):
        check_target(folder)
        with _recording_errors():
            loaded = Recordings(recordings) if recordings else None
        with working("measuring the settings of the page", count_files()) as advance:
            size = export(folder, loaded, on_file=advance)
    click.echo(
        f"The page is in {folder / 'index.html'} ({format_bytes(size)}): open it in a browser, or put the folder on a web host."
    )
    if opens_browser:
        webbrowser.open((folder / "index.html").resolve().as_uri() + RECORDING_VIEW * bool(recordings))


def _listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket. If `port` is None, it has the default port, or any free one if that is in use."""
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    attempt = PORT if port is None else port
    try:
        host.encode("idna")  # raises for names that no host can have, for which create_server leaves its socket open
        return socket.create_server((host, attempt), family=family, backlog=128, dualstack_ipv6=is_ipv6)
    except (OSError, ValueError) as error:  # ValueError: a wrong name, or no IPv6
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            if port is None:
                return _listen(host, 0)
            raise ArgumentError(f"--port is {port}, which is in use: choose another, or 0 for any free one") from None
        option, value = ("--port", f"{attempt}") if isinstance(error, PermissionError) else ("--host", f"{host!r}")
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise ArgumentError(f"{option} is {value}, where this machine cannot listen ({reason})") from None


def _announce(host: str, port: int, token: str | None, view: str, opens_browser: bool) -> None:
    """Print the address, once the server answers."""
    name = ANY_ADDRESS.get(host, host)
    name = f"[{name}]" if ":" in name else name
    address = f"http://{name}:{port}/" + ("" if token is None else f"?token={token}") + view
    click.echo(f"The explorer is at {address}")
    if host in ANY_ADDRESS:
        click.echo(f"From other machines: replace {name} by the name of this machine.")
    click.echo("Press Ctrl-C to end it.")
    if opens_browser:  # in a thread, since a browser in the terminal returns when it is closed
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
