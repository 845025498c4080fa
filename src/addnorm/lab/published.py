"""What the papers say of a wiring before training, each a number that must lie in a band: `CHECKS`, as data.

`checks(summary(found))` (`addnorm.lab.theory`) computes every verdict from what was measured; where the wirings or depths that it
needs are not there, it is "not measured". NaN and infinity lie in no band. The bands allow for the chance of 8 seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from addnorm.lab.toy_model import r_squared, slope
from addnorm.wirings.catalog import deepnorm_constants

__all__ = ["CHECKS", "Check", "Expected", "Rows", "checks"]

Measured = dict[str, float]

XIONG = "Xiong et al. 2020, arXiv 2002.04745"
DEEPNET = "Wang et al. 2022 (DeepNet), arXiv 2203.00555"

DEEP = 32  # layers from which on the shape of a curve over the layers is judged: below, any curve looks straight
STEPPED = 16  # layers from which on the first steps are compared: below, the wirings differ little
MIXED = 12  # layers within which the tokens become alike without the residual


class Rows:
    """What was measured, by wiring and depth."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.at = {(row["wiring"], row["num_layers"]): row for row in rows}

    def depths(self, *wirings: str, least: int = 1) -> list[int]:
        """Those at which all these wirings were measured, from the shallowest."""
        found = (n for name, n in self.at if name == wirings[0] and n >= least)
        return sorted(n for n in found if all((name, n) in self.at for name in wirings))

    def deepest(self, wiring: str, least: int = 1) -> dict[str, Any] | None:
        """The row of the greatest depth; None if it is below `least` layers, or not there."""
        found = self.depths(wiring, least=least)
        return self.at[wiring, found[-1]] if found else None


@dataclass(frozen=True)
class Check:
    """A published figure beside what was measured."""

    name: str
    source: str
    criterion: str
    why: str
    band: tuple[float, float]
    measured: Measured

    @property
    def holds(self) -> bool | None:
        """Whether every number is finite and lies in the band, ends included; None if there is none."""
        if not self.measured:
            return None
        low, high = self.band
        return all(math.isfinite(value) and low <= value <= high for value in self.measured.values())

    @property
    def verdict(self) -> str:
        """In words."""
        return {True: "holds", False: "does not hold", None: "not measured"}[self.holds]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; an end of the band that is open is None."""
        low, high = (end if math.isfinite(end) else None for end in self.band)
        return {
            "name": self.name, "source": self.source, "criterion": self.criterion, "why": self.why, "band": [low, high],
            "measured": dict(self.measured), "holds": self.holds, "verdict": self.verdict,
        }  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """A published figure.

    Args:
        name: what is said.
        source: who says so.
        criterion: what is measured, and where it must lie.
        why: the band is so wide.
        band: the ends; both belong to it.
        measure: the numbers, each named by what it is of; none, if what they need was not measured.
    """

    name: str
    source: str
    criterion: str
    why: str
    band: tuple[float, float]
    measure: Callable[[Rows], Measured]

    def check(self, rows: Rows) -> Check:
        """It, beside what was measured."""
        return Check(self.name, self.source, self.criterion, self.why, self.band, self.measure(rows))


def checks(rows: Iterable[dict[str, Any]]) -> list[Check]:
    """Every published figure beside what a `summary` says."""
    found = Rows(rows)
    return [expected.check(found) for expected in CHECKS]


# ----------------------------------------------------------------------------------------------- what is looked at


def layers(wiring: str, least: int, measure: Callable[[dict[str, Any]], Measured]) -> Callable[[Rows], Measured]:
    """Numbers of the deepest stack of a wiring, if it has so many layers."""

    def measured(rows: Rows) -> Measured:
        row = rows.deepest(wiring, least)
        return {} if row is None else {f"{name}, {row['num_layers']} layers": x for name, x in measure(row).items()}

    return measured


def extremes(values: Iterable[float]) -> Measured:
    """The least and the greatest: all are in a band if these are."""
    found = list(values)
    if any(map(math.isnan, found)):  # min and max would pass over it, or not
        return {"not a number": math.nan}
    return {"least": min(found), "greatest": max(found)}


def by_layer(row: dict[str, Any], key: str) -> list[float]:
    """The values after whole layers, x_0 first."""
    values: list[float] = row[key][::2]
    return values


def growth_rate(row: dict[str, Any]) -> Measured:
    """(E|x_l|^2 - E|x_0|^2) / (d l): what a layer adds, on average up to l."""
    start, *after = by_layer(row, "variance")
    return extremes((value - start) / layer for layer, value in enumerate(after, start=1))


def last_gradients(wiring: str) -> Callable[[Rows], Measured]:
    """The exponent of the last layer's gradient over the depth; of three depths at least."""

    def measured(rows: Rows) -> Measured:
        depths = rows.depths(wiring)
        if len(depths) < 3:
            return {}
        gradients = [rows.at[wiring, n]["weight_gradient"][-1] for n in depths]
        return {f"exponent, {depths[0]} to {depths[-1]} layers": exponent(depths, gradients)}

    return measured


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """`slope`; NaN where a logarithm is none."""
    return slope(x, y) if all(0 < value < math.inf for value in y) else math.nan


