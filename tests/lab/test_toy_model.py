"""Tests of `addnorm.lab.toy_model`."""

import pytest
import torch

from addnorm.lab.streams import token_similarity
from addnorm.lab.toy_model import ToyModel


def test_toy_model_depends_only_on_its_seed():
    before = torch.random.get_rng_state()
    first, again, other = (ToyModel(2, "pre_ln", seed)().detach() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator does not change"
    assert float(first) == float(again) != float(other)


def test_attention_averages_tokens_unless_they_are_separate():
    model = ToyModel(1, "pre_ln", 0)
    attention, x = model.stack.connections[0].sublayer, torch.randn(2, 5, 64)
    torch.testing.assert_close(attention(x), attention.value(x).mean(1, keepdim=True).expand(2, 5, 64))
    model.separate_tokens()
    torch.testing.assert_close(attention(x), attention.value(x))


def test_toy_model_weights_have_variance_one_over_d():
    model = ToyModel(8, "post_ln", 0)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.stack.parameters()])
    assert float(weights.var()) == pytest.approx(1 / 64, rel=0.03)
    assert all(parameter.dim() == 2 for parameter in model.parameters())


def test_token_similarity_is_mean_cosine_of_pairs():
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    pairs = [
        torch.cosine_similarity(tokens[i], tokens[j], dim=0)
        for tokens in x
        for i in range(5)
        for j in range(5)
        if i != j
    ]
    assert token_similarity(x) == pytest.approx(float(torch.stack(pairs).mean()))
    assert token_similarity(x[:, :1].expand(3, 5, 8)) == pytest.approx(1)
