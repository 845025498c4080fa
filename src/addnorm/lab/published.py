"""Published results on untrained wirings as data (`PUBLISHED`): each is a number that must lie in a band.

`check_published(summarize(statistics))` (see `addnorm.lab.theory`) compares each with the measurement. A result whose wirings or
depths were not measured is "not measured". NaN and infinity lie in no band. The bands allow for the scatter of 8 seeds.

A row here is a dict that `addnorm.lab.theory.summarize` returns: the statistics of one wiring and depth. Each function that
measures, or the function that it returns, maps `Rows` or one row to numbers by name, or to an empty dict if statistics that it
needs are missing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from addnorm._util.jsonio import Document
from addnorm.lab.streams import Numbers
from addnorm.lab.theory import STREAM_WIRINGS
from addnorm.wirings.catalog import deepnorm_constants

Measured = dict[str, float]

XIONG = "Xiong et al. 2020, arXiv 2002.04745"
DEEPNET = "Wang et al. 2022 (DeepNet), arXiv 2203.00555"

STEPPED = 16  # minimum number of layers to compare first steps: with fewer, the wirings differ little
MIXED = 12  # layers after which the tokens are equal without the residual
DEEP = 32  # minimum number of layers to judge the shape of a curve: with fewer, any curve looks straight


class Rows:
    """Dicts of measured statistics by wiring and depth, from the list that `addnorm.lab.theory.summarize` returns."""

    def __init__(self, rows: Iterable[Numbers]) -> None:
        self.at = {(row["wiring"], row["num_layers"]): row for row in rows}

    def depths(self, *wirings: str, least: int = 1) -> list[int]:
        """Return the depths of at least `least` layers at which all these wirings were measured, from the shallowest."""
        depths = (n for name, n in self.at if name == wirings[0] and n >= least)
        return sorted(n for n in depths if all((name, n) in self.at for name in wirings))

    def deepest(self, wiring: str, least: int = 1) -> Numbers | None:
        """Return the statistics of `wiring` at its greatest measured depth, or None if that is less than `least` layers."""
        depths = self.depths(wiring, least=least)
        return self.at[wiring, depths[-1]] if depths else None


Measure = Callable[[Rows], Measured]


@dataclass(frozen=True)
class PublishedResult(Document):
    """A published result on untrained stacks, and its measurement.

    Args:
        name: the statement.
        source: the paper.
        criterion: the measured number and its band, in words.
        why: the reason for the width of the band.
        band: the smallest and the largest number that the band contains.
        measure: function that returns the numbers by name, or an empty dict if the stacks that it needs were not measured.
        measured: the measured numbers.
    """

    PROPERTIES = ("holds", "verdict")

    name: str
    source: str
    criterion: str
    why: str
    band: tuple[float, float]
    measure: Measure = field(repr=False)
    measured: Measured = field(default_factory=dict)

    @property
    def holds(self) -> bool | None:
        """Whether every measured number is finite and lies in the band, ends included. None if nothing was measured."""
        if not self.measured:
            return None
        low, high = self.band
        return all(math.isfinite(value) and low <= value <= high for value in self.measured.values())

    @property
    def verdict(self) -> str:
        """`holds` in words: "holds", "does not hold" or "not measured"."""
        return {True: "holds", False: "does not hold", None: "not measured"}[self.holds]


def check_published(rows: Iterable[Numbers]) -> list[PublishedResult]:
    """Return every published result with the numbers measured from `rows`, which `addnorm.lab.theory.summarize` returns."""
    measured = Rows(rows)
    return [replace(result, measured=result.measure(measured)) for result in PUBLISHED]


# --------------------------------------------------------------------------------------------------- the measured numbers


def deepest(measure: Callable[[Numbers], Measured], *wirings: str, least: int = 1) -> Measure:
    """Return a function that applies `measure` to the deepest stack of each wiring, if that has at least `least` layers.

    The name of a number includes the wiring if there are several wirings, or if `measure` gives the number an empty name.
    """

    def measured(rows: Rows) -> Measured:
        numbers: Measured = {}
        for wiring in wirings:
            if (row := rows.deepest(wiring, least)) is None:
                continue
            with suppress(KeyError):  # of a statistic that was not measured
                for name, number in measure(row).items():
                    words = [wiring] * (len(wirings) > 1 or not name) + [name] * bool(name)
                    numbers[", ".join([*words, f"{row['num_layers']} layers"])] = number
        return numbers

    return measured


def extremes(values: Iterable[float]) -> Measured:
    """Return the smallest and the largest value: if both lie in a band, all do."""
    numbers = list(values)
    if any(map(math.isnan, numbers)):  # min and max can ignore a NaN
        return {"not a number": math.nan}
    return {"least": min(numbers), "greatest": max(numbers)}


def by_layer(row: Numbers, key: str) -> list[float]:
    """Return `row[key]` at x_0 and after each whole layer, from values after each of the two sublayers of a layer."""
    values: list[float] = row[key][::2]
    return values


def layers_of(row: Numbers) -> range:
    """Return the numbers of the layers, from 1."""
    return range(1, row["num_layers"] + 1)


def growth_rate(row: Numbers) -> Measured:
    """Return the extremes over l of (E|x_l|^2 - E|x_0|^2) / (d l): what a layer adds on average up to layer l."""
    start, *after = by_layer(row, "variance")
    return extremes((value - start) / layer for layer, value in enumerate(after, start=1))


def variance_of_normed_writes(row: Numbers) -> Measured:
    """Return the extremes over layers l of the stream's variance, divided by 1 + 2l.

    The variance is 1 + 2l if every write has variance 1.
    """
    return extremes(value / (1 + 2 * layer) for layer, value in enumerate(by_layer(row, "variance")))


def last_gradients(wiring: str) -> Measure:
    """Return a function that measures the exponent of the last layer's gradient as a power of the depth.

    It measures nothing with fewer than three depths.
    """

    def measured(rows: Rows) -> Measured:
        depths = rows.depths(wiring)
        if len(depths) < 3:
            return {}
        gradients = [rows.at[wiring, n]["weight_gradient"][-1] for n in depths]
        return {f"exponent, {depths[0]} to {depths[-1]} layers": exponent(depths, gradients)}

    return measured


def log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of ln y over x, or NaN if a value of y is not positive and finite."""
    if not all(0 < value < math.inf for value in y):
        return math.nan
    return statistics.linear_regression(x, [math.log(value) for value in y]).slope


