"""Atomic writing: a file is replaced as a whole or stays as it was, also after an error or Ctrl-C.

The new content goes into a temporary file in the same folder, which then replaces the old one. Symbolic links are followed:
the file they lead to is replaced. Directories, devices, pipes and sockets are refused.
"""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILE_KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip
REMEDY = "choose another path"
LONGEST = 200  # bytes of a temporary file's name that come from the file's name; file systems allow 255 in total


class UnwritableError(OSError):
    """Error for a path that cannot be written. The message is one sentence that begins with the argument's name."""


def check_writable(path: str | Path, *, name: str = "path") -> None:
    """Check that a file can be written at the path, and make its folder. Call it before work that takes long.

    Args:
        path: the file to write.
        name: name of the argument, for errors.

    Raises:
        UnwritableError: the path cannot be written.
    """
    with unwritable_errors(path, name):
        target = _target(path, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            target.stat()  # fails for a name that is too long
        with tempfile.TemporaryFile(dir=target.parent):
            pass


@contextmanager
def atomic_path(path: str | Path, *, parents: bool = True) -> Iterator[Path]:
    """Yield a temporary path. Its file replaces `path` when the block ends, and is removed if the block fails.

    An existing file keeps its permissions. A new file gets the default permissions.

    Args:
        path: the file to write.
        parents: make the folder of the file if it does not exist.

    Raises:
        UnwritableError: the path cannot be written, or the block raised an `OSError` of the system, such as a full disk.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from addnorm._util.files import atomic_path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "weights.pt"
        ...     with atomic_path(path) as temporary:
        ...         torch.save(torch.ones(2), temporary)
        ...     torch.load(path)
        tensor([1., 1.])
    """
    with unwritable_errors(path):
        target = _target(path)
        if parents:
            target.parent.mkdir(parents=True, exist_ok=True)
        start = os.fsdecode(os.fsencode(target.name)[:LONGEST])
        temporary = target.with_name(f".{start}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if mode is None else 0o600))
            yield temporary
            if mode is not None:
                temporary.chmod(mode)
            temporary.replace(target)
        finally:
            with suppress(OSError):
                temporary.unlink()


def write_text(path: str | Path, text: str, *, parents: bool = True) -> Path:
    """Write text as UTF-8 to a file atomically and return its path. Arguments and errors as in `atomic_path`."""
    with atomic_path(path, parents=parents) as temporary:
        temporary.write_bytes(text.encode())
    return Path(path)


def read_text(path: str | Path, name: str = "path") -> str:
    """Return the text of a UTF-8 file, with or without a byte order mark.

    Args:
        path: the file.
        name: name of the argument, for errors.

    Raises:
        ValueError: the file cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is '{path}', expected UTF-8, byte {error.start} is not: iconv -t UTF-8 converts it."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{name} is {str(path)!r}, which cannot be read ({reason}): choose another file.") from None


def _target(path: str | Path, name: str = "path") -> Path:
    """Follow symbolic links and return the file to replace. Raise UnwritableError if it exists and is not a regular file."""
    target = Path(os.path.realpath(path))
    with suppress(FileNotFoundError):
        kind = stat.S_IFMT(target.stat().st_mode)
        if kind != stat.S_IFREG:
            description = FILE_KINDS.get(kind, "no regular file")
            raise UnwritableError(f"{name} is {str(path)!r}, {description}, expected the file to write: {REMEDY}.")
    return target


@contextmanager
def unwritable_errors(path: str | Path, name: str = "path") -> Iterator[None]:
    """Turn errors of the system into an UnwritableError: one sentence that names the argument."""
    try:
        yield
    except UnwritableError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        if isinstance(error, ValueError) and "\0" not in str(path):
            raise
        if isinstance(error, OSError) and error.errno is None:  # not an error of the system: keep its message
            raise
        reason = getattr(error, "strerror", None) or error
        raise UnwritableError(f"{name} is {str(path)!r}, which cannot be written ({reason}): {REMEDY}.") from error
