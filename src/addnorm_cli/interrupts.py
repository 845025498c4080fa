"""Ctrl-C and SIGTERM: an exception in a command, never in an import.

Libraries cannot be interrupted while they are imported. torch and numpy swallow the exception and stay half imported, so that a
later call fails for another reason, or C++ aborts the process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

__all__ = ["INTERRUPTED", "TERMINATED", "exit_at_signals", "raise_at_signals"]

INTERRUPTED, TERMINATED = 130, 143  # exit codes
CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
RETRY = 0.05  # seconds until a signal that came in an import is handled again
LONGEST = 10.0  # seconds for which an import is not interrupted: it may run a user's code

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def exit_at_signals() -> Iterator[None]:
    """End the process at a signal, while there is nothing to clean up."""
    with _handled(lambda number, _: _exit(number)):
        yield


@contextmanager
def raise_at_signals() -> Iterator[list[int]]:
    """Raise a KeyboardInterrupt at a signal, after imports that run. A second signal in an import ends the process.

    Yield a list that has the signals once they came.
    """
    received: list[int] = []
    deferred: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGALRM:
            if deferred:
                _exit(number)
            received.append(number)
        deferred.append(time.monotonic())
        if _is_importing(frame) and deferred[-1] - deferred[0] < LONGEST:
            signal.signal(signal.SIGALRM, handle)
            signal.setitimer(signal.ITIMER_REAL, RETRY)
            return
        deferred.clear()
        raise KeyboardInterrupt

    try:
        with _handled(handle):
            yield received
    finally:
        if deferred:  # the command ended first
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _handled(handler: Handler) -> Iterator[None]:
    """Handle the signals that are not ignored. Threads other than the main one cannot."""
    before = {}
    with suppress(ValueError):
        for number in CODES:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _exit(number: int) -> NoReturn:
    with suppress(OSError):
        os.write(2, b"Interrupted.\n")
    os._exit(CODES[signal.Signals(number)])


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is imported in this frame or below it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
