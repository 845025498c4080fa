"""The directory of a comparison: a line of JSON for each result, appended by one process; and what is still open.

    results.jsonl       a result a line
    open/KEY.pt         the last checkpoint of a run that is not finished; KEY.json where it stands
    lock                who is writing

What it guarantees: a line that is there is whole and stays; one that was torn by a crash, which is the last, is dropped when the
directory is opened again. Two processes do not write to one directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from addnorm._util.jsonio import to_jsonable
from addnorm.lab.measure import Numbers

__all__ = ["Journal", "restored", "step_of", "tell_step"]

KINDS = ("run", "init")
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Journal:
    """The results of a directory, by their keys.

    Args:
        folder: is made if it is not there.

    Raises:
        ValueError: the directory cannot be written to, or a line in it, other than the last, is no result.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file, self.open = folder, folder / "results.jsonl", folder / "open"
        try:
            self.open.mkdir(parents=True, exist_ok=True)
            for file in (self.file, folder / "lock"):
                file.open("a").close()
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            raise ValueError(
                f"out is '{folder}', which cannot be written to ({getattr(error, 'strerror', None) or error}): give another "
                "directory."
            ) from None
        self.found: dict[str, Numbers] = {}
        self.torn = False  # whether a line was dropped

    @contextmanager
    def writing(self) -> Iterator[Journal]:
        """The only writer while the block runs; what was torn is dropped first."""
        with (self.folder / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the kernel takes away with the process
            except BlockingIOError:
                raise ValueError(
                    f"out is '{self.folder}', to which another comparison is writing, expected one at a time: wait for it, or "
                    "give another directory."
                ) from None
            self._mend()
            self.read()
            yield self

    def _mend(self) -> None:
        """Cuts a torn last line off."""
        data = self.file.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self.torn = True
            with self.file.open("r+b") as file:
                file.truncate(whole)

    def read(self) -> dict[str, Numbers]:
        """The results that are there."""
        for number, line in enumerate(self.file.read_bytes().split(b"\n")[:-1], 1):
            try:
                result = restored(json.loads(line))
                if result["kind"] in KINDS:  # another version may have added others
                    self.found[result["key"]] = result
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ValueError(
                    f"out is '{self.folder}', whose {self.file.name} has in line {number} no result, expected an object with a "
                    "key and a kind: take the line out, or give another directory."
                ) from None
        return self.found

    def append(self, result: Numbers) -> None:
        """Adds a result, and waits until it is on the disk; its open files are taken away.

        Raises:
            ValueError: it cannot be written; what was written before stays.
        """
        line = json.dumps(to_jsonable(result), allow_nan=False).encode() + b"\n"
        try:
            with self.file.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ValueError(
                f"out is '{self.folder}', where no more can be written ({error.strerror or error}): the same call goes on "
                "when there is room."
            ) from None
        self.found[result["key"]] = result
        self.close(result["key"])

    def checkpoint(self, key: str) -> Path:
        """Where the state of an open run is kept."""
        return self.open / f"{key}.pt"

    def close(self, key: str) -> None:
        """Takes what a finished run left open away."""
        for path in self.open.glob(f"*{key}*"):
            with suppress(FileNotFoundError):
                path.unlink()


def restored(value: Any) -> Any:
    """What was read of JSON, with NaN and inf as numbers again."""
    if isinstance(value, dict):
        return {key: restored(one) for key, one in value.items()}
    if isinstance(value, list):
        return [restored(one) for one in value]
    return WORDS.get(value, value) if isinstance(value, str) else value


def tell_step(path: Path, step: int, loss: float) -> None:
    """Says where an open run stands, for whoever looks on."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):  # nothing hangs on it
        temporary.write_text(json.dumps([step, to_jsonable(loss)]))
        temporary.replace(path)


def step_of(path: Path) -> tuple[int, float] | None:
    """Where an open run stands: the steps that are done, and the last loss."""
    try:
        step, loss = restored(json.loads(path.read_text()))
        return int(step), float(loss)
    except (OSError, ValueError, TypeError):
        return None
