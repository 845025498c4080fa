"""Tests of `record`: statistics, memory map and balance against the formulas on the tensors themselves."""

import copy
import math

import pytest
import torch
from torch import nn

import addnorm
from support.instrumented_model import BATCH, REFERENCE, TOKENS, D, Model, column, record, token_ids
from support.random_models.graphs import Graph
from support.stacks import torch_encoder
from support.stream_steps import X, make_steps


@pytest.mark.parametrize("post", [False, True], ids=["pre-LN", "post-LN"])
def test_norms_and_metadata(post):
    ids, normed = token_ids(), []
    model = Model(post)
    rec = record(model, ids)
    for block in model.blocks:
        for norm in (block.norm1, block.norm2):
            norm.register_forward_pre_hook(lambda module, args: normed.append(args[0].detach().double()))
    model(ids)
    norm = "norm_out" if post else "norm_in"
    rstds = [float((z.var(-1, correction=0) + 1e-5).rsqrt().mean()) for z in normed]
    assert column(rec, norm, "rstd") == pytest.approx(rstds, rel=1e-4)
    (name, metadata), *others = rec.metadata["streams"].items()
    assert (name, others, rec.metadata["unknown"]) == ("stream", [], [])
    assert metadata["wiring"] == ("post_ln" if post else "pre_ln")
    assert metadata["norms"] == "LayerNorm 1e-5"
    assert (metadata["closure"] is None) == post
    assert [*metadata["sites"]] == [site.id for site in rec.sites if site.kind not in ("start", "final")]
    assert all(site["closes"] and site["closure"] < 1e-5 for site in metadata["sites"].values())


def interrupted(between=lambda model, x: x, d=D):
    """Return a model of two sublayers, and between them a step that components cannot be propagated through."""

    def run(m, x):
        x = between(m, x + torch.tanh(m.one(x)))
        return x + torch.tanh(m.two(x))

    return Graph(run, one=nn.Linear(d, d), two=nn.Linear(d, d), scale=nn.Parameter(torch.rand(d) + 0.5))


def columns():
    """Return a table whose rows are tokens in its second layer: each norm there has the features of all columns."""

    def run(m, x):
        for k, (f, norm) in enumerate(zip(m.fs, m.norms, strict=True)):
            x = x.flatten(-2) if k == 2 else x
            x = norm(x + torch.tanh(f(x)))
        return x

    sizes = [D, D, TOKENS * D, TOKENS * D]
    return Graph(run, fs=nn.ModuleList(nn.Linear(d, d) for d in sizes), norms=nn.ModuleList(map(nn.LayerNorm, sizes)))


def mask(model, x):
    return x * (torch.arange(TOKENS) < 4)[None, :, None]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: interrupted(lambda model, x: x * model.scale), "multiplie"),
        (lambda: interrupted(mask), "the stream is multiplied or masked between add 1 and"),
        (
            lambda: interrupted(lambda model, x: torch.cat([x, x[:, :1]], 1)),
            "tokens join or leave the stream before add 2",
        ),
        (columns, f"a norm after add 1 normalizes a part of a token's {TOKENS * D} features"),
    ],
    ids=["scaled", "masked", "longer", "columns"],
)
def test_balance_gives_the_reason_without_amounts(make, reason):
    rec = record(make(), torch.randn(BATCH, TOKENS, D))
    (sheet,) = rec.balances.values()
    assert reason in sheet.reason
    assert (rec.memory_maps, sheet.sources, sheet.amounts) == ({}, (), ())


def test_balance_of_a_stream_times_zero():
    (sheet,) = record(interrupted(lambda model, x: x * 0.0), torch.randn(BATCH, TOKENS, D)).balances.values()
    assert sheet.reason == ""
    assert sheet.amounts == pytest.approx((0.0, 0.0, sheet.stream_norm), abs=1e-6)


def test_unchanged_elements():
    """Count the elements of a bfloat16 stream whose round-off is larger than the write."""
    model, x = interrupted().bfloat16(), 500 * torch.randn(2, 50, D).bfloat16()
    share = record(model, x).series("write", "unchanged")[0][1]
    with torch.no_grad():
        out = x + torch.tanh(model.one(x))
    assert share == pytest.approx(float((out == x).double().mean()), abs=1e-7)
    assert 0.2 < share < 1.0


