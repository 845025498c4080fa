"""Pages with generated sections: the code that the scripts of this folder, and benchmarks/table.py, share.

    <!-- name -->                the section `name` is between its two comments; the rest of the page stays as it is
    <!-- /name -->

Every section is made before the file is replaced, atomically.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from addnorm._util import files
from addnorm._util.blocks import Table
from addnorm._util.render import to_markdown

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"

Sections = Mapping[str, Callable[[], str]]


def main(words: Sequence[str], page: Path, sections: Sections, source: str, script: str = "") -> int:
    """Replace the sections of a page, or with `--check` return whether they are up to date (0) or not (1).

    Args:
        words: arguments of the command line: nothing, or `--check`.
        page: the page.
        sections: functions that make the sections, by name.
        source: subject and verb for the message: "the wirings say".
        script: the script that writes the page; by default the one of the same name.
    """
    script = script or f"docs/_build/{page.stem}.py"
    if [*words] not in ([], ["--check"]):
        raise SystemExit(f"{script} was called with {' '.join(words)}, expected nothing or --check.")
    text = page.read_text(encoding="utf-8")
    wanted = replaced(page.name, text, {name: make() for name, make in sections.items()})
    if text == wanted:
        return 0
    if words:
        print(f"{page.name} is not what {source}: run {script}")
        return 1
    files.write_text(page, wanted)
    return 0


def replaced(name: str, text: str, sections: Mapping[str, str]) -> str:
    """Return the text of a page with each section between its two comments."""
    for section, content in sections.items():
        begin, end = f"<!-- {section} -->", f"<!-- /{section} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise SystemExit(f"{name} needs one {begin} and one {end}: add the two lines where the section belongs.")
        before, after = text.split(begin)[0], text.split(end)[1]
        text = "\n".join([f"{before}{begin}", *filter(None, [content]), f"{end}{after}"])
    return text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown, with left-aligned columns."""
    return to_markdown(Table(head, rows))
