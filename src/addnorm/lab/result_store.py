"""Directory of a comparison: finished results, one JSON line each, and the state of open runs.

    results.jsonl       finished results, appended by one process
    open/KEY.pt         last checkpoint of an open run; open/KEY.json has its step and loss
    lock                lock of the writing process

Written lines are not changed. A crash can tear only the last line, which is dropped when the directory is opened again. A
`results.jsonl` with lines that are no results is refused and not changed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from addnorm._util import jsonio
from addnorm._util.files import UnwritableError, write_text
from addnorm.lab.streams import Numbers

RESULT_KINDS = ("run", "untrained")
# The fields of a result that a comparison needs, with their types.
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "run": {"settings": dict, "losses": list, "sites": list, "recorded": dict, "diverged": bool}
    | dict.fromkeys(("validation", "test", "seconds"), (int, float)),
    "untrained": {"stacks": list},
}
START = b'{"kind":"'  # the beginning of each line


class ResultStore:
    """Results of a directory by their keys.

    Args:
        folder: the directory; it is created if it does not exist.

    Raises:
        ValueError: the directory cannot be written, or a line of it, other than a torn last one, is not a result.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file, self.open = folder, folder / "results.jsonl", folder / "open"
        try:
            self.open.mkdir(parents=True, exist_ok=True)
            for file in (self.file, folder / "lock"):
                file.open("a").close()
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            raise ValueError(
                f"out is '{folder}', which cannot be written ({getattr(error, 'strerror', None) or error}): choose another "
                "directory."
            ) from None
        self.results: dict[str, Numbers] = {}

    @contextmanager
    def writing(self) -> Iterator[ResultStore]:
        """Lock the directory for this process, load the results and drop a torn last line."""
        with (self.folder / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it when the process ends
            except BlockingIOError:
                raise ValueError(
                    f"out is '{self.folder}', which another comparison is writing, expected one at a time: wait for it, or "
                    "choose another directory."
                ) from None
            self.load()
            self._drop_torn_line()
            yield self

    def _drop_torn_line(self) -> None:
        """Remove a last line without a line break. Raise a ValueError if that line is not the beginning of a result."""
        data = self.file.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            start = data[whole : whole + len(START)]
            if not START.startswith(start):  # a file of somebody else
                raise self._refusal(data.count(b"\n") + 1)
            with self.file.open("r+b") as file:
                file.truncate(whole)

    def _refusal(self, number: int) -> ValueError:
        return ValueError(
            f"out is '{self.folder}', whose {self.file.name} has no result in line {number}, expected an object with "
            "key and kind: remove the line, or choose another directory."
        )

    def load(self) -> dict[str, Numbers]:
        """Read the finished results, and return them by key."""
        for number, line in enumerate(self.file.read_bytes().split(b"\n")[:-1], 1):
            try:
                result = jsonio.loads(line)
                if result["kind"] in RESULT_KINDS:  # other versions may have other kinds
                    self.results[result["key"]] = result
            except (ValueError, TypeError, KeyError, RecursionError):
                raise self._refusal(number) from None
        return self.results

    def check(self, key: str) -> None:
        """Raise a ValueError if there is a finished result with `key` that lacks a field or has a field of a wrong type."""
        result = self.results.get(key, {})
        for name, types in FIELDS[result["kind"]].items() if result else ():
            if not isinstance(result.get(name), types):
                raise ValueError(
                    f"out is '{self.folder}', whose {self.file.name} has a damaged result with key {key}, without its {name}: "
                    "remove the line, or choose another directory."
                )

    def append(self, result: Numbers) -> None:
        """Append a result, wait until it is on the disk, and delete the files of its open run.

        Raises:
            UnwritableError: the result cannot be written; earlier results stay.
        """
        line = jsonio.dumps_line(result).encode() + b"\n"
        try:
            with self.file.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UnwritableError(
                f"out is '{self.folder}', which cannot be written any more ({error.strerror or error}): free some space and "
                "repeat the call, which continues here."
            ) from None
        self.results[result["key"]] = result
        for path in self.open.glob(f"*{result['key']}*"):
            with suppress(FileNotFoundError):
                path.unlink()


def write_progress(path: Path, step: int, loss: float) -> None:
    """Write the step and loss of an open run for the progress display. Errors are ignored."""
    with suppress(OSError):
        write_text(path, jsonio.dumps_line([step, loss]), parents=False)


def read_progress(path: Path) -> tuple[int, float] | None:
    """Return the number of finished steps and the last loss of an open run, or None."""
    try:
        step, loss = jsonio.loads(path.read_bytes())
        return int(step), float(loss)
    except (OSError, ValueError, TypeError):
        return None
