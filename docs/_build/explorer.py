"""Write the measured sections of docs/explorer.md from explorer.json and race.json in benchmarks/results/.

python docs/_build/explorer.py            replace the text between the explorer comments of docs/explorer.md
python docs/_build/explorer.py --check    change nothing; exit with 1 if the page differs from the results
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import add_norm
import page

from addnorm.bench.tables import headline
from addnorm.explorer import race

PAGE = page.DOCS / "explorer.md"
ROWS = {
    "flip": {
        "total": "the norm moves: from the key until all in sight is laid out",
        "compute": "of it the server's computation",
        "hand": "for comparison: forward and backward alone, nothing measured",
    },
    "trace": {"d = 3": "a digit of a token of 3 numbers", "d = 16": "a digit of a token of 16 numbers"},
}


def speed() -> str:
    """Return the times, the targets, and how many of the answers to a burst of flips were drawn."""
    results = add_norm.document("explorer")
    stack, overtaken = results["stack"], results["stale"]
    rows = [
        [
            name, _median(results[kind][key]), *(f"{results[kind][key][column]:.1f}" for column in ("p95", "most")),
            _target(results, kind, key),
        ]
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
        f"{headline(results)}. {results['machine']['cores']} cores, Chromium {results['chromium'].partition('.')[0]}; "
        "`python benchmarks/bench_explorer.py`."
    )
    return "\n\n".join([head, page.table(["what", "median", "95 of 100", "most", "target"], rows), after])


def _median(times: dict[str, float]) -> str:
    """Return the median of times and, where they were measured, the quartiles."""
    quartiles = f" ({times['q1']:.1f} to {times['q3']:.1f})" if "q1" in times else ""
    return f"{times['median']:.1f}{quartiles}"


def _target(results: dict[str, Any], kind: str, key: str) -> str:
    """Return the target of the 95th percentile, or empty text."""
    if key in ("compute", "hand"):
        return ""
    most = results["targets"][kind]["target"]
    return f"{most:g}" if results[kind][key]["p95"] < most else f"{most:g} (missed)"


def rates() -> str:
    """Return the losses of the race by learning rate, and the rates that the view opens with and offers as a lesson."""
    results = add_norm.document("race")
    protocol, lesson = results["protocol"], race.describe()["lesson"]
    opening = race.FIELDS["lr"].default
    settings: dict[tuple[float, int], dict[str, float]] = {(row["lr"], row["warm_up"]): {} for row in results["rows"]}
    for row in results["rows"]:
        settings[row["lr"], row["warm_up"]][row["wiring"]] = row["loss"]
    names = {(opening, 0): " (opening)", (lesson["rate"], 0): " (the lesson)"}
    lines = [
        [f"{rate:g}{names.get((rate, warm_up), '')}", str(warm_up or "none"), f"{loss['post_ln']:.2f}", f"{loss['pre_ln']:.2f}"]
        for (rate, warm_up), loss in sorted(settings.items())
    ]  # fmt: skip
    table = page.table(["learning rate", "warm-up, steps", "`post_ln`, nats", "`pre_ln`, nats"], lines)
    return (
        f"{table}\n\nValidation loss in nats a character after {protocol['steps']} steps with the default settings, mean of "
        f"{len(protocol['seeds'])} seeds; a model that knows only how often each character occurs has {results['entropy']:.2f}. "
        f"torch {results['versions']['torch']}, commit {results['commit'][:10]}, {results['date'][:10]}; "
        "`python benchmarks/bench_race.py`."
    )


SECTIONS = {"explorer:speed": speed, "explorer:rates": rates}


def main(words: Sequence[str]) -> int:
    """Run `page.main` for explorer.md."""
    return page.main(words, PAGE, SECTIONS, "the results say")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
