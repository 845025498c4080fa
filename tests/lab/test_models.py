"""Tests of the lab's models: shared weights, variances, and results that depend on the seed alone."""

import pytest
import torch

from addnorm import wirings
from addnorm.lab import InitProbe, StreamsProbe
from addnorm.lab.models import CharLM
from addnorm.lab.run import as_lab_wiring
from addnorm.lab.streams import token_similarities
from addnorm.lab.toy_model import ToyModel
from support.instrumented_model import similarity
from support.stacks import ALL


def model(wiring, seed=0, **options):
    return CharLM(11, 2, as_lab_wiring(wiring), **{"d_model": 16, "nhead": 2, "tokens": 8, "seed": seed, **options})


@pytest.mark.parametrize("wiring", [wiring for wiring in ALL if wiring.profile is None], ids=lambda wiring: wiring.name)
def test_wirings_share_weights_that_have_one_rule(wiring):
    first, other = dict(model(wiring).named_parameters()), dict(model("pre_ln").named_parameters())
    shared = {"embedding.weight", "position.weight", "head.weight", "head.bias"}
    if wiring.init == wirings.pre_ln().init:
        shared |= {name for name in first if name in other and ".sublayer." in name}
    for name in shared:
        assert torch.equal(first[name], other[name]), name


def test_x_0_has_variance_one():
    text = torch.randint(500, (64, 32))
    x = CharLM(500, 1, as_lab_wiring("pre_ln"), d_model=64, tokens=32).embed(text)
    assert float(x.detach().var()) == pytest.approx(1.0, rel=0.05)


def test_admin_factors_are_measured_on_the_text():
    first, other = (model(wirings.admin(), text=torch.randint(11, (4, 8))) for _ in range(2))
    differ = [name for name, weight in first.named_parameters() if not torch.equal(weight, other.get_parameter(name))]
    assert differ
    assert all("decoder" in name for name in differ)


def test_attention_averages_the_tokens():
    model = ToyModel(1, "pre_ln", 0)
    attention, x = model.stack.connections[0].sublayer, torch.randn(2, 5, 64)
    torch.testing.assert_close(attention(x), attention.value(x).mean(1, keepdim=True).expand(2, 5, 64))


def test_toy_model_weights_have_variance_one_over_d():
    model = ToyModel(8, "post_ln", 0)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.stack.parameters()])
    assert float(weights.var()) == pytest.approx(1 / 64, rel=0.03)
    assert all(parameter.dim() == 2 for parameter in model.parameters())


def test_token_similarity_is_mean_cosine_of_pairs():
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    assert float(token_similarities(x).mean()) == pytest.approx(similarity(x))
    assert token_similarities(x[:, :1].expand(3, 5, 8)).tolist() == pytest.approx([1, 1, 1])


SEEDED = {
    "CharLM": lambda seed: model("pre_ln", seed)(torch.arange(8)[None]).tolist(),
    "ToyModel": lambda seed: ToyModel(2, "pre_ln", seed)().item(),
    "InitProbe": lambda seed: InitProbe("pre", sublayers=4, seed=seed).measure()["stream"],
    "StreamsProbe": lambda seed: StreamsProbe("gated_residual", 4, 8, tokens=3, n=3, seed=seed).measure()["gradient"],
}


@pytest.mark.parametrize("name", SEEDED)
def test_results_depend_only_on_the_seed(name):
    """Leave torch's global generator as it is, too."""
    before = torch.random.get_rng_state()
    first, again, other = map(SEEDED[name], (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first == again != other
