"""Generator of the tables of roles and statistics in streams.md, from schema.py.

python docs/_build/streams.py            replaces the text between the streams comments of the page
python docs/_build/streams.py --check    changes nothing; exit code 1 if the page is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import page

from addnorm.stream.record.schema import ROLES, STATISTICS, Statistic

PAGE = Path(__file__).parent.parent / "streams.md"


def statistics() -> str:
    """Return the table of roles, and the table of statistics with the roles that have them."""
    roles = page.table(["role", "meaning"], [[f"`{role}`", meaning] for role, meaning in ROLES.items()])
    by_name: dict[tuple[str, str], list[Statistic]] = {}
    for one in STATISTICS:
        by_name.setdefault((one.name, one.meaning), []).append(one)
    rows = [
        [f"`{name}`", meaning, entries[0].formula, ", ".join(f"`{one.role}`" for one in entries)]
        for (name, meaning), entries in by_name.items()
    ]
    return f"{roles}\n\n{page.table(['statistic', 'meaning', 'formula', 'roles'], rows)}"


SECTIONS = {"streams:statistics": statistics}


def main(words: Sequence[str]) -> int:
    """Update the page, or check it."""
    return page.main(words, PAGE, SECTIONS, "the table says")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
