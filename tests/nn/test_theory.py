"""Tests of the papers' theorems about wirings at initialization, on the model of their proofs (`addnorm.lab.toy_model`).

Expectations are means over seeds; ratios and slopes are from geometric means. The margins are those of the theory. The seeds are
not selected: `ADDNORM_SEEDS=1000 pytest tests/nn/test_theory.py` uses others.
"""

import math
import os
import statistics

import pytest
import torch
import torch.nn.functional as F

from addnorm import Row, Wiring, wirings
from addnorm.lab.toy_model import ToyModel, geometric_mean, log_slope, r_squared, token_similarity
from addnorm.wirings.init import Draw

FIRST = int(os.environ.get("ADDNORM_SEEDS", "0"))
DEPTHS = (2, 4, 8, 16, 32, 64)


def seeds(n):
    return range(FIRST, FIRST + n)


def by_layer(wiring, measure, num_layers=64, n_seeds=8):
    """Return the mean over seeds of a measure of the stream after each layer, x_0 first."""
    models = (ToyModel(num_layers, wiring, seed, sequences=4).measure_stream().streams[::2] for seed in seeds(n_seeds))
    values = [[measure(x) for x in states] for states in models]
    return [statistics.fmean(values) for values in zip(*values, strict=True)]


def variance(x):
    return float(x.square().mean())


@pytest.fixture(scope="module")
def growth():
    """Return the stream's variance by layer for wirings with a plain sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    n_seeds = {"pre_ln": 4, "layernorm_scaling": 4, "peri_ln": 3}
    yield {name: by_layer(name, variance, n_seeds=n) for name, n in n_seeds.items()}
    torch.set_num_threads(before)


def test_pre_ln_stream_grows_linearly(growth):
    """Check Xiong et al., lemma 2: 1 + l/2 if tokens are independent, 1 + 3l/2 if they are alike."""
    for layer, value in enumerate(growth["pre_ln"][1:], start=1):
        assert 1 + layer / 2 <= value <= 1 + 3 * layer / 2, layer
    layers = range(1, 65)
    assert r_squared(layers, growth["pre_ln"][1:]) > 0.98


def test_layernorm_scaling_stream_grows_logarithmically(growth):
    layers = [math.log(layer) for layer in range(1, 65)]
    assert r_squared(layers, growth["layernorm_scaling"][1:]) > 0.98
    assert r_squared(layers, growth["pre_ln"][1:]) < 0.9, "the criterion tells the two apart"
    assert growth["layernorm_scaling"][64] < 8 < 60 < growth["pre_ln"][64]


def test_layernorm_scaling_last_layers_approach_identity():
    def last_step(wiring):
        """Return the mean cosine between the stream before and after the last layer."""
        streams = [ToyModel(64, wiring, seed).measure_stream().streams for seed in seeds(3)]
        return statistics.fmean(float(F.cosine_similarity(x[-3], x[-1], dim=-1).mean()) for x in streams)

    assert 0.98 < last_step("pre_ln") < last_step("layernorm_scaling") < 1


def test_norm_after_sublayer_adds_two_a_layer_or_more(growth):
    """Each write has variance 1: 1 + 2l, and more as writes become alike. At initialization that is more than in pre-LN."""
    for layer, value in enumerate(growth["peri_ln"]):
        assert value > 0.8 * (1 + 2 * layer), layer  # writes are independent of the stream only on average
        assert layer == 0 or value > growth["pre_ln"][layer]


def test_post_ln_feed_forward_norm_input_has_variance_3_2():
    """Lemma 2: 1 from the norm before it, 1/2 from relu(x W_1) W_2."""
    values = []
    for seed in seeds(16):
        model = ToyModel(12, "post_ln", seed)
        x = model.measure_stream().streams
        for i, layer in enumerate(model.stack._layers()):
            read = x[2 * i + 1]
            with torch.no_grad():
                values.append(variance(read + layer[1].sublayer(read)))
    assert statistics.fmean(values) == pytest.approx(1.5, abs=0.05)


def test_post_ln_stream_has_variance_one():
    assert by_layer("post_ln", variance, n_seeds=2)[1:] == pytest.approx([1.0] * 64, abs=1e-4)


def last_gradients(wiring, judged=None, n_seeds=3):
    """Return the gradient of the last layer's W_2 by the number of layers."""
    return [
        geometric_mean(
            ToyModel(n, wiring, seed, loss_tokens=judged).feed_forward_gradients()[-1] for seed in seeds(n_seeds)
        )
        for n in DEPTHS
    ]


