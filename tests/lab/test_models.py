"""addnorm.lab.models: weights are their seed's, and equal wherever they can be."""

import pytest
import torch

from addnorm import Row, wirings
from addnorm.lab.models import CharLM
from addnorm.lab.run import wired
from support.stacks import ALL


def model(wiring, seed=0, **options):
    return CharLM(11, 2, wired(wiring), **{"d_model": 16, "nhead": 2, "tokens": 8, "seed": seed, **options})


def test_a_model_is_its_seed_and_draws_nobody_elses_numbers():
    before = torch.random.get_rng_state()
    one, again, other = (model("pre_ln", seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


@pytest.mark.parametrize("wiring", [one for one in ALL if one.profile is None], ids=lambda one: one.name)
def test_embeddings_and_head_are_the_same_under_every_wiring(wiring):
    one, other = model(wiring), model("pre_ln")
    for name in ("embedding.weight", "position.weight", "head.weight", "head.bias"):
        assert torch.equal(one.get_parameter(name), other.get_parameter(name)), name


@pytest.mark.parametrize("wiring", ["post_ln", "peri_ln", "layernorm_scaling", "no_norm", "parallel"])
def test_wirings_of_one_rule_begin_with_the_same_weights(wiring):
    one, other = dict(model(wiring).named_parameters()), dict(model("pre_ln").named_parameters())
    shared = [name for name in one if name in other and one[name].dim() == 2]
    assert len(shared) >= 2 * 4 + 3
    assert all(torch.equal(one[name], other[name]) for name in shared)


def test_x_0_has_variance_one():
    text = torch.randint(500, (64, 32))
    x = CharLM(500, 1, wired("pre_ln"), d_model=64, tokens=32).embed(text)
    assert float(x.detach().var()) == pytest.approx(1.0, rel=0.05)


def test_admins_factors_are_measured_on_the_text():
    one, other = (model(wirings.admin(), text=torch.randint(11, (4, 8))) for _ in range(2))
    differ = [name for name, weight in one.named_parameters() if not torch.equal(weight, other.get_parameter(name))]
    assert differ
    assert all("decoder" in name for name in differ)


def test_rms_norms_have_no_bias():
    names = {name for name, _ in model("pre_ln", norm="rms").named_parameters()}
    assert {name for name, _ in model("pre_ln").named_parameters()} - names
    assert names < {name for name, _ in model("pre_ln").named_parameters()}


def test_no_character_sees_what_follows_it():
    lm, text = model(Row(norm_in=True)), torch.randint(11, (1, 8))
    changed = text.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    same = (lm(text) == lm(changed)).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3
