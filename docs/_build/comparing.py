"""What comparing.md says of the default comparison, made from benchmarks/results/compare.json.

python docs/_build/comparing.py            replaces what stands between the comparing comments of the page
python docs/_build/comparing.py --check    changes nothing; 1 if the page is not what the results say

The sentences are the comparison's own verdict. Nothing is judged here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "comparing.md"
RESULTS = ROOT / "benchmarks" / "results" / "compare.json"
SHORT = ("loss", "warm-up", "gradient", "memory")  # what README says


def document() -> dict[str, Any]:
    """The results."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def verdict() -> str:
    """The verdict, a sentence a line."""
    return "\n".join(f"- {one['sentence']}" for one in document()["comparison"]["verdict"])


def table() -> str:
    """Each run, and with what all of it was made."""
    found = document()
    rows = [
        [
            f"`{run['settings']['wiring']}`", str(run["settings"]["warm_up"] or "none"), f"{run['test']:.3f}",
            f"{run['recorded']['moved'][0]:.3f}", f"{run['seconds']:.0f}",
        ]
        for run in found["rows"]
    ]  # fmt: skip
    made = page.table(["wiring", "warm-up", "test loss", "first step moves the logits by", "seconds"], rows)
    machine = f"{found['machine']['cpu']}, {found['machine']['cores']} cores"
    versions = f"torch {found['versions']['torch']}, commit {found['commit'][:10]}, {found['date'][:10]}"
    return f"{made}\n\n{found['seconds']:.0f} seconds in all, stacks before training included. {machine}, {versions}."


def short() -> str:
    """The sentences for a reader in a hurry, for README.md."""
    told = [one["sentence"] for one in document()["comparison"]["verdict"] if one["about"] in SHORT]
    return "\n".join(f"- {sentence}" for sentence in told)


SECTIONS = {"comparing:verdict": verdict, "comparing:table": table}


def main(words: Sequence[str]) -> int:
    """What `page.main` does."""
    return page.main(words, PAGE, SECTIONS, "the comparison says")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
