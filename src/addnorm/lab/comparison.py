"""`Comparison`: the results with a verdict, sentences that follow from the numbers, each with its criterion.

A verdict names a difference of losses only if it is more than chance: with three or more seeds by t-tests of the paired
differences, at 5% for all differences of a sentence, with fewer by a margin that two seeds of one setting rarely exceed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from addnorm._util.blocks import Block, Column, Paragraph, Table, TableRow
from addnorm._util.numbers import format_count
from addnorm._util.render import Rendered
from addnorm.lab.measure import Numbers
from addnorm.lab.results import Finding, Group, Results, difference
from addnorm.lab.untrained import describe_untrained
from addnorm.wirings.row import format_factor

__all__ = ["SCHEMA", "Comparison", "Finding"]

SCHEMA = "addnorm.comparison"
VERSION = 1
WIDTH = 100  # columns of a sentence
DETAIL = ("losses", "recorded", "map", "after", "sites")  # numbers by step and depth, only in results.jsonl
LEARNED = 0.1  # nats below the entropy of single characters: a model with less has learned nothing


class Comparison(Results, Rendered):
    """Comparison of wirings, returned by `addnorm.lab.compare`. It prints its verdict and a table of the settings.

    Attributes:
        compared: names of the wirings.
        protocol: the `Protocol`.
        runs: the results of the runs, JSON types.
        stacks: the statistics of untrained stacks, JSON types.
        text: name and size of the text, and the losses of trivial models.
    """

    @cached_property
    def verdict(self) -> list[Finding]:
        """Sentences that follow from the numbers, each with its criterion."""
        findings = [_scope(self)]
        for rule in RULES:
            findings += rule(self)
        return findings

    def to_dict(self) -> Numbers:
        """Return the comparison for JSON, without the numbers by step and depth, which the directory's results.jsonl has."""
        return {
            "schema": SCHEMA, "schema_version": VERSION, "compared": [*self.compared], "protocol": self.protocol.settings(),
            "illustration": self.protocol.is_illustration, "text": self.text,
            "verdict": [finding.to_dict() for finding in self.verdict],
            "checks": [check.to_dict() for check in self.checks],
            "runs": [{name: value for name, value in run.items() if name not in DETAIL} for run in self.runs],
        }  # fmt: skip

    def _blocks(self) -> Iterator[Block]:
        for finding in self.verdict:
            yield Paragraph(finding.sentence, hang=2, width=WIDTH)
        if self.groups:
            yield Paragraph("")
            yield self._settings()
            yield Paragraph(
                "Losses in nats a character on the test part. A wiring is judged by the setting marked yes.",
                style="dim",
            )
        for check in self.checks:
            if check.holds is False:
                measured = ", ".join(f"{name} {value:.3g}" for name, value in check.measured.items())
                yield Paragraph(f"Does not hold: {check.name} ({check.criterion}): {measured}", style="bad")

    def _settings(self) -> Table:
        """Return a table with a row for each setting."""
        best = {id(arm.best) for arm in self.arms}
        rows = []
        for group in self.groups:
            losses = " ".join(_loss(loss, "-") for loss in group.losses()) if len(group.runs) > 1 else ""
            is_best = id(group) in best
            cells = [
                group.wiring, str(group.num_layers), format_factor(group.lr), str(group.warm_up), _loss(group.loss(), "-"),
                losses, str(group.diverged or ""), "yes" if is_best else "",
            ]  # fmt: skip
            rows.append((cells, is_best))
        names = ("wiring", "layers", "rate", "warm-up", "test loss", "by seed", "diverged", "judged")
        shown = [k for k, name in enumerate(names) if name == "judged" or any(cells[k] for cells, _ in rows)]
        texts, optional = ("wiring", "by seed"), ("layers", "warm-up", "diverged")
        columns = [
            Column(
                names[k], "left" if names[k] in (*texts, "judged") else "right", fold=names[k] in texts,
                drop="last" if names[k] in optional else "never",
            )
            for k in shown
        ]  # fmt: skip
        return Table(
            columns, [TableRow([cells[k] for k in shown], "strong" if is_best else "") for cells, is_best in rows]
        )


