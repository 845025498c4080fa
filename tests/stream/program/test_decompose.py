"""Tests of `decompose` on several streams, against products of the recorded coefficients; attribution of logits."""

import pytest
import torch
from torch import nn

import addnorm
from support.expansion import expand, record_mhc
from support.families import shake
from support.random_models.graphs import Graph
from support.real_models import make_model
from support.stacks import encoder
from support.stream_steps import X, make_steps

D = 16


def is_close(actual, expected, tolerance=1e-5):
    return float((actual - expected).abs().max()) <= tolerance * float(expected.abs().max())


def adds_up(parts, depth=-1):
    return is_close(sum(parts.components(depth).values()), parts.state(depth))


@pytest.mark.parametrize("form", ["stacked", "first", "tuple"])
def test_components_equal_products_of_matrices(form):
    run = record_mhc(form)
    parts = addnorm.decompose(run.model, run.x)
    assert parts.depth == 5
    assert parts.closure < 1e-5
    assert len(parts.sources) == 5
    for k in range(5):
        found = parts.components(k)
        for term, name in zip(expand(run, k), parts.sources, strict=False):
            assert is_close(found.pop(name), term)
        assert not found
    end = [(run.head.unsqueeze(-2) @ term).squeeze(-2) for term in expand(run, 4)]
    assert all(is_close(part, term) for part, term in zip(parts.components().values(), end, strict=True))
    total = sum(end)
    shares = [(term * total).sum(-1) / total.square().sum(-1) for term in end]
    assert [*parts.mean_shares().values()] == pytest.approx([float(share.mean()) for share in shares], abs=1e-5)
    mask = torch.rand(2, 5) < 0.5
    some = [float(share[mask].mean()) for share in shares]
    assert [*parts.mean_shares(tokens=mask).values()] == pytest.approx(some, abs=1e-5)
    rms = (total.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    normed = parts.normed_components()
    for part, term in zip(normed.values(), end, strict=True):
        assert is_close(part, term / rms * run.twin.norm.weight.detach())
    assert is_close(sum(normed.values()), run.y)
    for k in (0, 3):
        read = [(run.sites[k].c.unsqueeze(-2) @ term).squeeze(-2) for term in expand(run, k)]
        assert all(is_close(part, term) for part, term in zip(parts.read(k).values(), read, strict=True))


def test_shares_of_a_state_are_those_of_all_streams():
    run = record_mhc("stacked")
    parts = addnorm.decompose(run.model, run.x)
    state = run.states[3].flatten(-2)
    for term, share in zip(expand(run, 3), parts.shares(3).values(), strict=True):
        assert is_close(share, (term.flatten(-2) * state).sum(-1) / state.square().sum(-1))
    _, rows = parts.memory_map()
    assert len(rows) == 6
    assert all(sum(row) == pytest.approx(1) for row in rows)
    with pytest.raises(ValueError, match=r"its shape is \(5, 2\), expected \(2, 5\)"):
        parts.mean_shares(tokens=torch.ones(5, 2))
    with pytest.raises(ValueError, match="lens takes a model of one stream"):
        parts.lens(norm="frozen")
    with pytest.raises(IndexError, match="from 0"):
        parts.components(6)
    with pytest.raises(ValueError, match="stream is 'stream', expected None"):
        addnorm.decompose(run.model, run.x, stream="stream")
    assert "the last read: 5 sources, 4 sublayers" in repr(parts)


def test_norms_on_one_of_two_streams_leave_the_other():
    model = shake(encoder("siamese_norm", norm="layer"))
    with torch.no_grad():
        terms = model.stack.unroll(X)
    parts = addnorm.decompose(model, X)
    last = parts.components(4)
    for name, term in zip(parts.sources, [terms.x_0, *terms.writes], strict=False):
        assert is_close(last[name][..., 1, :], term[..., 1, :].double())  # Y' = Y + w
    assert "norm biases" in last
    assert float(last["norm biases"][..., 1, :].abs().max()) == 0.0
    assert all(adds_up(parts, depth) for depth in range(parts.depth + 1))


def test_class_token_and_positions_belong_to_the_embeddings():
    body, token, positions = shake(encoder("mhc", norm="layer")), torch.randn(1, 1, D), torch.randn(X.shape[1:])

    def run(m, x):
        return 2.0 * m.body(torch.cat([m.token.expand(len(x), -1, -1), x + m.positions], 1))[:, 0]

    parts = addnorm.decompose(Graph(run, body=body, token=nn.Parameter(token), positions=nn.Parameter(positions)), X)
    assert is_close(parts.components(0)["x_0"][:, 0], token[0].double().expand(len(X), 1, -1), 1e-6)
    assert parts.mean_shares(0) == {"x_0": pytest.approx(1)}
    assert adds_up(parts)
    assert sum(parts.mean_shares().values()) == pytest.approx(1)


def prompted(m, x):
    """Run two streams whose second token is replaced by a learned one before the third sublayer, as in deep prompt tuning."""
    streams = torch.stack([x, 0.5 * x], -2)
    for k in range(4):
        if k == 2:
            prompt = m.shifts[:2].expand(len(x), 1, -1, -1)
            streams = torch.cat([streams[:, :1], prompt, streams[:, 2:]], 1)
        streams = m.heads @ streams + m.gammas[:2, :1] * m.branch(k, streams.sum(-2)).unsqueeze(-2)
    return m.last(streams.sum(-2))


def test_tokens_joined_on_the_way_are_no_embeddings():
    parts = addnorm.decompose(make_steps(prompted), X)
    assert parts.sources == ["x_0", *(f"mlps.{k}" for k in range(4)), "joined tokens"]
    for depth in (3, 4, -1):
        of_depth = parts.components(depth)
        assert not of_depth["x_0"][:, 1].any()
        assert of_depth["joined tokens"][:, 1].any()
        assert not of_depth["joined tokens"][:, [0, 2, 3, 4]].any()
    assert "joined tokens" in parts.read(2)
    assert "joined tokens" not in parts.components(2)
    assert adds_up(parts)


def compute_logits(m, x):
    y = m.body(x)
    return m.head(y if isinstance(y, torch.Tensor) else y[0])


def add_head(body, width):
    """Return a model with a head whose logits are capped."""
    return Graph(lambda m, x: 30 * torch.tanh(compute_logits(m, x) / 30), body=body, head=nn.Linear(width, 11))


@pytest.mark.parametrize(
    "wiring", ["pre_ln", "post_ln", "deepnorm", "mhc", "attention_residuals", "deepseek_v4:DeepseekV4"]
)
def test_attributions_sum_to_the_logit_difference(wiring):
    if ":" in wiring:
        model, x = add_head(make_model(wiring, torch.float32), 32), torch.randint(4, 64, (2, 5))
    else:
        model, x = add_head(shake(encoder(wiring)), D), X
    with torch.no_grad():
        logits = compute_logits(model, x).double()
    parts = addnorm.decompose(model, x)
    found = parts.attribute_logits(model.head, 3, 7)
    assert [*found] == [*parts.normed_components(), "head bias"]
    assert is_close(sum(found.values()), logits[..., 3] - logits[..., 7])
    tokens = torch.randint(11, (2, 5))
    found = parts.attribute_logits(model.head.weight, tokens, 0)
    bias = model.head.bias.detach().double()
    expected = (logits - bias).gather(-1, tokens[..., None])[..., 0] - (logits - bias)[..., 0]
    assert is_close(sum(found.values()), expected)


def test_attribution_refuses_other_heads():
    parts = addnorm.decompose(encoder(), X)
    with pytest.raises(ValueError, match=r"head has the weight \(11, 8\), expected \(vocabulary, 16\)"):
        parts.attribute_logits(nn.Linear(8, 11), 0, 1)
    dual = addnorm.decompose(encoder("resi_dual"), X)
    with pytest.raises(ValueError, match="after the final norm"):
        dual.attribute_logits(nn.Linear(D, 11), 0, 1)
