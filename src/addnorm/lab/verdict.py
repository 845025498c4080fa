"""What a comparison says, in sentences: each is computed from numbers by a criterion that it carries with it.

A difference of losses is told only where it is larger than chance makes it: with three seeds and more than a t-test of the paired
differences at 5 %, with fewer than a margin that two seeds of one setting seldom exceed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from addnorm.lab.measure import Numbers
from addnorm.lab.results import Group, Results
from addnorm.wirings.row import format_factor as number

__all__ = ["Difference", "Finding", "difference", "findings", "setting"]

MARGIN = (
    0.1  # nats: of four seeds, 12 layers and 200 steps, the most was 0.075 (post-LN without warm-up; with it 0.005)
)
# Student's t by the number of seeds, two-sided at 5 %: of three seeds two standard errors are chance in 18 of 100 comparisons.
ERRORS = {
    3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 11: 2.23, 16: 2.13, 21: 2.09, 31: 2.04,
}  # fmt: skip
LEAST = 0.01  # nats: a smaller difference is told from nothing by nobody, however sure it is
LEARNED = 0.1  # nats below the entropy of single characters: less is to have learned nothing


@dataclass(frozen=True)
class Finding:
    """A sentence, what it is about, the criterion by which it was chosen, and the numbers."""

    about: str
    sentence: str
    criterion: str
    numbers: Numbers = field(default_factory=dict)

    def to_dict(self) -> Numbers:
        """For JSON."""
        return {"about": self.about, "sentence": self.sentence, "criterion": self.criterion, "numbers": self.numbers}


@dataclass(frozen=True)
class Difference:
    """Of two settings' losses: `mean` is the first less the second, over the seeds that both have."""

    mean: float
    error: float  # the standard error of it; NaN with fewer than three seeds
    seeds: int

    @property
    def clear(self) -> bool:
        """Whether it is more than chance."""
        if math.isnan(self.mean):
            return False
        if math.isinf(self.mean):
            return True
        if self.seeds < 3:
            return abs(self.mean) > MARGIN
        return abs(self.mean) > max(self.errors * self.error, LEAST)

    @property
    def errors(self) -> float:
        """How many standard errors are chance."""
        return ERRORS[max(seeds for seeds in ERRORS if seeds <= self.seeds)]

    @property
    def criterion(self) -> str:
        """In words."""
        if not self.seeds:
            return "there is no seed with which both trained"
        if math.isinf(self.mean):
            return "a setting that diverges with one seed is worse than one that never does"
        if self.seeds < 3:
            few = "one seed tells" if self.seeds == 1 else "two seeds tell"
            return f"{few} a difference apart from chance only above {MARGIN:g} nats"
        return (
            f"a difference counts above {self.errors:g} standard errors of the {self.seeds} paired differences (t-test, 5 %), "
            f"and {LEAST:g} nats"
        )


def difference(one: Group, other: Group) -> Difference:
    """One's test loss less the other's, seed by seed: both had the same batches.

    Infinite where one diverged with some seed and the other with none; NaN where both did.
    """
    pairs = {run["settings"]["seed"]: loss for run, loss in zip(other.runs, other.losses(), strict=True)}
    both = [
        (loss, pairs[seed])
        for run, loss in zip(one.runs, one.losses(), strict=True)
        if (seed := run["settings"]["seed"]) in pairs
    ]
    if not both or all(any(map(math.isinf, losses)) for losses in zip(*both, strict=True)):
        return Difference(math.nan, math.nan, 0)
    found = [loss - other for loss, other in both]
    finite = len(found) > 2 and all(map(math.isfinite, found))
    error = statistics.stdev(found) / math.sqrt(len(found)) if finite else math.nan
    return Difference(statistics.fmean(found), error, len(found))


def setting(group: Group) -> str:
    """The learning rate and the warm-up, in words."""
    return f"rate {number(group.lr)}, {'warm-up' if group.warm_up else 'no warm-up'}"


def findings(of: Results) -> list[Finding]:
    """All that can be said."""
    told = [_scope(of)]
    for say in (_ranks, _warm_ups, _failed, _edges, _gradients, _shares, _ablated, _theory):
        told += say(of)
    return told


def _scope(of: Results) -> Finding:
    """What this is, and what it is not."""
    p, n = of.protocol, len(of.runs)
    if not n:
        return Finding(
            "scope", "Untrained stacks only: nothing was trained, and nothing here says how anything trains.", ""
        )
    one = [f"{len(found)} {name}{'s' * (len(found) != 1)}" for name, found in
           (("depth", p.num_layers), ("learning rate", p.rates), ("seed", p.seeds))]  # fmt: skip
    size = f"{n} run{'s' * (n != 1)} of {p.steps} steps ({', '.join(one)}; d = {p.d_model}, {p.tokens} characters x {p.batch})"
    if p.illustrates:
        sentence = f"An illustration, not evidence: {size}. For evidence: addnorm compare --full."
        return Finding("scope", sentence, "evidence needs three seeds and two learning rates at least")
    sentence = f"{size}. Each wiring is judged at its best rate and warm-up, chosen on other text than it is judged on."
    return Finding("scope", sentence, "")