@pytest.mark.parametrize(
    "judged", [pytest.param(None, id="mean-loss"), pytest.param(1, id="loss-of-one-token", marks=pytest.mark.slow)]
)
def test_last_layer_gradient_by_depth(judged):
    """Check Xiong et al., theorem 1: O(1) against O(1 / sqrt(L)) at a given width."""
    assert abs(log_slope(DEPTHS, last_gradients("post_ln", judged))) < 0.1
    assert -0.6 <= log_slope(DEPTHS, last_gradients("pre_ln", judged)) <= -0.4


def test_gradient_falls_with_layer_in_pre_ln_only():
    """Within one model, pre-LN's first layers have larger gradients, like 1 / sqrt(l).

    At initialization post-LN's gradient neither explodes nor vanishes: over 48 layers, 96 norms, it changes by less than a factor of
    five, 1.7% a norm. (It shrinks a little in backward, because uniform attention averages the gradient.)
    """
    layers, values = range(1, 49), {}
    for wiring in ("pre_ln", "post_ln"):
        models = [ToyModel(48, wiring, seed).feed_forward_gradients() for seed in seeds(3)]
        values[wiring] = [geometric_mean(gradients) for gradients in zip(*models, strict=True)]
    assert -0.65 <= log_slope(layers, values["pre_ln"]) <= -0.4
    assert values["pre_ln"][-1] / values["pre_ln"][0] < 0.25
    assert 1 / 5 < values["post_ln"][-1] / values["post_ln"][0] < 5


def test_post_ln_identity_path_gradient_vanishes():
    """Each norm divides by a standard deviation above 1. At initialization the sublayers compensate."""
    for seed in seeds(2):
        assert ToyModel(48, "post_ln", seed).measure_stream(residual_alone=True).gradient_ratio() < 1e-6
        assert ToyModel(48, "post_ln", seed).measure_stream().gradient_ratio() > 0.05
        assert ToyModel(48, "pre_ln", seed).measure_stream(residual_alone=True).gradient_ratio() == 1


def first_over_last(wiring, num_layers, n_seeds):
    values = (ToyModel(num_layers, wiring, seed, init=True).feed_forward_gradients() for seed in seeds(n_seeds))
    return geometric_mean(gradients[0] / gradients[-1] for gradients in values)


@pytest.mark.slow
def test_deepnorm_of_a_thousand_layers_passes_the_gradient():
    for seed in seeds(1):
        gradients = ToyModel(1000, "deepnorm", seed, init=True).feed_forward_gradients()
        assert all(0 < gradient < math.inf for gradient in gradients)
        assert 0.5 <= gradients[0] / gradients[-1] <= 2


def test_deepnorm_gradient_is_even_with_its_beta_only():
    """Published baselines used (8N)^(+1/4) in place of (8N)^(-1/4) by mistake."""

    def inverted(n):
        row = wirings.deepnorm().row(0, 0, n)
        return Wiring("inverted", row, init=lambda role, at: Draw("xavier_normal", (8 * at.num_layers) ** (1 / 4)))

    assert 0.8 <= first_over_last("deepnorm", 200, 1) <= 1.25
    assert 1 / first_over_last(inverted(200), 200, 3) > 15


def test_tokens_become_alike_without_residual():
    """Dong et al. 2021. Uniform attention is the extreme case: one layer makes all tokens equal."""
    alone = by_layer(wirings.no_residual(), token_similarity, num_layers=6, n_seeds=4)
    beside = by_layer("pre_ln", token_similarity, num_layers=6, n_seeds=4)
    assert alone[0] == pytest.approx(0, abs=0.02)
    assert alone[1] == pytest.approx(1, abs=1e-5)
    assert all(0 < value < 0.9 for value in beside[1:])
    assert beside == sorted(beside)


def test_criterion_can_fail():
    """A stack without norms fails the criteria for slopes and R^2."""
    without = Wiring("plain", Row())
    assert log_slope(DEPTHS, last_gradients(without, n_seeds=2)) > 1
    assert r_squared(range(1, 33), by_layer(without, variance, num_layers=32, n_seeds=2)[1:]) < 0.5
