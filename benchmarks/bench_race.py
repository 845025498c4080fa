"""Losses of the explorer's race by learning rate. Writes results/race.json, which docs/explorer.md shows.

The race opens at the rate at which the worse wiring learns best (`opening_rate`) and offers the lowest at which post-LN fails
without warm-up (`failing_rate`) as a lesson. One thread, a few minutes; the losses do not depend on the load of the machine.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from addnorm.bench.case import Case, Document, Results, grid
from addnorm.bench.harness import Benchmark
from addnorm.bench.script import main
from addnorm.explorer import race
from addnorm.explorer.race import default_text
from addnorm.lab import Run
from addnorm.lab.train import Training, one_thread

CASES = grid(lr=(3e-4, 5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3), warm_up=(0, 60))
SEEDS = (0, 1, 2)
LEARNED = 0.1  # nats below the entropy of single characters, as in `addnorm.lab`
SETTINGS = ("num_layers", "d_model", "nhead", "tokens", "batch", "steps")


def measure(case: Case, *, rounds: int) -> Results:
    """Return a row for each racer. `rounds` has no effect: losses do not vary."""
    rows = []
    for run in race.parse(vars(case)):
        losses = [train(run, seed) for seed in SEEDS]
        rows.append({"wiring": run.name, **case.row(losses=losses, loss=statistics.fmean(losses))})
    return {"rows": rows}


def train(run: Run, seed: int) -> float:
    """Train one racer without recording and return its loss on the validation part."""
    with one_thread():
        training = Training(replace(run, seed=seed, every=0), default_text())
        training.finish()
        return float(training.evaluate()["validation"])


def losses(document: Document, warm_up: int = 0) -> dict[float, dict[str, float]]:
    """Return the mean losses by rate and wiring."""
    results: dict[float, dict[str, float]] = {}
    for row in document["rows"]:
        if row["warm_up"] == warm_up:
            results.setdefault(row["lr"], {})[row["wiring"]] = row["loss"]
    return results


def opening_rate(document: Document) -> float:
    """Return the rate without warm-up at which the worse of the two wirings has the lowest loss."""
    return min(results := losses(document), key=lambda rate: max(results[rate].values()))


def failing_rate(document: Document) -> float:
    """Return the lowest rate without warm-up at which post-LN learns nothing and pre-LN learns."""
    limit = document["entropy"] - LEARNED
    return min(rate for rate, loss in losses(document).items() if loss["post_ln"] > limit > loss["pre_ln"])


def finish(results: Results, head: Document) -> Document:
    """Return the rows, the entropy of the text, and what all runs share."""
    settings = race.parse({})[0].settings()
    protocol = {"seeds": SEEDS, "text": default_text().name, **{name: settings[name] for name in SETTINGS}}
    return {"entropy": default_text().entropy, "protocol": {**head["protocol"], **protocol}, **results}


def report(document: Document) -> str:
    """Return the losses, and the two rates."""
    lines = [
        f"{row['wiring']}, rate {row['lr']:g}, warm-up {row['warm_up']}: {row['loss']:.3f}" for row in document["rows"]
    ]
    if document["complete"] and not document.get("left"):
        lines.append(f"Opening rate {opening_rate(document):g}, failing rate {failing_rate(document):g}")
    return "\n".join(lines)


BENCHMARK = Benchmark(
    "race", ("lr", "warm_up"), CASES, measure, lambda case: f"rate {case.lr:g}, warm-up {case.warm_up}", finish=finish,
    parts=("rows",), threads=1, rounds=1, idle=False, report=report,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
