"""A page of which some sections are written by a script: what the scripts of this folder share.

    <!-- name -->                the section `name` stands between its two comments, and the rest of the page is left alone
    <!-- /name -->

A page is written whole or not at all: every section is made before the file is touched, and the file is replaced in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Sections = Mapping[str, Callable[[], str]]


def main(words: Sequence[str], page: Path, sections: Sections, source: str, script: str = "") -> int:
    """Replaces the sections of a page, or with `--check` says whether they are what they should be.

    Args:
        words: of the command line: nothing, or `--check`.
        page: the page.
        sections: what makes each.
        source: what they are made from, and its verb: "the wirings say".
        script: what writes it; by default the file beside it of the same name.
    """
    script = script or f"docs/_build/{page.stem}.py"
    if [*words] not in ([], ["--check"]):
        raise SystemExit(f"{script} was called with {' '.join(words)}, expected nothing or --check.")
    text = page.read_text(encoding="utf-8")
    wanted = replaced(page.name, text, {name: make() for name, make in sections.items()})
    if words:
        if text == wanted:
            return 0
        print(f"{page.name} is not what {source}: run {script}")
        return 1
    if text != wanted:
        write(page, wanted)
    return 0


def replaced(name: str, text: str, sections: Mapping[str, str]) -> str:
    """The text of the page of that name, each section put between its two comments."""
    for section, made in sections.items():
        begin, end = f"<!-- {section} -->", f"<!-- /{section} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise SystemExit(f"{name} needs one {begin} and one {end}: add the two lines where the section belongs.")
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n{made}\n{end}{after}"
    return text


def write(path: Path, text: str) -> None:
    """The whole text or, where that fails, the file as it was."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def cell(text: str) -> str:
    """A text in a cell of a table: its bars are none of the table's."""
    return text.replace("|", r"\|")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its columns to the left."""
    lines = [head, [":--"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