def _ranks(of: Results) -> Iterator[Finding]:
    """Which wiring ends lowest, depth by depth."""
    for n, arms in of.by_depth():
        if len(arms) < 2:
            continue
        best = sorted(arms, key=lambda arm: arm.best.loss())
        first, numbers = best[0], {arm.wiring: arm.best.loss() for arm in best}
        texts = [f"{arm.wiring} {_loss(arm.best.loss())} ({setting(arm.best)})" for arm in best]
        against = [(arm, difference(arm.best, first.best)) for arm in best[1:]]
        behind = [arm.wiring for arm, off in against if off.clear]
        level = [arm.wiring for arm, off in against if not off.clear]
        if not math.isfinite(first.best.loss()):
            sentence = f"At {n} layers no wiring trained with every seed"
        elif first.best.loss() > of.text["entropy"] - LEARNED:
            sentence = f"At {n} layers no wiring learned more than how often each character occurs"
        elif not behind:
            sentence = f"At {n} layers {_listed([arm.wiring for arm in best])} are not told apart"
        else:
            also = f"; {_listed(level)} {'is' if len(level) == 1 else 'are'} not told apart from it" if level else ""
            sentence = f"At {n} layers {first.wiring} ends lowest, below {_listed(behind)}{also}"
        yield Finding("loss", f"{sentence}: {', '.join(texts)}, in nats a character.", against[0][1].criterion, numbers)


def _warm_ups(of: Results) -> Iterator[Finding]:
    """What warm-up brings to each."""
    for n, arms in of.by_depth():
        said, numbers, criterion = [], {}, ""
        for arm in arms:
            without, with_it = arm.best_where(lambda g: not g.warm_up), arm.best_where(lambda g: g.warm_up > 0)
            if without is None or with_it is None:
                continue
            off = difference(without, with_it)
            numbers[arm.wiring], criterion = off.mean, off.criterion
            both = f" ({_loss(without.loss())} without, {_loss(with_it.loss())} with)"
            if math.isnan(off.mean):
                said.append(f"{arm.wiring} diverges either way")
            elif not off.clear:
                said.append(f"{arm.wiring} is not told apart with and without it{both}")
            else:
                verb = (
                    "needs it"
                    if math.isinf(off.mean) and off.mean > 0
                    else "gains by it"
                    if off.mean > 0
                    else "loses by it"
                )
                said.append(f"{arm.wiring} {verb}{both}")
        if said:
            yield Finding("warm-up", f"Warm-up, at {n} layers: {_listed(said)}.", criterion, numbers)


def _failed(of: Results) -> Iterator[Finding]:
    """Which runs learned nothing, or diverged."""
    entropy = of.text["entropy"]
    for what, which in (
        ("diverged", lambda run: run["diverged"]),
        ("learned nothing", lambda run: not run["diverged"] and run["test"] > entropy - LEARNED),
    ):
        chosen: Callable[[Numbers], bool] = which
        counts = {
            name: (sum(map(chosen, runs)), len(runs))
            for name in of.compared
            if (runs := [run for run in of.runs if run["settings"]["wiring"] == name])
        }
        said = [_runs(failed, all_, name) for name, (failed, all_) in counts.items() if failed]
        if said:
            note = (
                "" if what == "diverged"
                else f": less than {LEARNED:g} nats below {entropy:.2f}, what the frequencies of the characters alone give"
            )  # fmt: skip
            criterion = f"diverged: no number, or well above the first loss and {of.text['uniform']:.2f}, that of knowing nothing"
            told = _listed(said)
            yield Finding("failures", f"{told[0].upper()}{told[1:]} {what}{note}.", criterion if not note else "",
                          {name: failed for name, (failed, _) in counts.items()})  # fmt: skip


def _edges(of: Results) -> Iterator[Finding]:
    """Where the grid of rates was too narrow."""
    said = [f"{arm.wiring} at {arm.num_layers} layers ({number(arm.best.lr)})" for arm in of.arms if arm.at_the_edge]
    if said:
        yield Finding(
            "grid", f"The best rate is at the edge of the grid for {_listed(said)}: a better one may lie beyond.", ""
        )