def straightness(x: Sequence[float], y: Sequence[float]) -> float:
    """`r_squared`; NaN of what is constant or not finite."""
    return r_squared(x, y) if all(map(math.isfinite, y)) and min(y) < max(y) else math.nan


def numbers(row: dict[str, Any]) -> range:
    """The layers, from 1."""
    return range(1, row["num_layers"] + 1)


def first_steps(below: str, above: str) -> Callable[[Rows], Measured]:
    """By how much the first step of one wiring is smaller, at every depth at which both were measured."""
    return lambda rows: {
        f"{below} over {above}, {n} layers, {name}": divided(rows.at[below, n][key], rows.at[above, n][key])
        for n in rows.depths(below, above, least=STEPPED)
        for name, key in (("SGD", "step_sgd"), ("Adam", "step_adam"))
    }


def divided(x: float, y: float) -> float:
    """x / y; NaN where there is no such number."""
    return x / y if y and math.isfinite(x) else math.nan


def moves(rows: Rows) -> Measured:
    """2l times 1 - cosine of the last step, at every depth."""
    return {f"{n} layers": 2 * n * rows.at["pre_ln", n]["last_move"] for n in rows.depths("pre_ln", least=6)}


def published_constants(rows: Rows) -> Measured:
    """By how many units of the last printed digit the library's constants differ; no stack is needed."""
    found: Measured = {}
    for n, (alpha, beta) in {18: (2.449, 0.2887), 100: (3.761, 0.1880), 200: (4.472, 0.1581)}.items():
        ours = deepnorm_constants("encoder-only", n)
        found |= {f"alpha, {n} layers": (ours[0] - alpha) / 1e-3, f"beta, {n} layers": (ours[1] - beta) / 1e-4}
    return found


def writes_of_norm_one(rows: Rows) -> Measured:
    """The variance at every layer of the deepest stacks over 1 + 2l."""
    found: Measured = {}
    for wiring in ("sandwich", "peri_ln"):
        row = rows.deepest(wiring)
        if row is not None:
            over = [value / (1 + 2 * layer) for layer, value in enumerate(by_layer(row, "variance"))]
            found |= {f"{wiring}, {name}, {row['num_layers']} layers": x for name, x in extremes(over).items()}
    return found


def alike(row: dict[str, Any]) -> Measured:
    """The likeness of the tokens after the last of the first layers."""
    layer = min(MIXED, row["num_layers"])
    return {f"after layer {layer}": by_layer(row, "likeness")[layer]}


def exponential(row: dict[str, Any]) -> Measured:
    """The slope of ln E|x_l|^2 over l."""
    values = by_layer(row, "variance")
    if not all(0 < value < math.inf for value in values):
        return {"not a number": math.nan}
    line = statistics.linear_regression(range(len(values)), [math.log(value) for value in values])
    return {"slope": line.slope}


def ends(row: dict[str, Any]) -> tuple[float, float]:
    """The gradients of the first and of the last layer's W_2."""
    return row["weight_gradient"][0], row["weight_gradient"][-1]


