"""What streams.md says of the statistics, made from the table by which they are recorded.

python docs/streams.py            replaces what stands between the streams comments of the page
python docs/streams.py --check    changes nothing; 1 if the page is not what the table says
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from addnorm.stream.record.vocabulary import ROLES, STATISTICS, Statistic

PAGE = Path(__file__).parent / "streams.md"


def statistics() -> str:
    """The roles, and each statistic with the roles that have it."""
    roles = ["| role | |", "| :-- | :-- |", *(f"| `{role}` | {meaning} |" for role, meaning in ROLES.items())]
    lines = ["| statistic | | formula | of |", "| :-- | :-- | :-- | :-- |"]
    having: dict[tuple[str, str], list[Statistic]] = {}
    for one in STATISTICS:
        having.setdefault((one.name, one.meaning), []).append(one)
    for (name, meaning), found in having.items():
        of = ", ".join(f"`{one.role}`" for one in found)
        lines.append(f"| `{name}` | {meaning} | {escaped(found[0].formula)} | {of} |")
    return "\n".join([*roles, "", *lines])


def escaped(formula: str) -> str:
    """A formula in a cell: its bars are none of the table's."""
    return formula.replace("|", r"\|")


def replaced(text: str) -> str:
    """The page with the table between its two comments."""
    begin, end = "<!-- streams:statistics -->", "<!-- /streams:statistics -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"{PAGE.name} needs one {begin} and one {end}: add the two lines where the table belongs.")
    return f"{text.split(begin)[0]}{begin}\n{statistics()}\n{end}{text.split(end)[1]}"


def main(words: Sequence[str]) -> int:
    """Replace, or check."""
    text = PAGE.read_text(encoding="utf-8")
    wanted = replaced(text)
    if list(words) != ["--check"]:
        PAGE.write_text(wanted, encoding="utf-8")
    elif text != wanted:
        print(f"{PAGE.name} is not what the table says: run docs/streams.py")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
