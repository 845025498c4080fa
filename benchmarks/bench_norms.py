"""Training with and without norms. Writes results/norms.json, from which table.py makes tables of docs/claims.md.

Character models of the lab (`addnorm.lab.train`), each wiring at several learning rates. Every `EVERY` steps a run measures its
loss on held-out text, and on the same text what each sublayer reads: the size, and how far the mean of each feature has moved.
One thread; about a quarter of an hour. The numbers are losses and activations, which do not depend on the load of the machine.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import claims
import torch
from claims import BLOCK, HAND, LEARNED, Claim, Measure, Measured, best_of, has_learned, rows_of
from torch import Tensor

from addnorm.bench.case import Case, Document, Results, Row, grid
from addnorm.bench.harness import Benchmark, main
from addnorm.bench.pages import markdown
from addnorm.lab import Run, Text, measure, python_docs
from addnorm.lab.models import CharLM
from addnorm.lab.train import Training, one_thread

NORMED, BARE = ("pre_ln", "post_ln"), ("no_norm", "rezero")
WIRINGS = NORMED + BARE
LAYERS = (6, 12)
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
SEEDS = (0, 1)
SETTINGS: dict[str, Any] = {"steps": 200, "warm_up": 0, "d_model": 64, "nhead": 4, "tokens": 32, "batch": 8}
EVERY = 20
PROBED = 16  # sequences of the test part on which the reads are measured
JUDGED = 64  # sequences of the validation part on which the loss is measured during training
MOVED = 1.0  # standard deviations that the mean of a feature moves, root mean square over the features
RESIZED = 2.0  # factor by which the size of a read changes

text_of_the_lab = cache(python_docs)


def measure_case(case: Case, *, rounds: int) -> Results:
    """Return the row of a depth, wiring and learning rate: means over the seeds. `rounds` has no effect.

    By measured step, `resized` is the largest factor by which the size of a sublayer's read has changed, and `moved` the largest
    shift.
    """
    runs = [Run(case.wiring, case.num_layers, lr=case.lr, seed=seed, every=0, **SETTINGS) for seed in SEEDS]
    trained = [train(run, text_of_the_lab()) for run in runs]
    loss, losses, sizes, shifts = (torch.stack(of_seeds).mean(0) for of_seeds in zip(*trained, strict=True))
    factors = sizes / sizes[0]
    numbers = {
        "loss": loss, "losses": losses, "resized": torch.maximum(factors, 1 / factors).amax(-1), "moved": shifts.amax(-1),
    }  # fmt: skip
    return {"rows": [case.row(**{name: number.tolist() for name, number in numbers.items()})]}


def finish(results: Results, head: Document) -> Document:
    """Return the raw numbers, which are judged once all wirings are measured."""
    if head.get("left") or not all(
        rows_of(results["rows"], wiring=wiring, num_layers=n) for n in LAYERS for wiring in WIRINGS
    ):
        return results
    return {"results": {"unigram": text_of_the_lab().entropy, **results}}


def train(run: Run, text: Text) -> list[Tensor]:
    """Train one run and return its held-out loss; and by measured step the losses, and for each sublayer what it reads.

    Of a read there are sizes, the root mean squares, and shifts: how far the features' means have moved, in the first standard
    deviations, root mean square over the features. A run that diverges ends early: its last reads count on, its losses are
    infinite.
    """
    with one_thread():
        training = Training(run, text)
        probe, _ = text.held_out("test", PROBED, run.tokens)
        inputs, targets = text.held_out("validation", JUDGED, run.tokens)

        def look() -> tuple[Tensor, Tensor]:
            loss = measure.cross_entropy(measure.logits(training.model, inputs), targets)
            return loss, reads_of(training.model, probe)

        looks = [look()]
        looks += [look() for _ in training.each_step() if training.step % EVERY == 0]
        looks += [(torch.tensor(math.inf), looks[-1][1])] * (1 + run.steps // EVERY - len(looks))
        losses, reads = map(torch.stack, zip(*looks, strict=True))
        means = reads.mean(2)
        shifts = ((means - means[0]) / reads[0].std(1)).square().mean(-1).sqrt()
        sizes = reads.square().mean((2, 3)).sqrt()
        loss = torch.tensor(training.evaluate()["test"])
        return [number.nan_to_num(math.inf, math.inf) for number in (loss, losses, sizes, shifts)]


@torch.no_grad()
def reads_of(model: CharLM, probe: Tensor) -> Tensor:
    """Return what each sublayer reads on the sequences of the probe, `(sublayers, tokens, d)`."""
    reads: list[Tensor] = []
    modules: list[Any] = [connection.sublayer for connection in model.decoder.stack.connections]
    hooks = [module.register_forward_pre_hook(lambda _, args: reads.append(args[0].clone())) for module in modules]
    model.forward(probe)
    for hook in hooks:
        hook.remove()
    return torch.stack(reads).double().flatten(1, -2)


# -------------------------------------------------------------------------------------------------------- judging


def steps_to_learn(results: Document, rows: list[Row]) -> float:
    """Return the first measured step of the best run at which it has learned; infinity if there is none."""
    reached = (k * EVERY for k, loss in enumerate(best_of(rows)["losses"]) if has_learned(loss, results["unigram"]))
    return float(next(reached, math.inf))


def largest_rate(results: Document, rows: list[Row]) -> float:
    """Return the largest learning rate at which a wiring learns, or zero."""
    return max((row["lr"] for row in rows if has_learned(row["loss"], results["unigram"])), default=0.0)


def by_wiring(number: Callable[[Document, list[Row]], float]) -> Measure:
    """Return the function that selects a number of the runs at all rates, by depth and wiring."""
    return lambda results: {
        f"{n} layers": {
            wiring: number(results, rows_of(results["rows"], wiring=wiring, num_layers=n)) for wiring in WIRINGS
        }
        for n in LAYERS
    }


def each(m: Measured, holds: Callable[[str, float], bool], without: str = "") -> dict[str, bool]:
    """Return for each depth and wiring whether a statement holds. `without` begins the names of wirings without norms."""
    return {
        f"{'' if wiring in NORMED else without}{wiring}, {layers}": holds(wiring, value)
        for layers, numbers in m.items() for wiring, value in numbers.items()
    }  # fmt: skip


def compared(m: Measured, better: Callable[[float, float], bool]) -> dict[str, bool]:
    """Return for each depth whether both normed wirings are better than each one without norms."""
    return {
        f"{wiring} against {bare}, {layers}": better(numbers[wiring], numbers[bare])
        for layers, numbers in m.items() for bare in BARE for wiring in NORMED
    }  # fmt: skip


CLAIMS = (
    Claim(
        "The distribution of activations within layers shifts during training.", BLOCK,
        f"at its best rate, the mean feature of what some sublayer reads moves by more than {MOVED:g} of its standard deviations",
        by_wiring(lambda _, rows: max(best_of(rows)["moved"])),
        lambda m: each(m, lambda _, shift: shift > MOVED)
    ),
    Claim(
        "With the norm, the inputs to the next layer stay in a consistent range.", HAND,
        f"at its best rate, the size of what every sublayer reads stays within a factor of {RESIZED:g} of its first; without "
        "norms it does not",
        by_wiring(lambda _, rows: max(best_of(rows)["resized"])),
        lambda m: each(m, lambda wiring, factor: (factor <= RESIZED) is (wiring in NORMED), "not in ")
    ),
    Claim(
        "Normalization speeds up training; without it convergence is slower.", f"{HAND}; {BLOCK}",
        f"each at its best rate, fewer steps to a loss {LEARNED} below that of single characters",
        by_wiring(steps_to_learn),
        lambda m: compared(m, operator.lt)
    ),
    Claim(
        "Normalization stabilizes training.", f"{HAND}; {BLOCK}",
        "the largest learning rate at which the model learns, 0 where it learns at none, is higher with norms",
        by_wiring(largest_rate),
        lambda m: compared(m, operator.gt)
    ),
)  # fmt: skip


def rates_section(document: Document) -> str:
    """Return the table of the losses: a line a depth and wiring, a column a learning rate; the best one in bold."""
    results, protocol = document["results"], document["protocol"]
    source = f"torch {document['versions']['torch']}, commit {document['commit'][:10]}, {document['date'][:10]}"
    table = markdown(
        {"wiring": f"`{wiring}`", "L": f"{n}",
         **{f"rate {row['lr']:g}": claims.mark_best(claims.in_short(row["loss"]), row, rows) for row in rows}}
        for n in LAYERS for wiring in WIRINGS for rows in [rows_of(results["rows"], wiring=wiring, num_layers=n)]
    )  # fmt: skip
    return (
        f"{table}\n\nTest loss in nats a character after {protocol['steps']} steps, the mean of {len(protocol['seeds'])} seeds, "
        f"without warm-up; {claims.explain_losses(document)} {source}."
    )


BENCHMARK = Benchmark(
    "norms", grid(num_layers=LAYERS, wiring=WIRINGS, lr=RATES), measure_case, parts=("rows",),
    protocol={
        "layers": LAYERS, "rates": RATES, "seeds": SEEDS, **SETTINGS, "every": EVERY, "probed": PROBED, "optimizer": "Adam",
        "text": "pydoc_data.topics",
    },
    finish=finish, verdicts=partial(claims.judge_all, CLAIMS), threads=1, rounds=1, idle=False,
    sections={"docs/claims.md#claims-norms": claims.table, "docs/claims.md#norms-rates": rates_section},
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main(BENCHMARK))