def _scope(results: Results) -> Finding:
    """Return how much evidence the comparison is."""
    p, n = results.protocol, len(results.runs)
    if not n:
        return Finding("scope", "Only untrained stacks were measured. Nothing here shows how a wiring trains.", "")
    counts = [format_count(len(values), name) for name, values in
              (("depth", p.num_layers), ("learning rate", p.rates), ("seed", p.seeds))]  # fmt: skip
    size = (
        f"{format_count(n, 'run')} of {format_count(p.steps, 'step')} ({', '.join(counts)}; d_model = {p.d_model}, "
        f"{format_count(p.batch, 'sequence')} of {format_count(p.tokens, 'character')})"
    )
    if p.is_illustration:
        sentence = f"This is an illustration, not evidence: {size}. For evidence, run addnorm compare --full."
        return Finding("scope", sentence, "evidence needs at least three seeds and two learning rates")
    sentence = (
        f"{size}. Each wiring is judged at its best rate and warm-up, chosen on other text than the reported loss."
    )
    return Finding("scope", sentence, "")


def _ranks(results: Results) -> Iterator[Finding]:
    """Yield for each depth which wiring has the lowest loss, and with three or more seeds by how much."""
    for n, arms in results.by_depth():
        if len(arms) < 2:
            continue
        best = sorted(arms, key=lambda arm: arm.best.loss())
        first, numbers = best[0], {arm.wiring: arm.best.loss() for arm in best}
        losses = [f"{arm.wiring} {_loss(arm.best.loss())} ({_setting(arm.best)})" for arm in best]
        pairs = math.comb(len(arms), 2)  # not those with the lowest alone, which the results themselves select
        differences = [(arm, difference(arm.best, first.best, pairs)) for arm in best[1:]]
        worse = [arm.wiring for arm, gap in differences if gap.is_clear]
        unclear = [arm.wiring for arm, gap in differences if not gap.is_clear]
        if not math.isfinite(first.best.loss()):
            sentence = f"At {n} layers no wiring trained with every seed"
        elif first.best.loss() > results.text["entropy"] - LEARNED:
            sentence = f"At {n} layers no wiring learned more than how often each character occurs"
        elif not worse:
            sentence = f"At {n} layers there is no clear difference between {_listed([arm.wiring for arm in best])}"
        else:
            rest = f"; there is no clear difference between it and {_listed(unclear)}" if unclear else ""
            sentence = f"At {n} layers {first.wiring} has the lowest test loss, below {_listed(worse)}{rest}"
        criterion = differences[0][1].criterion
        yield Finding("loss", f"{sentence}: {', '.join(losses)}, in nats a character.", criterion, numbers)
        intervals = {arm.wiring: gap for arm, gap in differences if math.isfinite(gap.half_width)}
        if intervals:
            together = f", which hold together for all {pairs} pairs" if pairs > 1 else ""
            parts = [f"{name} {_signed(gap.mean)} ± {gap.half_width:.3f}" for name, gap in intervals.items()]
            seeds = f"with 95% intervals over {len(first.best.runs)} seeds{together}"
            sentence = f"Loss above that of {first.wiring} at {n} layers, {seeds}: {', '.join(parts)}."
            spans = {name: {"mean": gap.mean, "half_width": gap.half_width} for name, gap in intervals.items()}
            yield Finding("difference", sentence, criterion, spans)


def _warm_ups(results: Results) -> Iterator[Finding]:
    """Yield for each depth which wirings gain from warm-up."""
    for n, arms in results.by_depth():
        parts, numbers, criterion = [], {}, ""
        for arm in arms:
            without, with_it = arm.best_where(lambda g: not g.warm_up), arm.best_where(lambda g: g.warm_up > 0)
            if without is None or with_it is None:
                continue
            gain = difference(without, with_it, len(arms))
            numbers[arm.wiring], criterion = gain.mean, gain.criterion
            losses = f" ({_loss(without.loss())} without, {_loss(with_it.loss())} with)"
            if math.isnan(gain.mean):
                parts.append(f"{arm.wiring} diverges with and without it")
            elif not gain.is_clear:
                parts.append(f"{arm.wiring} shows no clear difference{losses}")
            elif gain.mean < 0:
                parts.append(f"{arm.wiring} is worse with it{losses}")
            else:
                parts.append(f"{arm.wiring} {'needs it' if math.isinf(gain.mean) else 'is better with it'}{losses}")
        if parts:
            yield Finding("warm-up", f"Warm-up at {n} layers: {_listed(parts)}.", criterion, numbers)