# ------------------------------------------------------------------------------------------------------ the figures

CHECKS: tuple[Expected, ...] = (
    Expected(
        "The stream of pre-LN grows linearly with the layer.", f"{XIONG}, lemma 2",
        "what a layer adds to E|x|^2 / d, on average up to each layer l of the deepest stack: 1/2 to 3/2; with chance, "
        "0.45 to 1.75",
        "1/2 is the feed-forward block's, relu halves; attention adds 1 if the tokens are alike, and nothing if they are "
        "independent. From seed to seed it scatters by 0.05 at first, where it is 0.53 (each token is one of the 32), and by "
        "0.25 after 64 layers, where it nears 3/2: the mean of 8 by 0.02 and 0.09. Peri-LN's is 2.",
        (0.45, 1.75), layers("pre_ln", 1, growth_rate),
    ),
    Expected(
        "And it is a straight line.", f"{XIONG}, lemma 2",
        f"R^2 of a line over l, of {DEEP} layers or more: 0.98 at least",
        "a logarithm has 0.8 over 64 layers, an exponential less than 0.5.",
        (0.98, 1.0), layers("pre_ln", DEEP, lambda row: {"R^2": straightness(numbers(row), by_layer(row, "variance")[1:])}),
    ),
    Expected(
        "What enters the norm after post-LN's feed-forward block has variance 3/2.", f"{XIONG}, lemma 2",
        "E|x + f(x)|^2 / d there, the mean over the layers of the deepest stack: 1.4 to 1.6",
        "1 from the norm before, 1/2 from relu(x W_1) W_2; the product x f(x) is zero only in the mean over weights.",
        (1.4, 1.6), layers("post_ln", 1, lambda row: {"mean": statistics.fmean(row["before_norm"][1::2])}),
    ),
    Expected(
        "The stream of post-LN stays at variance 1.", f"{XIONG}, section 3",
        "E|x|^2 / d after each sublayer of the deepest stack: 1 to a thousandth",
        "exact, but for the norm's epsilon (1e-5) and rounding.",
        (0.999, 1.001), layers("post_ln", 1, lambda row: extremes(row["variance"][1:])),
    ),
    Expected(
        "The last layer's gradient does not depend on the depth in post-LN.", f"{XIONG}, theorem 1",
        "the exponent of |dLoss/dW_2| of the last layer over L: -0.12 to 0.12",
        "0 in theory, of one token's loss; the mean over 32 tokens adds 0.06, since the gradients of tokens that become alike "
        "cancel less, and chance 0.02. Pre-LN has -0.5.",
        (-0.12, 0.12), last_gradients("post_ln"),
    ),
    Expected(
        "It falls like the root of the depth in pre-LN.", f"{XIONG}, theorem 1",
        "the exponent of |dLoss/dW_2| of the last layer over L: -0.6 to -0.4",
        "-1/2 in theory, for large L; 0.02 is chance.",
        (-0.6, -0.4), last_gradients("pre_ln"),
    ),
    Expected(
        "Pre-LN's first layers get more gradient, like 1/sqrt(l).", f"follows from {XIONG}, lemma 2",
        f"the exponent of |dLoss/dW_2| over l in the deepest stack, of {DEEP} layers or more: -0.65 to -0.4",
        "a layer multiplies E|g|^2 by 1 + k / E|x|^2 and adds k to E|x|^2, k the same: together l.",
        (-0.65, -0.4),
        layers("pre_ln", DEEP, lambda row: {"exponent": exponent(numbers(row), row["weight_gradient"])}),
    ),
    Expected(
        "Before training post-LN's gradient neither vanishes nor explodes.", f"follows from {XIONG}, lemma 2",
        "|dLoss/dW_2| of the last layer over that of the first, in the deepest stack: 1/5 to 5",
        "a layer multiplies E|g|^2 by 3/2 and its norm by 2/3; a factor of 5 over 64 layers is 1.3 % a norm.",
        (0.2, 5.0), layers("post_ln", 1, lambda row: {"last over first": divided(*reversed(ends(row)))}),
    ),
    Expected(
        "The first step moves DeepNorm less than pre-LN.", f"{DEEPNET}, section 3",
        f"|logits' - logits| / |logits| of one over the other, each depth from {STEPPED} layers: 1 at most",
        "an order, without a size: it is about a half.",
        (0.0, 1.0), first_steps("deepnorm", "pre_ln"),
    ),
    Expected(
        "The first step moves pre-LN less than post-LN.", f"{XIONG}, section 3; {DEEPNET}, section 3",
        f"|logits' - logits| / |logits| of one over the other, each depth from {STEPPED} layers: 1 at most",
        "an order, without a size: it is about a third.",
        (0.0, 1.0), first_steps("pre_ln", "post_ln"),
    ),
    Expected(
        "DeepNorm's gradient is even over the layers.", DEEPNET,
        "|dLoss/dW_2| of the first layer over that of the last, in the deepest stack: 0.8 to 1.25",
        "1 in theory; with beta inverted, a mistake that baselines were run with, it is 1/5 at 64 layers.",
        (0.8, 1.25), layers("deepnorm", 1, lambda row: {"first over last": divided(*ends(row))}),
    ),
    Expected(
        "DeepNorm's constants are (2N)^(1/4) and (8N)^(-1/4).", DEEPNET,
        "this library's, less those published, in units of the last digit: -0.5 to 0.5",
        "the published ones are rounded.",
        (-0.5, 0.5), published_constants,
    ),
    Expected(
        "Under LayerNorm scaling the stream grows like the logarithm.", "Sun et al. 2025, arXiv 2502.05795",
        f"R^2 of a line over ln l, of {DEEP} layers or more: 0.95 at least",
        "over ln l and 64 layers, l has 0.82 and sqrt(l) 0.93; the mean of many seeds has 0.99, and one of 8 is less by 0.01 to "
        "chance. At init; the paper bounds the growth by a polynomial.",
        (0.95, 1.0),
        layers("layernorm_scaling", DEEP, lambda row: {
            "R^2": straightness([math.log(layer) for layer in numbers(row)], by_layer(row, "variance")[1:]),
        }),
    ),
    Expected(
        "With a norm after the sublayer, each write has variance one.", "Kim et al. 2025, arXiv 2502.02732",
        "E|x|^2 / d over 1 + 2l, at each layer of the deepest stack: 0.8 at least",
        "1 if writes are independent, more as they become alike; a write's product with the stream is zero only in the mean.",
        (0.8, math.inf), writes_of_norm_one,
    ),
    Expected(
        "Pre-LN's last layers change the stream less and less, like 1/(2l).", f"follows from {XIONG}, lemma 2",
        "2l (1 - cosine) of the stream before and after the last layer, each depth from 6: 2/3 to 3/2",
        "1 - cosine = (write / stream)^2 / 2 = k / (2 k l), for a write orthogonal to the stream.",
        (1 / 1.5, 1.5), moves,
    ),
    Expected(
        "Without the residual the tokens become alike.", "Dong et al. 2021, arXiv 2103.03404",
        f"the mean cosine of two tokens, after {MIXED} layers at most: 0.99 at least",
        "uniform attention is the extreme case: one layer of it makes them the same, to rounding.",
        (0.99, 1.01), layers("no_residual", 1, alike),
    ),
    Expected(
        "With it they do not.", "Dong et al. 2021, arXiv 2103.03404",
        f"the mean cosine of two tokens in pre-LN, after {MIXED} layers at most: 0.99 at most",
        "the same bound.",
        (-1.0, 0.99), layers("pre_ln", 1, alike),
    ),
    Expected(
        "Without norms the stream grows exponentially.", f"follows from {XIONG}, lemma 2",
        "the slope of ln E|x|^2 over l in the deepest stack, of 8 layers or more: ln(3/2) to ln 3, and 0.1 for chance",
        "the feed-forward block multiplies by 3/2, attention by 1 if the tokens are independent and by 2 if they are alike. "
        "The logarithm takes random steps of about 0.25 a layer: a line through 8 layers scatters by 0.1, of 8 seeds by 0.04.",
        (math.log(1.5) - 0.1, math.log(3) + 0.1), layers("no_norm", 8, exponential),
    ),
)  # fmt: skip
