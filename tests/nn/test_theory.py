"""What the papers prove about wirings before training, on the model they prove it for (`addnorm.lab.toy_model`).

Expectations are means over seeds, ratios and slopes come from geometric means. The margins are those of the theory; the seeds
were not chosen (`ADDNORM_SEEDS=1000 pytest tests/test_nn_theory.py` takes others).
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


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)  # tiny matrices: a second thread only waits


def by_layer(wiring, measure, num_layers=64, n_seeds=8):
    """The mean over seeds of a number of the stream after each layer, x_0 first."""
    models = (ToyModel(num_layers, wiring, seed, sequences=4).measure_stream().streams[::2] for seed in seeds(n_seeds))
    found = [[measure(x) for x in one] for one in models]
    return [statistics.fmean(values) for values in zip(*found, strict=True)]


def variance(x):
    return float(x.square().mean())


@pytest.fixture(scope="module")
def growth():
    """The variance of the stream by layer of the wirings with a plain sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    n_seeds = {"pre_ln": 16, "layernorm_scaling": 40, "peri_ln": 16}  # the logarithm is the smallest signal
    yield {name: by_layer(name, variance, n_seeds=n) for name, n in n_seeds.items()}
    torch.set_num_threads(before)


def test_the_stream_of_pre_ln_grows_linearly(growth):
    """Xiong et al., lemma 2: 1 + l/2 if tokens are independent, 1 + 3l/2 if they are alike."""
    for layer, found in enumerate(growth["pre_ln"][1:], start=1):
        assert 1 + layer / 2 <= found <= 1 + 3 * layer / 2, layer
    layers = range(1, 65)
    assert r_squared(layers, growth["pre_ln"][1:]) > 0.98


def test_the_stream_under_layernorm_scaling_grows_like_the_logarithm(growth):
    layers = [math.log(layer) for layer in range(1, 65)]
    assert r_squared(layers, growth["layernorm_scaling"][1:]) > 0.98
    assert r_squared(layers, growth["pre_ln"][1:]) < 0.9, "the criterion tells the two apart"
    assert growth["layernorm_scaling"][64] < 8 < 60 < growth["pre_ln"][64]


def test_layernorm_scaling_makes_the_last_layers_more_like_the_identity_not_less():
    def last_step(wiring):
        """The mean cosine between the stream before and after the last layer."""
        found = [ToyModel(64, wiring, seed).measure_stream().streams for seed in seeds(4)]
        return statistics.fmean(float(F.cosine_similarity(x[-3], x[-1], dim=-1).mean()) for x in found)

    assert 0.98 < last_step("pre_ln") < last_step("layernorm_scaling") < 1


def test_a_norm_after_the_sublayer_grows_the_stream_by_two_a_layer_or_more(growth):
    """Each write has variance one: 1 + 2l, and more as writes become alike. At init that is more than pre-LN's."""
    for layer, found in enumerate(growth["peri_ln"]):
        assert found > 0.8 * (1 + 2 * layer), layer  # writes are independent of the stream in the mean only
        assert layer == 0 or found > growth["pre_ln"][layer]


def test_the_vector_that_enters_post_lns_feed_forward_norm_has_variance_three_halves():
    """1 from the norm before it, 1/2 from relu(x W_1) W_2: lemma 2."""
    found = []
    for seed in seeds(32):
        model = ToyModel(12, "post_ln", seed)
        x = model.measure_stream().streams
        for i, layer in enumerate(model.stack.layers()):
            read = x[2 * i + 1]
            with torch.no_grad():
                found.append(variance(read + layer[1].sublayer(read)))
    assert statistics.fmean(found) == pytest.approx(1.5, abs=0.05)


def test_the_stream_of_post_ln_stays_at_variance_one():
    assert by_layer("post_ln", variance, n_seeds=2)[1:] == pytest.approx([1.0] * 64, abs=1e-4)


def last_gradients(wiring, judged=None, n_seeds=8):
    """The gradient of the last layer's W_2, by the number of layers."""
    return [
        geometric_mean(
            ToyModel(n, wiring, seed, loss_tokens=judged).feed_forward_gradients()[-1] for seed in seeds(n_seeds)
        )
        for n in DEPTHS
    ]


