"""Tests of `addnorm.lab.models`."""

import pytest
import torch

from addnorm import wirings
from addnorm.lab.models import CharLM
from addnorm.lab.run import as_lab_wiring
from support.equality import assert_same
from support.stacks import ALL


def model(wiring, seed=0, **options):
    return CharLM(11, 2, as_lab_wiring(wiring), **{"d_model": 16, "nhead": 2, "tokens": 8, "seed": seed, **options})


def test_char_lm_depends_only_on_its_seed():
    before = torch.random.get_rng_state()
    first, again, other = (model("pre_ln", seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert_same(again, first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


@pytest.mark.parametrize("wiring", [wiring for wiring in ALL if wiring.profile is None], ids=lambda wiring: wiring.name)
def test_embeddings_and_head_do_not_depend_on_wiring(wiring):
    first, other = model(wiring), model("pre_ln")
    for name in ("embedding.weight", "position.weight", "head.weight", "head.bias"):
        assert torch.equal(first.get_parameter(name), other.get_parameter(name)), name


@pytest.mark.parametrize("wiring", ["post_ln", "peri_ln", "layernorm_scaling", "no_norm", "parallel"])
def test_wirings_with_one_init_rule_share_weights(wiring):
    first, other = dict(model(wiring).named_parameters()), dict(model("pre_ln").named_parameters())
    shared = [name for name in first if name in other and first[name].dim() == 2]
    assert len(shared) >= 2 * 4 + 3
    assert all(torch.equal(first[name], other[name]) for name in shared)


def test_x_0_has_variance_one():
    text = torch.randint(500, (64, 32))
    x = CharLM(500, 1, as_lab_wiring("pre_ln"), d_model=64, tokens=32).embed(text)
    assert float(x.detach().var()) == pytest.approx(1.0, rel=0.05)


def test_admin_factors_are_measured_on_the_text():
    first, other = (model(wirings.admin(), text=torch.randint(11, (4, 8))) for _ in range(2))
    differ = [name for name, weight in first.named_parameters() if not torch.equal(weight, other.get_parameter(name))]
    assert differ
    assert all("decoder" in name for name in differ)
