"""The verdict of a comparison: findings that follow from the numbers, each with its criterion.

A finding names a difference of losses only if it is more than chance: with three or more seeds by t-tests of the paired
differences, at 5% for all differences of a sentence, with fewer by a margin that two seeds of one setting rarely exceed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from addnorm._util.blocks import VERDICTS, Finding
from addnorm._util.numbers import format_count, format_number, format_percent, join_words
from addnorm.lab.results import Arm, Group, Results, difference
from addnorm.lab.streams import Numbers, largest_gain
from addnorm.wirings.factors import format_factor

LEARNED = 0.1  # nats below the loss of the character frequencies: a model with less has learned nothing


def _note(topic: str, claim: str, criterion: str = "", numbers: Numbers | None = None) -> Finding:
    """Return a finding that states numbers."""
    return Finding(claim, criterion=criterion, numbers=numbers or {}, topic=topic)


def find_verdict(results: Results) -> list[Finding]:
    """Return the findings about a comparison, the most important first."""
    return [finding for rule in RULES for finding in rule(results)]


def _scope(results: Results) -> Iterator[Finding]:
    """Yield the size of the comparison, and whether it is evidence or an illustration."""
    p, n = results.protocol, len(results.runs)
    if not n:
        yield _note("scope", "Only untrained stacks were measured. Nothing here shows how a wiring trains.")
        return
    counts = [format_count(len(values), name) for name, values in
              (("depth", p.num_layers), ("learning rate", p.rates), ("seed", p.seeds))]  # fmt: skip
    size = (
        f"{format_count(n, 'run')} of {format_count(p.steps, 'step')} ({', '.join(counts)}; d_model = {p.d_model}, "
        f"{format_count(p.batch, 'sequence')} of {format_count(p.tokens, 'character')})"
    )
    if p.is_illustration:
        claim = f"This is an illustration, not evidence: {size}. For evidence, run addnorm compare --full."
        yield _note("scope", claim, "evidence needs at least three seeds and two learning rates")
    else:
        claim = (
            f"{size}. Each wiring is judged at its best rate and warm-up, chosen on other text than the reported loss."
        )
        yield _note("scope", claim)


def _ranks(results: Results) -> Iterator[Finding]:
    """Yield for each depth which wiring has the lowest loss, and with three or more seeds by how much."""
    for n, arms in results.by_depth.items():
        if len(arms) < 2:
            continue
        best = sorted(arms, key=lambda arm: arm.best.loss())
        first, numbers = best[0], {arm.wiring: arm.best.loss() for arm in best}
        losses = [f"{arm.wiring} {_loss(arm.best.loss())} ({_setting(arm.best)})" for arm in best]
        pairs = math.comb(len(arms), 2)  # all pairs, since only the results tell which wiring has the lowest loss
        differences = {arm.wiring: difference(arm.best, first.best, pairs) for arm in best[1:]}
        worse = [name for name, gap in differences.items() if gap.is_clear]
        unclear = [name for name, gap in differences.items() if not gap.is_clear]
        if not math.isfinite(first.best.loss()):
            claim = "no wiring trained with every seed"
        elif first.best.loss() > results.text["entropy"] - LEARNED:
            claim = "no wiring learned more than how often each character occurs"
        elif not worse:
            claim = f"there is no clear difference between {join_words([*numbers])}"
        else:
            rest = f"; there is no clear difference between it and {join_words(unclear)}" if unclear else ""
            claim = f"{first.wiring} has the lowest test loss, below {join_words(worse)}{rest}"
        criterion = next(iter(differences.values())).criterion
        claim = f"At {format_count(n, 'layer')} {claim}: {', '.join(losses)}, in nats a character."
        yield _note("loss", claim, criterion, numbers)
        intervals = {name: gap for name, gap in differences.items() if math.isfinite(gap.half_width)}
        if intervals:
            together = f", which hold together for all {pairs} pairs" if pairs > 1 else ""
            parts = [f"{name} {_signed(gap.mean)} ± {gap.half_width:.3f}" for name, gap in intervals.items()]
            seeds = f"with 95% intervals over {len(first.best.runs)} seeds{together}"
            claim = f"Loss above that of {first.wiring} at {format_count(n, 'layer')}, {seeds}: {', '.join(parts)}."
            spans = {name: {"mean": gap.mean, "half_width": gap.half_width} for name, gap in intervals.items()}
            yield _note("difference", claim, criterion, spans)


def _warm_ups(results: Results) -> Iterator[Finding]:
    """Yield for each depth which wirings gain from warm-up."""
    for n, arms in results.by_depth.items():
        parts, numbers, criterion = [], {}, ""
        for arm in arms:
            without, with_it = arm.best_with(False), arm.best_with(True)
            if without is None or with_it is None:
                continue
            gain = difference(without, with_it, len(arms))
            numbers[arm.wiring], criterion = gain.mean, gain.criterion
            losses = f" ({_loss(without.loss())} without, {_loss(with_it.loss())} with)"
            if math.isnan(gain.mean):
                how, losses = "diverges with and without it", ""
            elif not gain.is_clear:
                how = "shows no clear difference"
            elif gain.mean < 0:
                how = "is worse with it"
            else:
                how = "needs it" if math.isinf(gain.mean) else "is better with it"
            parts.append(f"{arm.wiring} {how}{losses}")
        if parts:
            claim = f"Warm-up at {format_count(n, 'layer')}: {join_words(parts)}."
            yield _note("warm-up", claim, criterion, numbers)


def _failures(results: Results) -> Iterator[Finding]:
    """Yield which runs diverged, and which learned nothing."""
    entropy = results.text["entropy"]
    uniform = f"{results.text['uniform']:.2f}, the loss of a uniform guess"
    limit = f"{entropy - LEARNED:.2f}, the loss of the character frequencies ({entropy:.2f}) less {LEARNED:g}"
    rules: tuple[Any, ...] = (
        (
            "diverged",
            f"diverged: the loss is not finite, or well above the first loss and {uniform}",
            lambda run: run["diverged"],
        ),
        (
            f"learned nothing: the test loss is above {limit}",
            "",
            lambda run: not run["diverged"] and run["test"] > entropy - LEARNED,
        ),
    )
    for what, criterion, failed in rules:
        parts, numbers = [], {}
        for name in results.compared:
            runs = [failed(run) for run in results.runs if run["settings"]["wiring"] == name]
            if runs:
                count = numbers[name] = sum(runs)
                parts += [f"{count} of {format_count(len(runs), 'run')} of {name}"] if count else []
        if parts:
            yield _note("failures", f"{join_words(parts)} {what}.", criterion, numbers)


def _edges(results: Results) -> Iterator[Finding]:
    """Yield the wirings whose best learning rate is at the edge of the grid of rates."""
    edges = [
        f"{arm.wiring} at {format_count(arm.num_layers, 'layer')} ({format_factor(arm.best.lr)})"
        for arm in results.arms
        if arm.at_the_edge
    ]
    if edges:
        claim = (
            f"The best rate is at the edge of the grid for {join_words(edges)}: a better rate may lie outside the grid."
        )
        yield _note("grid", claim)


class _WiringRule(NamedTuple):
    """Rule whose finding at each depth states numbers of every wiring.

    Attributes:
        topic, criterion: those of the findings.
        claim: the sentence, with `{layers}` or `{trained}` for the number of (trained) layers, `{texts}` for the wirings with
            their texts, and `{note}`.
        measure: function of a wiring at a depth that returns a text and numbers, or None to skip the wiring.
        separator: text between two wirings.
        note: function of the numbers by wiring that returns an addition to the sentence, or None for no finding.
    """

    topic: str
    criterion: str
    claim: str
    measure: Callable[[Arm], tuple[str, Any] | None]
    separator: str = ", "
    note: Callable[[Numbers], str | None] = lambda numbers: ""


def _by_wiring(results: Results) -> Iterator[Finding]:
    """Yield the findings of `WIRING_RULES`, for each rule by depth."""
    for rule, (n, arms) in itertools.product(WIRING_RULES, results.by_depth.items()):
        measured = {arm.wiring: one for arm in arms if (one := rule.measure(arm)) is not None}
        texts = rule.separator.join(f"{name} {text}" for name, (text, _) in measured.items())
        numbers = {name: one for name, (_, one) in measured.items()}
        if measured and (note := rule.note(numbers)) is not None:
            layers, trained = format_count(n, "layer"), format_count(n, "trained layer")
            claim = rule.claim.format(layers=layers, trained=trained, texts=texts, note=note)
            yield _note(rule.topic, claim, rule.criterion, numbers)


def _gradients(arm: Arm) -> tuple[str, Numbers] | None:
    """Return the ratio of the gradients at x_0 and at x_L, before and after training."""
    group = arm.best_with(False) or arm.best
    start = group.mean(lambda run: gradient_ratio(next(iter(run["recorded"]["gradient"]), ())))
    end = group.mean(lambda run: gradient_ratio((run.get("after") or {}).get("gradient", ())))
    after = "" if math.isnan(end) else f" and {_ratio(end)} after"
    numbers = {"before": start, "after": end, "warm_up": group.warm_up}
    return None if math.isnan(start) else (f"{_ratio(start)} before training{after}", numbers)


def _shares(arm: Arm) -> tuple[str, Numbers] | None:
    """Return the shares of x_0 and of the last write in the final stream."""
    x_0 = arm.best.mean(lambda run: share_of(run.get("after"), 0))
    last = arm.best.mean(lambda run: share_of(run.get("after"), -1))
    if not (math.isfinite(x_0) and math.isfinite(last)):
        return None
    return (
        f"{format_percent(x_0, 2, trim=True)} is from x_0 and {format_percent(last, 2, trim=True)} from the last write",
        {"x_0": x_0, "last": last},
    )


def _ablations(arm: Arm) -> tuple[str, Numbers] | None:
    """Return the median and the largest change of the loss without one sublayer."""
    rises = [one["rise"] for run in arm.best.runs for one in run.get("ablation", ()) if math.isfinite(one["rise"])]
    if not rises:
        return None
    median, largest = statistics.median(rises), max(rises)
    return f"median {_signed(median)}, largest {_signed(largest)}", {"median": median, "largest": largest}


def _costs(arm: Arm) -> tuple[str, Numbers] | None:
    """Return the cost of the residual wiring."""
    cost = arm.best.runs[0].get("cost")
    text = "{parameters:,} parameters, {flops:,} FLOPs and {bytes:,} bytes a token"
    return (text.format(**cost, bytes=4 * cost["elements"]), cost) if cost else None


def _streams(of: Callable[[Numbers], float | None]) -> Callable[[Arm], tuple[str, float] | None]:
    """Return a function that measures an `Arm`: the mean of `of(trained coefficients)` over its runs, as text and number."""

    def measure(arm: Arm) -> tuple[str, float] | None:
        streams = [run["after"]["streams"] for run in arm.best.runs if "streams" in (run.get("after") or {})]
        values = [value for one in streams if (value := of(one["coefficients"])) is not None]
        return (_ratio(mean := statistics.fmean(values)), mean) if values else None

    return measure


WIRING_RULES = (
    _WiringRule(
        "gradient", "mean norm of a token's gradient, mean over the seeds",
        "The gradient at x_0 divided by the gradient at x_L, {layers}: {texts}{note}.", _gradients,
        note=lambda numbers: "" if any(ratios["warm_up"] for ratios in numbers.values()) else " (without warm-up)",
    ),
    _WiringRule(
        "memory", "shares <c, x> / |x|^2, which sum to one", "Of the stream after {trained}, in {texts}.", _shares,
        ", in ",
    ),
    _WiringRule(
        "ablation", "the write of each sublayer is removed in turn",
        "Change of the loss without one sublayer, {trained}, in nats: {texts}.", _ablations, "; ",
    ),
    _WiringRule(
        "cost", "counted, not timed; bytes in float32, the fewest that must move",
        "Cost of the residual wiring without the sublayers, {layers}: {texts}.", _costs, "; ",
        lambda numbers: None if len({cost["elements"] for cost in numbers.values()}) == 1 else "",
    ),
    _WiringRule(
        "gain", "1 is no amplification",
        "Largest gain of the streams' mixing from the first to the last sublayer, {trained}: {texts}.",
        _streams(lambda coefficients: largest_gain(coefficients["gains"])),
    ),
    _WiringRule(
        "direct path", "1 in pre-LN; coefficients as they were",
        "Factor with which x_0 reaches the last read, {trained}: {texts}.",
        _streams(lambda coefficients: coefficients["direct_path"][0]),
    ),
)  # fmt: skip


def _untrained(results: Results) -> Iterator[Finding]:
    """Yield the numbers of the deepest untrained stack of each compared wiring, if nothing was trained."""
    deepest = {row["wiring"]: row for row in sorted(results.untrained, key=lambda row: row["num_layers"])}
    for name in results.compared if results.stacks and not results.runs else ():
        if name not in deepest:
            claim = f"Untrained stacks of {name} are not measured: the toy model has none of their kind."
            yield _note("untrained", claim)
            continue
        numbers = summarize_stack(deepest[name])
        text = {key: format_number(value, 3, trim=True) for key, value in numbers.items() if value is not None}
        claim = f"Untrained {name}, {format_count(deepest[name]['num_layers'], 'layer')}: "
        if "growth" in numbers:
            similar = f"two tokens of x_L have a mean cosine of {text['similarity']}"
            claim += (
                f"from x_0 to x_L the root mean square of the stream changes by a factor of {text['growth']}; the gradient at "
                f"x_0 is {text['gradient_ratio']} times that at x_L; {similar}."
            )
        else:
            gain = (
                f"; with random coefficients the streams' mixing has a gain of {text['gain']}" if "gain" in text else ""
            )
            claim += (
                f"the largest read is {text['read']} times x_0, in pre_ln {text['pre_read']} times; the output differs from that "
                f"of pre_ln by {text['difference']} of its norm{gain}."
            )
        criterion = "the toy model of the published results, mean over the seeds"
        yield _note("untrained", claim, criterion, numbers)


def _published(results: Results) -> Iterator[Finding]:
    """Yield how many published results on untrained stacks hold."""
    checks = [check for check in results.checks if check.holds is not None] if results.stacks else []
    if checks:
        failed = [check.name for check in checks if not check.holds]
        met = len(checks) - len(failed)
        rest = f"; not: {join_words(failed)}" if failed else ""
        claim = f"Untrained stacks: {met} of {len(checks)} published results hold{rest}."
        verdict = VERDICTS[False if failed else None]
        yield Finding(claim, verdict, "each number lies in its band", {"met": met, "of": len(checks)}, "at init")


RULES = (_scope, _ranks, _warm_ups, _failures, _edges, _by_wiring, _untrained, _published)


def summarize_stack(row: Numbers) -> Numbers:
    """Return numbers of a whole untrained stack: growth, gradient and similarity of one stream, or the reads of several."""
    if "variance" in row:
        growth = math.sqrt(row["variance"][-1] / row["variance"][0])
        return {"growth": growth, "gradient_ratio": row["gradient_ratio"], "similarity": row["similarity"][-1]}
    largest = {name: max(row[name]) for name in ("read", "pre_read")}
    return {**largest, "difference": row["difference"], "gain": row.get("gain")}


def gradient_ratio(by_depth: Iterable[float | None]) -> float | None:
    """Return the gradient's norm at x_0 divided by its norm at x_L, or None if one of them is missing."""
    values = [x for x in by_depth if x is not None]
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


def _loss(value: float) -> str:
    """Return a loss with three decimals, or "diverged" if it is not finite."""
    return f"{value:.3f}" if math.isfinite(value) else "diverged"


def _signed(value: float) -> str:
    return f"{round(value, 3) + 0.0:+.3f}"  # + 0.0: no -0


def _ratio(value: float) -> str:
    return format_number(value, 2, trim=True)
