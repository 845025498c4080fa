"""Write the generated sections of comparing.md from benchmarks/results/compare.json.

python docs/_build/comparing.py            replace the text between the comparing comments of the page
python docs/_build/comparing.py --check    change nothing; exit with 1 if the page differs from the results

The sentences are the verdict of the comparison itself.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import page

PAGE = page.DOCS / "comparing.md"
RESULTS = page.RESULTS / "compare.json"
SHORT = ("loss",)  # topics of the sentences in README


def document() -> dict[str, Any]:
    """Return the results."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def verdict() -> str:
    """Return the verdict, a sentence a line."""
    return "\n".join(f"- {one['sentence']}" for one in document()["comparison"]["verdict"])


def table() -> str:
    """Return a table of the runs, and where they were measured."""
    results = document()
    rows = [
        [
            f"`{run['settings']['wiring']}`", str(run["settings"]["warm_up"] or "none"), f"{run['test']:.3f}",
            f"{run['recorded']['logit_change'][0]:.3f}", f"{run['seconds']:.0f}",
        ]
        for run in results["rows"]
    ]  # fmt: skip
    made = page.table(["wiring", "warm-up", "test loss", "first step moves the logits by", "seconds"], rows)
    machine = f"{results['machine']['cpu']}, {results['machine']['cores']} cores"
    versions = f"torch {results['versions']['torch']}, commit {results['commit'][:10]}, {results['date'][:10]}"
    load = f"load {results['load']:.1f} before it began"
    return f"{made}\n\n{results['seconds']:.0f} seconds in all, stacks before training included. {machine}, {versions}, {load}."


def short() -> str:
    """Return the figure's caption in README.md: how far it is evidence, then what it shows."""
    results = document()["comparison"]
    protocol = results["protocol"]
    counts = [(len(protocol["rates"]), "learning rate"), (len(protocol["seeds"]), "seed")]
    of = ", ".join(f"{'one' if count == 1 else count} {name}{'s'[: count > 1]}" for count, name in counts)
    sentences = {one["about"]: one["sentence"] for one in results["verdict"]}
    text = " ".join(sentences[about] for about in SHORT if about in sentences)
    unit = " (The loss is the mean of -ln p, where p is the model's probability of the next character.)"
    head = (
        f"This is an illustration ({of}), not evidence: [docs/comparing.md](docs/comparing.md). "
        if results["illustration"]
        else ""
    )
    return "\n".join(textwrap.wrap(head + text + unit, 130, break_long_words=False, break_on_hyphens=False))


SECTIONS = {"comparing:verdict": verdict, "comparing:table": table}


def main(words: Sequence[str]) -> int:
    """Run `page.main` for comparing.md."""
    return page.main(words, PAGE, SECTIONS, "the comparison says")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
