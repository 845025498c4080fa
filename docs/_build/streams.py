"""What streams.md says of the statistics, made from the table by which they are recorded.

python docs/_build/streams.py            replaces what stands between the streams comments of the page
python docs/_build/streams.py --check    changes nothing; 1 if the page is not what the table says
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import page

from addnorm.stream.record.schema import ROLES, STATISTICS, Statistic

PAGE = Path(__file__).parent.parent / "streams.md"


def statistics() -> str:
    """The roles, and each statistic with the roles that have it."""
    roles = page.table(["role", ""], [[f"`{role}`", meaning] for role, meaning in ROLES.items()])
    having: dict[tuple[str, str], list[Statistic]] = {}
    for one in STATISTICS:
        having.setdefault((one.name, one.meaning), []).append(one)
    rows = [
        [f"`{name}`", meaning, found[0].formula, ", ".join(f"`{one.role}`" for one in found)]
        for (name, meaning), found in having.items()
    ]
    return f"{roles}\n\n{page.table(['statistic', '', 'formula', 'of'], rows)}"


SECTIONS = {"streams:statistics": statistics}


def main(words: Sequence[str]) -> int:
    """Replace, or check."""
    return page.main(words, PAGE, SECTIONS, "the table says")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
