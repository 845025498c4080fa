"""Losses of the explorer's race by learning rate. Writes results/race.json, which docs/explorer.md shows.

The race opens at the rate at which the worse wiring learns best (`opening_rate`) and offers the lowest at which post-LN fails
without warm-up (`failing_rate`) as a lesson. One thread, a few minutes; the losses do not depend on the load of the machine.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from harness import RESULTS, Document, Row

from addnorm.bench import environment
from addnorm.bench.harness import Run as Done
from addnorm.bench.harness import header, write
from addnorm.explorer import race
from addnorm.explorer.race import default_text
from addnorm.lab import Run
from addnorm.lab.train import Training, one_thread

SCHEMA = 1
RATES = (3e-4, 5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3)
WARM_UPS = (0, 60)
SEEDS = (0, 1, 2)
LEARNED = 0.1  # nats below the entropy of single characters, as in `addnorm.lab`


def main() -> int:
    """Train, print, write."""
    text, meter, where = default_text(), environment.LoadMeter(), environment.describe()
    rows: list[Row] = []
    for rate in RATES:
        for warm_up in WARM_UPS:
            for run in race.parse({"lr": rate, "warm_up": warm_up}):
                each = [train(run, seed) for seed in SEEDS]
                row = {
                    "wiring": run.name,
                    "lr": rate,
                    "warm_up": warm_up,
                    "losses": each,
                    "loss": statistics.fmean(each),
                }
                rows.append(row)
                print(f"{run.name}, rate {rate:g}, warm-up {warm_up}: {row['loss']:.3f}", flush=True)
    settings = race.parse({})[0].settings()
    document = {
        **header(SCHEMA, Done({}, ended="done")), **where, **meter.columns(), "entropy": text.entropy,
        "protocol": {
            "seeds": SEEDS, "text": text.name,
            **{name: settings[name] for name in ("num_layers", "d_model", "nhead", "tokens", "batch", "steps")},
        },
        "rows": rows,
    }  # fmt: skip
    print(f"Opening rate {opening_rate(document):g}, failing rate {failing_rate(document):g}")
    print(f"Written: {write(document, RESULTS / 'race.json')}")
    return 0


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


if __name__ == "__main__":
    raise SystemExit(main())
