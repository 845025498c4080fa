"""What docs/explorer.md says was measured, from benchmarks/results/explorer.json.

python docs/_build/explorer.py            replaces what stands between the explorer comments of docs/explorer.md
python docs/_build/explorer.py --check    changes nothing; 1 if it is not what the results say
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import add_norm
import comparing
import page

PAGE = comparing.ROOT / "docs" / "explorer.md"
ROWS = {
    "flip": {
        "total": "the norm moves: from the key until all in sight is laid out",
        "compute": "of it the server's computation",
        "hand": "for comparison: forward and backward alone, nothing measured",
    },
    "trace": {"d = 3": "a digit of a token of 3 numbers", "d = 16": "a digit of a token of 16 numbers"},
}


def speed() -> str:
    """The times, the targets, and what became of answers that were overtaken."""
    found = add_norm.document("explorer")
    stack, overtaken = found["stack"], found["stale"]
    rows = [
        [name, *(f"{found[kind][key][column]:.1f}" for column in ("median", "p95", "most")), _target(found, kind, key)]
        for kind, names in ROWS.items() for key, name in names.items()
    ]  # fmt: skip
    last = (
        "the last drawn is the last asked for"
        if overtaken["last is right"]
        else "the last drawn is not the last asked for"
    )
    head = (
        f"Milliseconds in headless Chromium, at {stack['S']} sublayers, d = {stack['d']}, {stack['T']} tokens, each for the "
        "first time:"
    )
    after = (
        f"Of {overtaken['asked']} flips within a fifth of a second {overtaken['drawn']} were drawn, and {last}. "
        f"{found['machine']['cpu']}, {found['machine']['cores']} cores, Chromium {found['chromium'].partition('.')[0]}; "
        "`python benchmarks/bench_explorer.py`."
    )
    return "\n\n".join([head, page.table(["what", "median", "95 of 100", "most", "target"], rows), after])


def _target(found: dict, kind: str, key: str) -> str:
    """That of 95 in 100, where there is one."""
    if key in ("compute", "hand"):
        return ""
    most = found["targets"][kind]["target"]
    return f"{most:g}" if found[kind][key]["p95"] < most else f"{most:g} (missed)"


SECTIONS = {"explorer:speed": speed}


def main(words: Sequence[str]) -> int:
    """What `page.main` does."""
    return page.main(words, PAGE, SECTIONS, "the results say", "docs/_build/explorer.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