def exponent(x: Iterable[float], y: Sequence[float]) -> float:
    """Return the exponent of y as a power of x, or NaN if a value of y is not positive and finite."""
    return log_slope([*map(math.log, x)], y)


def straightness(x: Sequence[float], row: Numbers) -> Measured:
    """Return the share of the variance of E|x_l|^2 / d that a line over `x` explains; NaN if it is constant or not finite."""
    y = by_layer(row, "variance")[1:]
    is_curve = all(map(math.isfinite, y)) and min(y) < max(y)
    return {"R^2": statistics.correlation(x, y) ** 2 if is_curve else math.nan}


def exponential_growth(row: Numbers) -> Measured:
    """Return the slope of ln E|x_l|^2 over l."""
    values = by_layer(row, "variance")
    slope = log_slope(range(len(values)), values)
    return {"not a number" if math.isnan(slope) else "slope": slope}


def quotient(x: float, y: float) -> float:
    """Return `x / y`, or NaN if `y` is 0 or `x` is not finite."""
    return x / y if y and math.isfinite(x) else math.nan


def end_ratio(values: Sequence[float]) -> float:
    """Return the first value divided by the last."""
    return quotient(values[0], values[-1])


def compare_first_steps(smaller: str, larger: str) -> Measure:
    """Return a measure that divides one wiring's change of the logits in its first training step by another's."""
    return lambda rows: {
        f"{smaller} over {larger}, {n} layers, {name}": quotient(rows.at[smaller, n][key], rows.at[larger, n][key])
        for n in rows.depths(smaller, larger, least=STEPPED)
        for name, key in (("SGD", "step_sgd"), ("Adam", "step_adam"))
    }


def last_moves(rows: Rows) -> Measured:
    """Return 2l (1 - cosine of the stream before and after the last layer) for each measured depth l of pre-LN."""
    return {f"{n} layers": 2 * n * rows.at["pre_ln", n]["last_move"] for n in rows.depths("pre_ln", least=6)}


def published_constants(rows: Rows) -> Measured:
    """Return the differences of the library's and the published DeepNorm constants, in units of the last digit.

    `rows` is not used.
    """
    differences: Measured = {}
    for n, (alpha, beta) in {18: (2.449, 0.2887), 100: (3.761, 0.1880), 200: (4.472, 0.1581)}.items():
        ours = deepnorm_constants("encoder-only", n)
        differences |= {f"alpha, {n} layers": (ours[0] - alpha) / 1e-3, f"beta, {n} layers": (ours[1] - beta) / 1e-4}
    return differences


