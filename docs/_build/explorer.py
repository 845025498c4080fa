"""Write the measured sections of docs/explorer.md from explorer.json and race.json in benchmarks/results/."""

from __future__ import annotations

import page

from addnorm.bench.pages import headline, missed
from addnorm.explorer import race

ROWS = {
    "total": "the norm moves: from the key until all in sight is laid out", "compute": "of it the server's computation",
    "hand": "for comparison: forward and backward alone, nothing measured", "d = 3": "a digit of a token of 3 numbers",
    "d = 16": "a digit of a token of 16 numbers",
}  # fmt: skip


def speed() -> str:
    """Return the times, and how many of the answers to a burst of flips were drawn. The targets are in targets.md."""
    results = page.document("explorer")
    stack, (overtaken,) = results["stack"], results["stale"]
    rows = [
        [
            ROWS[row["variant"]], f"{row['median']:.1f} ({row['q1']:.1f} to {row['q3']:.1f})",
            *(f"{row[column]:.1f}" for column in ("p95", "most")),
        ]
        for row in results["rows"]
    ]  # fmt: skip
    last = "the last asked for" if overtaken["last is right"] else "not the last asked for"
    head = (
        f"Milliseconds in headless Chromium, at {stack['S']} sublayers, d = {stack['d']}, {stack['T']} tokens, each for the "
        "first time:"
    )
    after = (
        f"Of {overtaken['asked']} flips within a fifth of a second {overtaken['drawn']} were drawn, and the last drawn is "
        f"{last}. {missed(results, 'Every target is met')} (150 ms for a flip, 16 ms for a digit, in 95 of 100). "
        f"{headline(results)}. {results['machine']['cores']} cores, "
        f"Chromium {results['chromium'].partition('.')[0]}; `python benchmarks/bench_explorer.py`."
    )
    return "\n\n".join([head, page.table(["what", "median", "95 of 100", "most"], rows), after])


def rates() -> str:
    """Return the losses of the race by learning rate, and the rates that the view opens with and offers as a lesson."""
    results = page.document("race")
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