def _failures(results: Results) -> Iterator[Finding]:
    """Yield which runs diverged, and which learned nothing."""
    entropy = results.text["entropy"]
    for what, condition in (
        ("diverged", lambda run: run["diverged"]),
        ("learned nothing", lambda run: not run["diverged"] and run["test"] > entropy - LEARNED),
    ):
        failed: Callable[[Numbers], bool] = condition
        counts = {
            name: (sum(map(failed, runs)), len(runs))
            for name in results.compared
            if (runs := [run for run in results.runs if run["settings"]["wiring"] == name])
        }
        parts = [_runs(count, total, name) for name, (count, total) in counts.items() if count]
        if parts:
            note = (
                "" if what == "diverged"
                else f": the test loss is less than {LEARNED:g} nats below {entropy:.2f}, the entropy of single characters"
            )  # fmt: skip
            criterion = (
                f"diverged: the loss is not finite, or well above the first loss and {results.text['uniform']:.2f}, the loss "
                "of a uniform guess"
            )
            text = _listed(parts)
            yield Finding("failures", f"{text[0].upper()}{text[1:]} {what}{note}.", criterion if not note else "",
                          {name: count for name, (count, _) in counts.items()})  # fmt: skip


def _edges(results: Results) -> Iterator[Finding]:
    """Yield where the grid of learning rates was too narrow."""
    parts = [
        f"{arm.wiring} at {arm.num_layers} layers ({format_factor(arm.best.lr)})"
        for arm in results.arms
        if arm.at_the_edge
    ]
    if parts:
        sentence = (
            f"The best rate is at the edge of the grid for {_listed(parts)}: a better rate may lie outside the grid."
        )
        yield Finding("grid", sentence, "")


def _gradients(results: Results) -> Iterator[Finding]:
    """Yield the ratio of the gradients at x_0 and at x_L, before and after training."""
    for n, arms in results.by_depth():
        parts, numbers = [], {}
        for arm in arms:
            group = arm.best_where(lambda g: not g.warm_up) or arm.best
            start = group.mean(lambda run: gradient_ratio(_first_step(run)))
            end = group.mean(lambda run: gradient_ratio(run.get("after")))
            if math.isnan(start):
                continue
            numbers[arm.wiring] = {"before": start, "after": end, "warm_up": group.warm_up}
            after = "" if math.isnan(end) else f" and {_ratio(end)} after"
            parts.append(f"{arm.wiring} {_ratio(start)} before training{after}")
        if parts:
            note = "" if any(ratios["warm_up"] for ratios in numbers.values()) else " (without warm-up)"
            sentence = f"The gradient at x_0 divided by the gradient at x_L, {n} layers: {', '.join(parts)}{note}."
            yield Finding("gradient", sentence, "mean norm of a token's gradient, mean over the seeds", numbers)


def _shares(results: Results) -> Iterator[Finding]:
    """Yield the shares of x_0 and of the last write in the final stream."""
    for n, arms in results.by_depth():
        parts, numbers = [], {}
        for arm in arms:
            x_0 = arm.best.mean(lambda run: share_of(run.get("after"), 0))
            last = arm.best.mean(lambda run: share_of(run.get("after"), -1))
            if math.isfinite(x_0) and math.isfinite(last):
                numbers[arm.wiring] = {"x_0": x_0, "last": last}
                parts.append(f"in {arm.wiring} {_percent(x_0)} is from x_0 and {_percent(last)} from the last write")
        if parts:
            sentence = f"Of the stream after {n} trained layers, {', '.join(parts)}."
            yield Finding("memory", sentence, "shares <c, x> / |x|^2, which sum to one", numbers)


def _ablations(results: Results) -> Iterator[Finding]:
    """Yield the change of the loss without one sublayer."""
    for n, arms in results.by_depth():
        parts, numbers = [], {}
        for arm in arms:
            rises = [
                rise
                for run in arm.best.runs
                for ablation in run.get("ablation", ())
                if math.isfinite(rise := ablation["rise"])
            ]
            if rises:
                median, largest = statistics.median(rises), max(rises)
                numbers[arm.wiring] = {"median": median, "largest": largest}
                parts.append(f"{arm.wiring} median {_signed(median)}, largest {_signed(largest)}")
        if parts:
            sentence = f"Change of the loss without one sublayer, {n} trained layers, in nats: {'; '.join(parts)}."
            yield Finding("ablation", sentence, "the write of each sublayer is removed in turn", numbers)


def _costs(results: Results) -> Iterator[Finding]:
    """Yield what the residual wirings cost, if one with several streams is compared."""
    for n, arms in results.by_depth():
        costs = {arm.wiring: arm.best.runs[0].get("cost") for arm in arms}
        known = {name: cost for name, cost in costs.items() if cost}
        if len({cost["elements"] for cost in known.values()}) > 1:
            parts = [
                f"{name} {cost['parameters']:,} parameters, {cost['flops']:,} FLOPs and {4 * cost['elements']:,} bytes a token"
                for name, cost in known.items()
            ]
            sentence = f"Cost of the residual wiring without the sublayers, {n} layers: {'; '.join(parts)}."
            yield Finding("cost", sentence, "counted, not timed; bytes in float32, the fewest that must move", known)


