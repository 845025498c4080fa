"""A page as one file of HTML that needs nothing else: no network, no script, light and dark, screen and paper.

A file is written whole or not at all. The same page is the same text: what changes from run to run, a date, is in the page.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from contextlib import suppress
from importlib import resources
from pathlib import Path

from addnorm._util.optional import require
from addnorm.report.blocks import Figure, Page

__all__ = ["check", "render", "write"]

SUFFIXES = (".html", ".htm")


def render(page: Page) -> str:
    """The page's HTML.

    Raises:
        ImportError: jinja2 is not installed.
        ValueError: two figures were drawn with one name.
    """
    _check_ids(page)
    jinja2 = require("jinja2", "write a report")
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    text: str = environment.from_string(_file("page.html")).render(page=page, style=_file("style.css"))
    return text.lstrip()


def write(page: Page, path: str | Path) -> Path:
    """Writes a page, whole or not at all; its folder is made.

    Args:
        page: what `addnorm.report.of_model` gives.
        path: ends in .html.

    Raises:
        ValueError: the path ends otherwise.
        OSError: it cannot be written to; the error says why in a sentence.
    """
    path = Path(path)
    text = render(page)
    check(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def check(path: str | Path) -> None:
    """Refuses a path that `write` would refuse, and makes its folder: to be called before what takes long."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"path is {str(path)!r}, expected a file that ends in .html: a browser is to open it.")
    try:
        if path.is_dir():
            raise OSError(f"path is {str(path)!r}, a directory, expected the file to write.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.stat()  # which a name does not survive that is too long, or none
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise _unwritable(path, error) from error


def _check_ids(page: Page) -> None:
    """One drawing's stripes and clippings would be the other's."""
    figures = [one for section in page.sections for one in section.blocks if isinstance(one, Figure)]
    ids = [found for one in figures for found in re.findall(r' id="([^"]+)"', one.svg + one.narrow)]
    for found, count in Counter(ids).items():
        if count > 1:
            raise ValueError(
                f"{count} drawings have the id {found!r}, expected each figure drawn with a name of its own."
            )


def _unwritable(path: Path, error: Exception) -> OSError:
    if isinstance(error, OSError) and error.errno is None:
        return error
    return OSError(f"path is {str(path)!r}, which cannot be written ({getattr(error, 'strerror', None) or error}).")


def _file(name: str) -> str:
    return resources.files("addnorm.report").joinpath(name).read_text(encoding="utf-8")
