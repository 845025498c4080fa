"""Types of parameters, and the values that the shell completes."""

import importlib.util
import math
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

LONGEST = 4095  # bytes of a path


class ParameterError(click.ClickException):
    """Error for a wrong value of a parameter, reported in one sentence. Exit code 2."""

    exit_code = 2

    def __init__(self, param: click.Parameter | None, value: str, expected: str) -> None:
        name = "the value" if param is None else re.sub(r"[\[\].]", "", param.metavar or "")
        if isinstance(param, click.Option):
            name = max(param.opts, key=len)
        text = value if re.fullmatch(r"-?\d+", value) else repr(value)
        super().__init__(f"{name} is {text if len(text) <= 100 else f'{text[:99]}…'}, expected {expected}.")


class Kind(click.ParamType[Any]):
    """Type of a parameter.

    Args:
        metavar: the value in the help.
        expected: the accepted values, for errors.
        parse: function of the text that returns the value. It raises a ValueError for a wrong one, or a `click.BadParameter` with
            other words than `expected`.
        names: function that returns the names to complete.
        path: "file" or "dir" where the shell also completes paths.
    """

    name = "value"

    def __init__(
        self, metavar: str, expected: str = "", parse: Callable[[str], Any] = str,
        names: Callable[[], Iterable[str]] = tuple, path: str = "",
    ) -> None:  # fmt: skip
        self.metavar, self.expected, self.parse, self.names, self.path = metavar, expected, parse, names, path

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the placeholder that the help shows for the value, such as N."""
        return self.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value that a text stands for, or raise a ParameterError."""
        try:
            return self.parse(value)
        except click.BadParameter as error:
            raise ParameterError(param, value, error.message) from None
        except ValueError:
            raise ParameterError(param, value, self.expected) from None

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin with a text; for a path also the request that the shell completes it."""
        paths = [CompletionItem(incomplete, type=self.path)] if self.path else []
        return [*paths, *(CompletionItem(name) for name in self.names() if name.startswith(incomplete))]


def whole(minimum: int, maximum: float = math.inf) -> Kind:
    """Return the type of whole numbers between two limits."""

    def parse(text: str) -> int:
        number = int(text)
        if not minimum <= number <= maximum:
            raise ValueError
        return number

    limit = "" if maximum == math.inf else f" to {maximum}"
    return Kind("N", f"a whole number from {minimum}{limit}", parse)


def numbers(kind: Callable[[str], Any]) -> Kind:
    """Return the type of a tuple of numbers, int or float, separated by commas."""
    metavar, words, example = ("N,...", "whole numbers", "6,12") if kind is int else ("X,...", "numbers", "3e-4,1e-3")
    expected = f"{words} separated by commas, as in {example}"
    return Kind(metavar, expected, lambda text: tuple(map(kind, text.split(","))))


def one_of(*words: str, metavar: str = "", simplify: Callable[[str], str] = str) -> Kind:
    """Return the type of a choice of words. `simplify` turns other spellings into these words."""

    def parse(text: str) -> str:
        if simplify(text) not in words:
            raise ValueError
        return simplify(text)

    return Kind(metavar or f"[{'|'.join(words)}]", f"one of {', '.join(words)}", parse, lambda: words)


def path_of(kind: str, metavar: str, completes: str = "file", *, pipes: bool = True) -> Kind:
    """Return the type of a path, which need not exist. Devices are refused: they have no end.

    Args:
        kind: "file" or "folder", for errors.
        metavar: the value in the help.
        completes: "file" or "dir", for the shell.
        pipes: accept named pipes. Reading one waits until another process writes.
    """

    def parse(text: str) -> Path:
        if not text or "\0" in text or len(text.encode(errors="surrogateescape")) > LONGEST:
            raise ValueError
        path, mode = Path(text), 0
        with suppress(OSError):
            mode = path.stat().st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise click.BadParameter(f"a {kind}, not a device")
        if stat.S_ISFIFO(mode) and not pipes and not text.startswith("/dev/"):  # /dev/stdin has a writer
            raise click.BadParameter(f"a {kind}, not a named pipe")
        return path

    return Kind(metavar, f"the path of a {kind}", parse, path=completes)


def find_names(package: str, files: str, pattern: str) -> list[str]:
    """Return the names that a pattern finds in files of a package, which are read as text: the import takes seconds."""
    names: set[str] = set()
    with suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations if spec else None) or ():
            for path in Path(folder).glob(files):
                names.update(re.findall(pattern, path.read_text("utf-8"), re.MULTILINE))
    return sorted(names)


FILE, TEXT, FOLDER = path_of("file", "FILE"), path_of("file", "FILE", pipes=False), path_of("folder", "DIR", "dir")
COUNT = whole(1)
REAL = Kind("X", "a number, as in 1e-5", float)
WIRING = Kind("NAME", names=partial(find_names, "addnorm", "wirings/catalog*.py", r"^@register\ndef (\w+)"))
PRESET = Kind("NAME", names=partial(find_names, "addnorm", "trace/presets.py", r'Preset\(\s*"([\w-]+)"'))
# Also accepts post_ln and post-LN, the names of the wirings.
PLACEMENT = one_of("post", "pre", simplify=lambda text: text.lower().replace("-", "_").removesuffix("_ln"))
MODEL_TYPE = r'^\s+\("([\w.-]+)", "\w+Config"\)'  # an entry of transformers' table
MODEL = Kind(
    "MODEL", names=lambda: ["minilm", *find_names("transformers", "models/auto/*auto*.py", MODEL_TYPE)], path="dir"
)
