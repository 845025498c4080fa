"""Standard streams that fail: stdout closed, on a full disk, or a pipe that nobody reads any more.

`guard_streams` replaces `sys.stdout`. If a write fails, the output is remembered. `finish_output` then raises an error; if
`keep_output` was called, it saves the output in a file and names the file.
"""

import io
import os
import sys
import tempfile
from contextlib import suppress

PIPE_CLOSED = 141  # exit code, that of a program that SIGPIPE ended


class OutputError(Exception):
    """Error for standard output that cannot be written. The message is one sentence."""


class _GuardedOutput(io.FileIO):
    """Raw stdout. Once a write fails, all output, also what was written before, is only remembered."""

    def __init__(self) -> None:
        super().__init__(1, "wb", closefd=False)
        self.error: OSError | None = None
        self.keep = False  # whether the output is the result of work that would have to be repeated
        self._written = bytearray()

    def write(self, data: bytes, /) -> int:  # type: ignore[override]  # bytes is what BufferedWriter passes
        count = len(data)
        if self.error is None:
            try:
                count = os.write(1, data)
            except OSError as error:
                if isinstance(error, BrokenPipeError) and not self.keep:
                    raise
                self.error = error  # the command goes on: it may still have files to write
        self._written += bytes(data[:count])
        return count

    def save(self) -> str:
        """Write all output to a new file and return its path."""
        with tempfile.NamedTemporaryFile(prefix="addnorm-", suffix=".txt", delete=False) as file:
            file.write(self._written)
        return file.name


def guard_streams() -> None:
    """Replace stdout by one that keeps all output once a write fails; open a closed stdin or stderr as `os.devnull`.

    Exit with code 1 if stdout itself is closed.
    """
    for descriptor in (0, 2):
        _open_if_closed(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123  # it stays open until the end
    if _open_if_closed(1) or sys.stdout is None:
        sys.stderr.write("Error: stdout is closed, expected a terminal, a file or a pipe: redirect it with > FILE.\n")
        raise SystemExit(1)
    old = sys.stdout
    if isinstance(old, io.TextIOWrapper):
        raw = io.BufferedWriter(_GuardedOutput())  # type: ignore[type-var]  # its write takes bytes only
        sys.stdout = io.TextIOWrapper(
            raw, old.encoding, old.errors, line_buffering=old.line_buffering, write_through=old.write_through
        )


def keep_output() -> None:
    """Have `finish_output` save the output in a file if stdout cannot be written: computing the output took work."""
    guarded = _guarded()
    if guarded is not None:
        guarded.keep = True


def finish_output() -> None:
    """Flush stdout.

    Raises:
        OutputError: stdout cannot be written. The sentence names the file that has the output, if it was kept.
        BrokenPipeError: stdout is a pipe that is no longer read.
    """
    sys.stdout.flush()
    guarded = _guarded()
    if guarded is None or guarded.error is None:
        return
    if isinstance(guarded.error, BrokenPipeError):
        raise guarded.error
    reason = guarded.error.strerror or str(guarded.error)
    with suppress(OSError):
        if guarded.keep:
            raise OutputError(f"stdout cannot be written ({reason}): the output is in {guarded.save()}.")
    raise OutputError(f"stdout cannot be written ({reason}): choose another file or device.")


def drop_output() -> None:
    """Discard what is left in the buffers of stdout, so that the end of the program does not write it again."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


def _guarded() -> _GuardedOutput | None:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw if isinstance(raw, _GuardedOutput) else None


def _open_if_closed(descriptor: int) -> bool:
    """Open the null device at a descriptor that is closed, so that no other file gets its number."""
    try:
        os.fstat(descriptor)
        return False
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
        return True
