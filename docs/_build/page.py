"""Write the generated sections of the pages: each module of this folder with SECTIONS makes those that it names.

python docs/_build/page.py                       write all pages
python docs/_build/page.py NAME ...              write the sections of these modules
python docs/_build/page.py --check [NAME ...]    change nothing; exit with 1 if a page differs from the package or the results

    <!-- page:name -->           a section is between two comments with its name, on the page that the name begins with: `readme`
    <!-- /page:name -->          is README.md, `wirings` is docs/wirings.md; the rest of the page stays as it is

Every section is made before the file is replaced, atomically.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from addnorm._util import files, jsonio
from addnorm._util.blocks import Table
from addnorm._util.render import to_markdown

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
MODULES = (
    "add_norm", "arguments", "comparing", "installing", "readme", "routes", "several_streams", "streams", "targets", "wirings",
)  # fmt: skip

Sections = Mapping[str, Callable[[], str]]


def main(words: Sequence[str], docs: Path = DOCS) -> int:
    """Write pages, or with `--check` return whether they are up to date (0) or not (1)."""
    check, names = "--check" in words, [word for word in words if word != "--check"]
    if unknown := {*names} - {*MODULES}:
        raise SystemExit(
            f"page.py was called with {' '.join(unknown)}, expected --check or modules: {', '.join(MODULES)}."
        )
    sys.path.append(str(Path(__file__).parent))
    stale = False
    for name in names or MODULES:
        sections = importlib.import_module(name).SECTIONS
        (page,) = {section.partition(":")[0] for section in sections}
        path = ROOT / "README.md" if page == "readme" and docs == DOCS else docs / f"{page}.md"
        stale |= update(path, sections, f"docs/_build/page.py {name}", check=check)
    return int(stale)


def update(path: Path, sections: Sections, script: str, *, check: bool) -> bool:
    """Replace the sections of a page, or with `check` only tell whether they are out of date.

    Args:
        path: the page.
        sections: functions that make the sections, by name.
        script: the command that writes the page.
        check: change nothing.
    """
    text = path.read_text(encoding="utf-8")
    wanted = replaced(path.name, text, {name: make() for name, make in sections.items()})
    if text != wanted and check:
        print(f"{path.name} is out of date: run {script}")
    elif text != wanted:
        files.write_text(path, wanted)
    return text != wanted and check


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


def document(name: str, results: Path = RESULTS) -> Any:
    """Return the results of a benchmark."""
    return jsonio.loads((results / f"{name}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.modules["page"] = sys.modules["__main__"]  # the module that the others import
    raise SystemExit(main(sys.argv[1:]))