@pytest.mark.parametrize("judged", [pytest.param(None, id="mean-loss"), pytest.param(1, id="loss-of-one-token")])
def test_the_last_layers_gradient_is_flat_in_depth_for_post_ln_and_falls_like_its_root_for_pre_ln(judged):
    """Xiong et al., theorem 1: O(1) against O(1 / sqrt(L)) at a given width."""
    assert abs(log_slope(DEPTHS, last_gradients("post_ln", judged))) < 0.1
    assert -0.6 <= log_slope(DEPTHS, last_gradients("pre_ln", judged)) <= -0.4


def test_the_gradient_falls_with_the_layer_in_pre_ln_and_not_in_post_ln():
    """Of one model's layers. Pre-LN's first layers get more, like 1 / sqrt(l).

    At init post-LN's gradient neither blows up nor vanishes: over 48 layers, 96 norms, it changes by less than five times: by
    1.7 % a norm. (Not quite even: it shrinks a little on the way back, since uniform attention averages the gradient.)
    """
    layers, found = range(1, 49), {}
    for wiring in ("pre_ln", "post_ln"):
        models = [ToyModel(48, wiring, seed).feed_forward_gradients() for seed in seeds(8)]
        found[wiring] = [geometric_mean(gradients) for gradients in zip(*models, strict=True)]
    assert -0.65 <= log_slope(layers, found["pre_ln"]) <= -0.4
    assert found["pre_ln"][-1] / found["pre_ln"][0] < 0.25
    assert 1 / 5 < found["post_ln"][-1] / found["post_ln"][0] < 5


def test_along_the_residual_alone_post_lns_norms_do_let_the_gradient_vanish():
    """Each divides by a standard deviation above one. It is the sublayers that make up for it, before training."""
    for seed in seeds(3):
        assert ToyModel(48, "post_ln", seed).measure_stream(residual_alone=True).gradient_ratio() < 1e-6
        assert ToyModel(48, "post_ln", seed).measure_stream().gradient_ratio() > 0.05
        assert ToyModel(48, "pre_ln", seed).measure_stream(residual_alone=True).gradient_ratio() == 1


def first_over_last(wiring, num_layers, n_seeds):
    found = (ToyModel(num_layers, wiring, seed, init=True).feed_forward_gradients() for seed in seeds(n_seeds))
    return geometric_mean(gradients[0] / gradients[-1] for gradients in found)


def test_deepnorm_of_a_thousand_layers_passes_the_gradient():
    for seed in seeds(2):
        gradients = ToyModel(1000, "deepnorm", seed, init=True).feed_forward_gradients()
        assert all(0 < gradient < math.inf for gradient in gradients)
        assert 0.5 <= gradients[0] / gradients[-1] <= 2


def test_deepnorms_gradient_is_even_and_with_beta_inverted_it_is_not():
    """(8N)^(+1/4) instead of (8N)^(-1/4) is a mistake that baselines were run with."""

    def inverted(n):
        row = wirings.deepnorm().row(0, 0, n)
        return Wiring("inverted", row, init=lambda role, at: Draw("xavier_normal", (8 * at.num_layers) ** (1 / 4)))

    assert 0.8 <= first_over_last("deepnorm", 200, 2) <= 1.25
    assert 1 / first_over_last(inverted(200), 200, 8) > 15


def test_without_the_residual_the_tokens_become_alike_and_with_it_more_slowly():
    """Dong et al. 2021. Uniform attention is the extreme case: one layer of it alone makes them the same."""
    alone = by_layer(wirings.no_residual(), token_similarity, num_layers=6, n_seeds=4)
    beside = by_layer("pre_ln", token_similarity, num_layers=6, n_seeds=4)
    assert alone[0] == pytest.approx(0, abs=0.02)
    assert alone[1] == pytest.approx(1, abs=1e-5)
    assert all(0 < value < 0.9 for value in beside[1:])
    assert beside == sorted(beside)


def test_a_criterion_can_fail():
    """The slopes and the R^2 are not the same whatever is measured: a stack without norms fails them all."""
    without = Wiring("plain", Row())
    assert log_slope(DEPTHS, last_gradients(without, n_seeds=2)) > 1
    assert r_squared(range(1, 33), by_layer(without, variance, num_layers=32, n_seeds=2)[1:]) < 0.5
