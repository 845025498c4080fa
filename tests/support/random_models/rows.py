"""Rules of the grammar for the rows of a chain of sublayers: published wirings, and rows that no published wiring has."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from addnorm import Learned, Row

Factor = float | str  # a constant, or a learned factor: "scalar" (one number) or "vector" (one for each feature)


@dataclass(frozen=True)
class Plan:
    """Row of one sublayer before its model exists.

    Args:
        norm_in, norm_branch, norm_out: whether it has these norms.
        a, b, c: its factors.
        squash: function of a learned factor: "", "sigmoid" or "tanh".
        convex: a is 1 - b.
        is_shared: b is one parameter for all sublayers of a layer.
    """

    norm_in: bool = False
    norm_branch: bool = False
    norm_out: bool = False
    a: Factor = 1.0
    b: Factor = 1.0
    c: Factor = 1.0
    squash: str = ""
    convex: bool = False
    is_shared: bool = False

    def row(self):
        """Return the row that `inspect` must find; the values of learned factors are not compared."""
        factors = {name: _as_factor(getattr(self, name)) for name in "abc"}
        if self.convex:
            factors["a"] = 1.0 - self.b if isinstance(self.b, float) else _as_factor(self.b)
        return Row(self.norm_in, self.norm_branch, self.norm_out, **factors)


def _as_factor(factor):
    return factor if isinstance(factor, float) else Learned(1.0, per_feature=factor == "vector")


@dataclass(frozen=True)
class Rule:
    """Rule for the rows of a whole stack.

    Args:
        make: function (random numbers, number of layers, sublayers in a layer) -> the plans of each layer.
        wiring: name of the wiring, or None.
        final_norm, embedding_norm: whether the wiring has these norms; a model may differ from it.
    """

    make: Callable
    wiring: str | None = None
    final_norm: bool = True
    embedding_norm: bool = False

    @property
    def reason(self):
        """Why it has no name."""
        return "" if self.wiring else "no published wiring has these rows"


def _same(**fields):
    return lambda rng, layers, per_layer: [[Plan(**fields)] * per_layer] * layers


def _constant(name, low, high, **fields):
    def make(rng, layers, per_layer):
        value = round(rng.uniform(low, high), 3)
        return [[Plan(**{name: value, **fields})] * per_layer] * layers

    return make


def _mix_ln(rng, layers, per_layer):
    post = rng.randint(1, layers - 1)
    return [[Plan(norm_out=True) if layer < post else Plan(norm_in=True)] * per_layer for layer in range(layers)]


def _of_depth(power):
    def make(rng, layers, per_layer):
        k = rng.choice((1.0, 1.4))
        return [[Plan(norm_in=True, b=k / layers**power)] * per_layer] * layers

    return make


def _hybrid(rng, layers, per_layer):
    """Return layers whose sublayers have different norms, as in HybridNorm."""
    choices = [Plan(norm_in=True), Plan(norm_out=True), Plan(norm_in=True, norm_branch=True), Plan(norm_branch=True)]
    plans = rng.sample(choices, 2)
    return [[plans[k % 2] for k in range(per_layer)]] * layers


def _macaron(rng, layers, per_layer):
    """Return layers that begin with half a sublayer and end with half a sublayer and a norm, as in Conformer."""
    first, last = Plan(norm_in=True, b=0.5), Plan(norm_in=True, norm_out=True, b=0.5)
    return [[first, *[Plan(norm_in=True)] * (per_layer - 2), last][-per_layer:]] * layers


RULES = {
    "pre_ln": Rule(_same(norm_in=True), "pre_ln"),
    "post_ln": Rule(_same(norm_out=True), "post_ln", final_norm=False),
    "sandwich": Rule(_same(norm_in=True, norm_branch=True), "sandwich"),
    "peri_ln": Rule(_same(norm_in=True, norm_branch=True), "peri_ln", embedding_norm=True),
    "reordered": Rule(_same(norm_branch=True), "reordered"),
    "deepnorm": Rule(
        lambda rng, n, m: [[Plan(norm_out=True, a=(2 * n) ** 0.25)] * m] * n, "deepnorm", final_norm=False
    ),
    "admin": Rule(_same(norm_out=True, a="vector"), "admin", final_norm=False),
    "rezero": Rule(_same(b="scalar", is_shared=True), "rezero", final_norm=False),
    "skipinit": Rule(_same(b="scalar"), "skipinit", final_norm=False),
    "layer_scale": Rule(_same(norm_in=True, b="vector"), "layer_scale"),
    "residual_multiplier": Rule(_constant("b", 0.2, 0.45, norm_in=True), "residual_multiplier"),
    "depth_mup": Rule(_of_depth(0.5), "depth_mup"),
    "completep": Rule(_of_depth(1.0), "completep"),
    "layernorm_scaling": Rule(
        lambda rng, n, m: [[Plan(norm_in=True, c=1 / math.sqrt(k + 1))] * m for k in range(n)], "layernorm_scaling"
    ),
    "mix_ln": Rule(_mix_ln, "mix_ln"),
    "no_norm": Rule(_same(), "no_norm", final_norm=False),
    "keel": Rule(_constant("a", 1.5, 4.0, norm_in=True, norm_out=True), final_norm=False),
    "hybrid": Rule(_hybrid),
    "macaron": Rule(_macaron, final_norm=False),
    "factor of the stream": Rule(_constant("a", 0.6, 0.95, norm_in=True)),
    "learned factor of the stream": Rule(_same(norm_in=True, a="vector")),
    "learned factors of both": Rule(_same(norm_in=True, a="vector", b="vector")),
    "sandwich with a learned factor": Rule(_same(norm_in=True, norm_branch=True, b="vector")),
    "tanh gate": Rule(_same(norm_in=True, b="scalar", squash="tanh")),
    "sigmoid gate": Rule(_same(norm_in=True, b="vector", squash="sigmoid"), "layer_scale"),
    "convex, constant": Rule(_constant("b", 0.2, 0.45, norm_in=True, convex=True)),
    "convex, learned": Rule(_same(norm_in=True, b="scalar", convex=True)),
    "convex, learned vector": Rule(_same(norm_in=True, b="vector", convex=True)),
    "convex, normed": Rule(_same(norm_branch=True, norm_out=True, b="vector", convex=True)),
}
