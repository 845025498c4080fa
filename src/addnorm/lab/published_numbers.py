"""The measured numbers of the published results, computed from the statistics of untrained stacks.

A row here is a dict that `addnorm.lab.theory.summarize` returns: the statistics of one wiring and depth. Each function, or the
function that it returns, maps `Rows` or one row to numbers by name, or to an empty dict if statistics that it needs are missing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from addnorm.lab.toy_model import log_slope, r_squared
from addnorm.wirings.catalog import deepnorm_constants

Measured = dict[str, float]

STEPPED = 16  # minimum number of layers to compare first steps: with fewer, the wirings differ little
MIXED = 12  # layers after which the tokens are equal without the residual


class Rows:
    """Dicts of measured statistics by wiring and depth, from the list that `addnorm.lab.theory.summarize` returns."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.at = {(row["wiring"], row["num_layers"]): row for row in rows}

    def depths(self, *wirings: str, least: int = 1) -> list[int]:
        """Return the depths of at least `least` layers at which all these wirings were measured, from the shallowest."""
        depths = (n for name, n in self.at if name == wirings[0] and n >= least)
        return sorted(n for n in depths if all((name, n) in self.at for name in wirings))

    def deepest(self, wiring: str, least: int = 1) -> dict[str, Any] | None:
        """Return the statistics of `wiring` at its greatest measured depth, or None if that is less than `least` layers."""
        depths = self.depths(wiring, least=least)
        return self.at[wiring, depths[-1]] if depths else None


def deepest(measure: Callable[[dict[str, Any]], Measured], *wirings: str, least: int = 1) -> Callable[[Rows], Measured]:
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


def by_layer(row: dict[str, Any], key: str) -> list[float]:
    """Return `row[key]` at x_0 and after each whole layer, from values after each of the two sublayers of a layer."""
    values: list[float] = row[key][::2]
    return values


def layers_of(row: dict[str, Any]) -> range:
    """Return the numbers of the layers, from 1."""
    return range(1, row["num_layers"] + 1)


def growth_rate(row: dict[str, Any]) -> Measured:
    """Return the extremes over l of (E|x_l|^2 - E|x_0|^2) / (d l): what a layer adds on average up to layer l."""
    start, *after = by_layer(row, "variance")
    return extremes((value - start) / layer for layer, value in enumerate(after, start=1))


def variance_of_normed_writes(row: dict[str, Any]) -> Measured:
    """Return the extremes over layers l of the stream's variance over 1 + 2l, which writes of variance 1 would give."""
    return extremes(value / (1 + 2 * layer) for layer, value in enumerate(by_layer(row, "variance")))


def last_gradients(wiring: str) -> Callable[[Rows], Measured]:
    """Return a function that measures the exponent of the last layer's gradient over the depth, from at least three depths."""

    def measured(rows: Rows) -> Measured:
        depths = rows.depths(wiring)
        if len(depths) < 3:
            return {}
        gradients = [rows.at[wiring, n]["weight_gradient"][-1] for n in depths]
        return {f"exponent, {depths[0]} to {depths[-1]} layers": exponent(depths, gradients)}

    return measured


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent of y as a power of x, a `log_slope`, or NaN if a value of y is not positive and finite."""
    return log_slope(x, y) if all(0 < value < math.inf for value in y) else math.nan


def straightness(x: Sequence[float], row: dict[str, Any]) -> float:
    """Return `r_squared` of the stream's variance E|x_l|^2 / d over `x`, or NaN if the variance is constant or not finite."""
    y = by_layer(row, "variance")[1:]
    return r_squared(x, y) if all(map(math.isfinite, y)) and min(y) < max(y) else math.nan


def exponential_growth(row: dict[str, Any]) -> Measured:
    """Return the slope of ln E|x_l|^2 over l."""
    values = by_layer(row, "variance")
    if not all(0 < value < math.inf for value in values):
        return {"not a number": math.nan}
    return {"slope": statistics.linear_regression(range(len(values)), [math.log(value) for value in values]).slope}


def quotient(x: float, y: float) -> float:
    """Return `x / y`, or NaN if `y` is 0 or `x` is not finite."""
    return x / y if y and math.isfinite(x) else math.nan


def end_ratio(values: Sequence[float]) -> float:
    """Return the first value divided by the last."""
    return quotient(values[0], values[-1])


def compare_first_steps(smaller: str, larger: str) -> Callable[[Rows], Measured]:
    """Return a function that measures the ratio of two wirings' first steps at every common depth."""
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


def similarity(row: dict[str, Any]) -> Measured:
    """Return the mean cosine of two tokens after layer `MIXED`, or after the last layer of a shallower stack."""
    layer = min(MIXED, row["num_layers"])
    return {f"after layer {layer}": by_layer(row, "similarity")[layer]}