def similarity(row: Numbers) -> Measured:
    """Return the mean cosine of two tokens after layer `MIXED`, or after the last layer of a shallower stack."""
    layer = min(MIXED, row["num_layers"])
    return {f"after layer {layer}": by_layer(row, "similarity")[layer]}


# ---------------------------------------------------------------------------------------------- the published results

PUBLISHED = (
    PublishedResult(
        "The stream of pre-LN grows linearly with the layer.", f"{XIONG}, lemma 2",
        "what a layer adds to E|x|^2 / d on average up to each layer l of the deepest stack: 1/2 to 3/2, with scatter "
        "0.45 to 1.75",
        "The feed-forward sublayer adds 1/2, since relu halves; attention adds 1 if the tokens are equal, and nothing if they "
        "are independent. The scatter of one seed is 0.05 at first, where the value is 0.53 (each token is one of 32), and 0.25 "
        "after 64 layers, where the value is near 3/2; that of the mean of 8 seeds is 0.02 and 0.09. Peri-LN adds 2.",
        (0.45, 1.75), deepest(growth_rate, "pre_ln"),
    ),
    PublishedResult(
        "The growth of pre-LN's stream is a straight line.", f"{XIONG}, lemma 2",
        f"R^2 of a line over l, {DEEP} layers or more: at least 0.98",
        "a logarithm has 0.8 over 64 layers, an exponential less than 0.5.",
        (0.98, 1.0),
        deepest(lambda row: straightness(layers_of(row), row), "pre_ln", least=DEEP),
    ),
    PublishedResult(
        "The input of the norm after post-LN's feed-forward sublayer has variance 3/2.", f"{XIONG}, lemma 2",
        "E|x + f(x)|^2 / d, mean over the layers of the deepest stack: 1.4 to 1.6",
        "1 is from the norm before, 1/2 from relu(x W_1) W_2; the product x f(x) is zero only in the mean over weights.",
        (1.4, 1.6), deepest(lambda row: {"mean": statistics.fmean(row["before_norm"][1::2])}, "post_ln"),
    ),
    PublishedResult(
        "The stream of post-LN stays at variance 1.", f"{XIONG}, section 3",
        "E|x|^2 / d after each sublayer of the deepest stack: 1 to a thousandth",
        "exact, but for the norm's epsilon (1e-5) and rounding.",
        (0.999, 1.001), deepest(lambda row: extremes(row["variance"][1:]), "post_ln"),
    ),
    PublishedResult(
        "The last layer's gradient does not depend on the depth in post-LN.", f"{XIONG}, theorem 1",
        "the exponent of |dLoss/dW_2| of the last layer over L: -0.12 to 0.12",
        "0 in theory for the loss of one token; the mean over 32 tokens adds 0.06, since the gradients of similar tokens "
        "cancel less, and the scatter is 0.02. Pre-LN has -0.5.",
        (-0.12, 0.12), last_gradients("post_ln"),
    ),
    PublishedResult(
        "The last layer's gradient falls like 1/sqrt(depth) in pre-LN.", f"{XIONG}, theorem 1",
        "the exponent of |dLoss/dW_2| of the last layer over L: -0.6 to -0.4",
        "-1/2 in theory, for large L; the scatter is 0.02.",
        (-0.6, -0.4), last_gradients("pre_ln"),
    ),
    PublishedResult(
        "Pre-LN's first layers get larger gradients, like 1/sqrt(l).", f"follows from {XIONG}, lemma 2",
        f"the exponent of |dLoss/dW_2| over l in the deepest stack, {DEEP} layers or more: -0.65 to -0.4",
        "a layer multiplies E|g|^2 by 1 + k / E|x|^2 and adds k to E|x|^2, k the same: together l.",
        (-0.65, -0.4),
        deepest(lambda row: {"exponent": exponent(layers_of(row), row["weight_gradient"])}, "pre_ln", least=DEEP),
    ),
    PublishedResult(
        "Before training, post-LN's gradient neither vanishes nor explodes.", f"follows from {XIONG}, lemma 2",
        "|dLoss/dW_2| of the last layer divided by that of the first, in the deepest stack: 1/5 to 5",
        "a layer multiplies E|g|^2 by 3/2 and its norm by 2/3; a factor of 5 over 64 layers is 1.3% per norm.",
        (0.2, 5.0), deepest(lambda row: {"last over first": end_ratio(row["weight_gradient"][::-1])}, "post_ln"),
    ),
    PublishedResult(
        "The first step changes DeepNorm's logits less than pre-LN's.", f"{DEEPNET}, section 3",
        f"ratio of |logits' - logits| / |logits| of the two, each depth from {STEPPED} layers: at most 1",
        "the papers give an order, not a size; the ratio is about 1/2.",
        (0.0, 1.0), compare_first_steps("deepnorm", "pre_ln"),
    ),
    PublishedResult(
        "The first step changes pre-LN's logits less than post-LN's.", f"{XIONG}, section 3; {DEEPNET}, section 3",
        f"ratio of |logits' - logits| / |logits| of the two, each depth from {STEPPED} layers: at most 1",
        "the papers give an order, not a size; the ratio is about 1/3.",
        (0.0, 1.0), compare_first_steps("pre_ln", "post_ln"),
    ),
    PublishedResult(
        "DeepNorm's gradient is equal in all layers.", DEEPNET,
        "|dLoss/dW_2| of the first layer divided by that of the last, in the deepest stack: 0.8 to 1.25",
        "1 in theory; with beta inverted, a known mistake in baselines, it is 1/5 at 64 layers.",
        (0.8, 1.25), deepest(lambda row: {"first over last": end_ratio(row["weight_gradient"])}, "deepnorm"),
    ),
    PublishedResult(
        "DeepNorm's constants are (2N)^(1/4) and (8N)^(-1/4).", DEEPNET,
        "difference of this library's and the published constants, in units of the last digit: -0.5 to 0.5",
        "the published constants are rounded.",
        (-0.5, 0.5), published_constants,
    ),
    PublishedResult(
        "Under LayerNorm scaling the stream grows like ln l.", "Sun et al. 2025, arXiv 2502.05795",
        f"R^2 of a line over ln l, {DEEP} layers or more: at least 0.95",
        "over ln l and 64 layers, l has 0.82 and sqrt(l) has 0.93; the mean of many seeds has 0.99, that of 8 seeds 0.01 less. "
        "This is before training; the paper bounds the growth by a polynomial.",
        (0.95, 1.0),
        deepest(lambda row: straightness([*map(math.log, layers_of(row))], row), "layernorm_scaling", least=DEEP),
    ),
    PublishedResult(
        "With a norm after the sublayer, each write has variance 1.", "Kim et al. 2025, arXiv 2502.02732",
        "E|x|^2 / d divided by 1 + 2l, at each layer of the deepest stack: at least 0.8",
        "1 if the writes are independent, more if they are similar; a write's product with the stream is zero only in the mean.",
        (0.8, math.inf), deepest(variance_of_normed_writes, "sandwich", "peri_ln"),
    ),
    PublishedResult(
        "Pre-LN's later layers change the stream less, like 1/(2l).", f"follows from {XIONG}, lemma 2",
        "2l (1 - cosine) of the stream before and after the last layer, each depth from 6: 2/3 to 3/2",
        "1 - cosine = (write / stream)^2 / 2 = k / (2 k l), for a write orthogonal to the stream.",
        (1 / 1.5, 1.5), last_moves,
    ),
    PublishedResult(
        "Without the residual all tokens become equal.", "Dong et al. 2021, arXiv 2103.03404",
        f"the mean cosine of two tokens after at most {MIXED} layers: at least 0.99",
        "uniform attention is the extreme case: one layer makes the tokens equal up to rounding.",
        (0.99, 1.01), deepest(similarity, "no_residual"),
    ),
    PublishedResult(
        "With the residual the tokens stay distinct.", "Dong et al. 2021, arXiv 2103.03404",
        f"the mean cosine of two tokens in pre-LN after at most {MIXED} layers: at most 0.99",
        "the same bound as without the residual.",
        (-1.0, 0.99), deepest(similarity, "pre_ln"),
    ),
    PublishedResult(
        "Without norms the stream grows exponentially.", f"follows from {XIONG}, lemma 2",
        "the slope of ln E|x|^2 over l in the deepest stack, 8 layers or more: ln(3/2) to ln 3, and 0.1 for scatter",
        "the feed-forward sublayer multiplies by 3/2, attention by 1 if the tokens are independent and by 2 if they are equal. "
        "The logarithm takes random steps of about 0.25 per layer: the slope over 8 layers scatters by 0.1, of 8 seeds by 0.04.",
        (math.log(1.5) - 0.1, math.log(3) + 0.1), deepest(exponential_growth, "no_norm", least=8),
    ),
    PublishedResult(
        "Hyper-connections and their successors begin as pre-LN.",
        "Zhu et al. 2024, arXiv 2409.19606; Xie et al. 2025, arXiv 2512.24880; Kimi team 2026, arXiv 2603.15031; Pagliardini et "
        "al. 2024, arXiv 2402.02622; Xiao et al. 2025, arXiv 2502.12170",
        "the difference of the untrained stack's output from pre-LN's with the same weights, relative: at most 0.002",
        "with streams that are copies, or a read that is a multiple of pre-LN's, the norms remove what differs, but for their "
        "epsilon: attention residuals read a mean, whose variance is lower by the square of the number of sources.",
        (0.0, 2e-3), deepest(lambda row: {"": row["difference"]}, *STREAM_WIRINGS),
    ),
    PublishedResult(
        "The reads of attention residuals do not grow with depth.", "Kimi team 2026, arXiv 2603.15031",
        "the largest root mean square of a read before its norm, in units of x_0, in the deepest stack: 0.9 to 1.1",
        "a mean of sources of about equal size is at most as large as they are; the stream of pre-LN is about sqrt(1 + l).",
        (0.9, 1.1), deepest(lambda row: {"largest read": max(row["read"])}, "attention_residuals", least=16),
    ),
    PublishedResult(
        "Pre-LN's reads grow with depth, those of attention residuals fall behind.", "Kimi team 2026, arXiv 2603.15031",
        "the last read divided by pre-LN's, 16 layers or more: at most 1/4",
        "the mean of n independent sources is smaller than their sum by n, 1/32 at 16 layers.",
        (0.0, 0.25), deepest(
            lambda row: {"last read over pre-LN's": quotient(row["read"][-1], row["pre_read"][-1])},
            "attention_residuals", least=16,
        ),
    ),
    PublishedResult(
        "Attention residuals begin as the mean of all sources.", "Kimi team 2026, arXiv 2603.15031",
        "the largest |n p - 1| of the mean weights p of n sources, all reads of the deepest stack: at most 1e-6",
        "the query is zero and the softmax of equal scores is 1/n, but for its rounding to float32, 6e-8.",
        (0.0, 1e-6), deepest(lambda row: {"": row["from_mean"]}, "attention_residuals"),
    ),
    PublishedResult(
        "DenseFormer and MUDDFormer begin with reads of the newest state alone.",
        "Pagliardini et al. 2024, arXiv 2402.02622; Xiao et al. 2025, arXiv 2502.12170",
        "the largest weight of an older state, and difference of the newest's from 1, of all reads of the deepest stack: at most "
        "1e-6",
        "exact: the weights are one-hot, and MUDDFormer's last matrix is zero. MUDDFormer's PyTorch port draws them at random.",
        (0.0, 1e-6), deepest(lambda row: {"": row["from_newest"]}, "denseformer", "muddformer"),
    ),
    PublishedResult(
        "The mixing of mHC neither amplifies nor silences the streams.", "Xie et al. 2025, arXiv 2512.24880, section 3",
        "the larger gain, forward or backward, of the product of all A with random logits, 16 layers or more: 0.95 to 1.6",
        "the paper finds 1.6 at 27B parameters and 60 sublayers, where near-permutations let the columns drift; with independent "
        "logits of standard deviation 1 it is 1.",
        (0.95, 1.6), deepest(lambda row: {"gain": row["gain"]}, "mhc", least=16),
    ),
    PublishedResult(
        "The mixing of hyper-connections amplifies or silences the streams.", "Xie et al. 2025, arXiv 2512.24880, section 3",
        "the same gain with entries that are 1/n off the identity, 16 layers or more: more than 3",
        "the paper finds 3000 at 27B parameters; a product of unconstrained matrices grows exponentially, at a rate that depends "
        "on their spread.",
        (3.0, math.inf), deepest(lambda row: {"gain": row["gain"]}, "hyper_connections", least=16),
    ),
)  # fmt: skip