def _mixing(results: Results) -> Iterator[Finding]:
    """Yield the gains of the products of trained mixing matrices."""
    yield from _of_streams(
        results, "gain", "Largest gain of the streams' mixing from the first to the last sublayer", "1 is no amplification",
        lambda coefficients: coefficients["gains"] and _total_gain(coefficients["gains"]),
    )  # fmt: skip


def _total_gain(gains: Numbers) -> float:
    return float(max(gains["forward"][-1], gains["backward"][0]))


def _sources(results: Results) -> Iterator[Finding]:
    """Yield the direct path: the factor with which x_0 reaches the last read."""
    yield from _of_streams(
        results, "direct path", "Factor with which x_0 reaches the last read", "1 in pre-LN; coefficients as they were",
        lambda coefficients: coefficients["direct_path"][0],
    )  # fmt: skip


def _of_streams(
    results: Results, name: str, what: str, rule: str, measure: Callable[[Numbers], float | None]
) -> Iterator[Finding]:
    """Yield a number of the trained coefficients of wirings with several streams, the mean over the seeds."""
    for n, arms in results.by_depth():
        numbers = {}
        for arm in arms:
            measured = [
                run["after"]["streams"]["coefficients"]
                for run in arm.best.runs
                if "streams" in (run.get("after") or {})
            ]
            values = [value for value in map(measure, measured) if value is not None]
            if values:
                numbers[arm.wiring] = statistics.fmean(values)
        if numbers:
            parts = [f"{wiring} {_ratio(value)}" for wiring, value in numbers.items()]
            yield Finding(name, f"{what}, {n} trained layers: {', '.join(parts)}.", rule, numbers)


def _published(results: Results) -> Iterator[Finding]:
    """Yield how many published results on untrained stacks hold."""
    checks = [check for check in results.checks if check.holds is not None] if results.stacks else []
    if checks:
        failed = [check.name for check in checks if not check.holds]
        rest = f"; not: {_listed(failed)}" if failed else ""
        num_met = len(checks) - len(failed)
        sentence = f"Untrained stacks: {num_met} of {len(checks)} published results hold{rest}."
        yield Finding("at init", sentence, "each number lies in its band", {"met": num_met, "of": len(checks)})


RULES = (
    _ranks, _warm_ups, _failures, _edges, _gradients, _shares, _ablations, _costs, _mixing, _sources, describe_untrained,
    _published,
)  # fmt: skip


def _first_step(run: Numbers) -> Numbers | None:
    """Return the gradient by depth at the first recorded step."""
    recorded = run["recorded"]
    return {"gradient": recorded["gradient"][0]} if recorded["steps"] else None


def gradient_ratio(by_depth: Numbers | None) -> float | None:
    """Return the gradient at x_0 divided by the gradient at x_L."""
    values = [] if by_depth is None else [x for x in by_depth["gradient"] if x is not None]
    return values[0] / values[-1] if len(values) > 1 and values[-1] else None


def share_of(by_depth: Numbers | None, source: int) -> float | None:
    """Return the share of a source in the last state: 0 is x_0, -1 the last sublayer."""
    if by_depth is None or not by_depth.get("map"):
        return None
    sources = [k for k, name in enumerate(by_depth["map"]["sources"]) if name != "norm biases"]
    value: float = by_depth["map"]["shares"][-1][sources[source]]
    return value


def _setting(group: Group) -> str:
    return f"rate {format_factor(group.lr)}, {'warm-up' if group.warm_up else 'no warm-up'}"


def _loss(value: float, diverged: str = "diverged") -> str:
    return f"{value:.3f}" if math.isfinite(value) else diverged


def _runs(count: int, total: int, name: str) -> str:
    if count == total:
        return f"the run of {name}" if total == 1 else f"all {total} runs of {name}"
    return f"{count} of {total} runs of {name}"


def _signed(value: float) -> str:
    return f"{round(value, 3) + 0.0:+.3f}"  # + 0.0: no -0


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%" if abs(value) >= 0.095 else f"{100 * value:.1f}%" if abs(value) >= 0.0005 else "0%"


def _ratio(value: float) -> str:
    return f"{value:.0f}" if 100 <= value < 1e4 else f"{value:.2g}" if 1e-4 <= value < 100 else f"{value:.0e}"


def _listed(texts: list[Any]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