STATES = {  # tokens of two features, and statistics by hand
    "a thousand medians exactly": ([(0.25, 0.25), (250, 0.25), (-0.25, 0.25)], {"top": 1000, "massive": 0}),
    "above a thousand medians": ([(0.25, 0.25), (250, -252), (-251, 0.25), (0.25, 0.25)], {"top": 1008, "massive": 2}),
    "a hundred exactly": ([(0.01, 0.01), (100, 0.01), (0.01, 0.01)], {"top": 10000, "massive": 0}),
    "above a hundred": ([(0.01, 0.01), (100, 0.01), (0.01, -101)], {"top": 10100, "massive": 1}),
    "a token of zeros": ([(0, 0), (3, 4), (0, 2), (0, 0)], {"similarity": 0.8}),
    "tokens of zeros and one more": ([(0, 0), (3, 4), (0, 0)], {"similarity": math.nan, "top": math.inf}),
    "nothing but zeros": ([(0, 0), (0, 0)], {"similarity": math.nan, "top": math.nan, "massive": 0}),
    "bfloat16 rounds the bound 106.93 to 107": (
        [(219 / 2048, 219 / 2048), (107, -219 / 2048)],
        {"massive": 1},
        torch.bfloat16,
    ),
    "float16 has no bound of 70000": ([(70, 70), (math.inf, 70)], {"massive": 1}, torch.float16),
}


@pytest.mark.parametrize("name", STATES)
def test_statistics_of_a_state(name):
    tokens, expected, dtype = (*STATES[name], torch.float32)[:3]
    rec = record(interrupted(d=2).to(dtype), torch.tensor([tokens], dtype=dtype))
    values = {statistic: rec.series("out", statistic)[0][1] for statistic in expected}
    assert values == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_median_of_a_large_state_is_of_all_features():
    # Two elements for each of the sample: every second feature.
    x = torch.tensor([9.0, 1.0, 1.0, 1.0]).expand(1, 8192, 4)
    assert record(interrupted(d=4), x).series("out", "top")[0][1] == pytest.approx(9.0, rel=1e-6)


def test_similarity_is_of_sequences_with_two_directions():
    x = torch.tensor([[(3.0, 4.0), (0.0, 0.0)], [(3.0, 4.0), (0.0, 2.0)]])
    assert record(interrupted(d=2), x).series("out", "similarity")[0][1] == pytest.approx(0.8, rel=1e-6)


def gated(m, x):
    """Run sublayers whose writes get their scale from an operator after them."""
    for k in range(2):
        f, gate = m.branch(k, x), torch.sigmoid(m.gammas[0])
        m.write = f * gate
        x = torch.addcmul(x, f, gate)
    return m.last(x)


def test_write_with_a_computed_scale():
    model = make_steps(gated)
    with addnorm.record(model) as rec:
        for _ in range(2):
            model(X)
            model.gammas.data.add_(1.0)
    assert column(rec, "write", "rms")[-1] == pytest.approx(REFERENCE["rms"](model.write), rel=1e-5)
    assert all(sum(row) == pytest.approx(1.0) for row in rec.memory_maps["stream"][1])


@pytest.mark.parametrize("norm_first", [False, True])
def test_memory_map_uses_the_weights_of_its_forward(norm_first):
    model = torch_encoder(norm_first, dropout=0.0).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with addnorm.record(model) as rec:
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            before = copy.deepcopy(model)
            optimizer.step()
    with addnorm.record(before) as expected:
        before(X).square().mean().backward()
        assert expected.memory_maps["stream"][1]
    assert rec.balances["stream"].reason == ""
    assert rec.memory_maps["stream"][0] == expected.memory_maps["stream"][0]
    for row, exact in zip(rec.memory_maps["stream"][1], expected.memory_maps["stream"][1], strict=True):
        assert row == pytest.approx(exact, abs=1e-6)