def _gradients(of: Results) -> Iterator[Finding]:
    """The gradient at x_0 over that at x_L, before and after training."""
    for n, arms in of.by_depth():
        said, numbers = [], {}
        for arm in arms:
            group = arm.best_where(lambda g: not g.warm_up) or arm.best
            start = group.mean(lambda run: ratio(_first(run)))
            end = group.mean(lambda run: ratio(run.get("after")))
            if math.isnan(start):
                continue
            numbers[arm.wiring] = {"before": start, "after": end, "warm_up": group.warm_up}
            after = "" if math.isnan(end) else f" and {_times(end)} after"
            said.append(f"{arm.wiring} {_times(start)} before training{after}")
        if said:
            warm = "" if any(found["warm_up"] for found in numbers.values()) else " (without warm-up)"
            sentence = f"The gradient at x_0 over that at x_L, {n} layers: {', '.join(said)}{warm}."
            yield Finding("gradient", sentence, "mean length of a token's gradient, means over the seeds", numbers)


def _shares(of: Results) -> Iterator[Finding]:
    """What is left of x_0 at the end of the stream, and what the last sublayer has."""
    for n, arms in of.by_depth():
        said, numbers = [], {}
        for arm in arms:
            x_0 = arm.best.mean(lambda run: share(run.get("after"), 0))
            last = arm.best.mean(lambda run: share(run.get("after"), -1))
            if math.isfinite(x_0) and math.isfinite(last):
                numbers[arm.wiring] = {"x_0": x_0, "last": last}
                said.append(f"in {arm.wiring} x_0 has {_percent(x_0)} and the last write {_percent(last)}")
        if said:
            sentence = f"Of the stream after {n} trained layers, {', '.join(said)}."
            yield Finding("memory", sentence, "shares <c, x> / |x|^2, which sum to one", numbers)


def _ablated(of: Results) -> Iterator[Finding]:
    """What the loss rises by without one sublayer."""
    for n, arms in of.by_depth():
        said, numbers = [], {}
        for arm in arms:
            rises = [
                rise for run in arm.best.runs for one in run.get("ablation", ()) if math.isfinite(rise := one["rise"])
            ]
            if rises:
                middle, most = statistics.median(rises), max(rises)
                numbers[arm.wiring] = {"median": middle, "largest": most}
                said.append(f"{arm.wiring} {_signed(middle)} in the median, {_signed(most)} at most")
        if said:
            sentence = (
                f"Without one sublayer of the {n} trained layers the loss changes by, in nats: {'; '.join(said)}."
            )
            yield Finding("ablation", sentence, "each sublayer's write taken away in turn", numbers)


def _theory(of: Results) -> Iterator[Finding]:
    """How many published figures at init are met."""
    judged = [check for check in of.checks if check.holds is not None] if of.stacks else []
    if judged:
        failed = [check.name for check in judged if not check.holds]
        but = f"; not: {_listed(failed)}" if failed else ""
        sentence = f"Untrained stacks: {len(judged) - len(failed)} of {len(judged)} published figures are met{but}."
        yield Finding(
            "at init", sentence, "each lies in its band", {"met": len(judged) - len(failed), "of": len(judged)}
        )


# Numbers of runs.


def _first(run: Numbers) -> Numbers | None:
    """By depth, at the first step."""
    found = run["recorded"]
    return {"gradient": found["gradient"][0]} if found["steps"] else None


def ratio(found: Numbers | None) -> float | None:
    """The gradient at x_0 over that at x_L."""
    values = [] if found is None else [x for x in found["gradient"] if x is not None]
    return values[0] / values[-1] if len(values) > 1 and values[-1] else None


def share(found: Numbers | None, source: int) -> float | None:
    """Of a source in the last state: 0 is x_0, -1 the last sublayer."""
    if found is None or not found.get("map"):
        return None
    sources = [k for k, name in enumerate(found["map"]["sources"]) if name != "norm biases"]
    value: float = found["map"]["shares"][-1][sources[source]]
    return value


# Words.


def _loss(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "diverged"


def _runs(count: int, of: int, name: str) -> str:
    if count == of:
        return f"the run of {name}" if of == 1 else f"all {of} runs of {name}"
    return f"{count} of {of} runs of {name}"


def _signed(value: float) -> str:
    return f"{round(value, 3) + 0.0:+.3f}"  # + 0.0: no -0


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %" if abs(value) >= 0.095 else f"{100 * value:.1f} %" if abs(value) >= 0.0005 else "0 %"


def _times(value: float) -> str:
    return f"{value:.0f}" if 100 <= value < 1e4 else f"{value:.2g}" if 1e-4 <= value < 100 else f"{value:.0e}"


def _listed(texts: list[Any]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
