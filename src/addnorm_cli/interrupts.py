"""Ctrl-C and SIGTERM: an exception in a command, never in an import.

Libraries cannot be interrupted while they are imported. torch and numpy swallow the exception and stay half imported, so that a
later call fails for another reason, or C++ aborts the process.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

INTERRUPTED, TERMINATED = 130, 143  # exit codes
CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
RETRY = 0.05  # seconds until a signal that came in an import is handled again
LONGEST = 10.0  # seconds for which an import defers a signal at most: it may run a user's code

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def exit_at_signals() -> Iterator[None]:
    """End the process at a signal, while there is nothing to clean up."""
    with _handled(lambda number, _: _exit(number)):
        yield


@contextmanager
def raise_at_signals() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at SIGINT or SIGTERM; during an import, defer it until the import has ended.

    An import defers it for at most `LONGEST` seconds. A second signal meanwhile ends the process. Yield the list to which each
    received signal's number is appended.
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
            retry()
            return
        deferred.clear()
        raise KeyboardInterrupt

    def retry() -> None:
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, RETRY)

    def report(lost: sys.UnraisableHookArgs) -> None:
        """Raise an interrupt again that came in code whose exceptions Python drops, such as `__del__`."""
        if lost.exc_type is not KeyboardInterrupt:
            previous(lost)
        elif not deferred:
            deferred.append(time.monotonic())
            retry()

    previous, sys.unraisablehook = sys.unraisablehook, report
    try:
        with _handled(handle):
            yield received
    finally:
        sys.unraisablehook = previous
        if deferred:  # the command ended first
            signal.setitimer(signal.ITIMER_REAL, 0)


def end_at_signals(code: int) -> None:
    """Make signals exit at once with `code`, that of the command that has ended: Python takes a while to end."""
    numbers = [number for number in CODES if signal.getsignal(number) is not signal.SIG_IGN]
    for number in numbers:
        signal.signal(number, lambda *_: os._exit(code))
        atexit.register(signal.signal, number, signal.SIG_IGN)  # Python would end by the signal from here on


@contextmanager
def _handled(handler: Handler) -> Iterator[None]:
    """Call `handler` at the signals that are not ignored. Outside the main thread this has no effect."""
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
    """Return whether this frame or one of its callers imports a module."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
