"""Tests of `record`, `decompose` and `ablate` in every layout: each number against its formula on the model's own tensors."""

import statistics

import pytest
import torch
from torch import Tensor

import addnorm
from support.instrumented_model import REFERENCE, compare_write
from support.layout_models import MODELS, D, make

EXACT = {"rel": 1e-9, "abs": 1e-12}


def compute_loss(outputs):
    """Return a loss whose gradient differs between all elements."""
    generator = torch.Generator().manual_seed(7)
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([
        (y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum() for y in parts
    ]).sum()  # fmt: skip


def similarity(t):
    """Return the mean cosine between two tokens of a sequence, pair by pair."""
    cosines = [
        float(s[i] @ s[j] / (s[i].norm() * s[j].norm()))
        for s in t
        for i in range(len(s))
        for j in range(len(s))
        if i != j
    ]
    return sum(cosines) / len(cosines)


def top(t):
    magnitudes = t.abs().flatten().tolist()
    return max(magnitudes) / statistics.median(magnitudes)


def run(name):
    """Return a recording of one forward and backward, and the tensors of the same forward."""
    model, inputs = make(name)
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    with addnorm.record(model) as rec:
        compute_loss(model(*leaves)).backward()
    model.zero_grad()
    model.seen = {}
    compute_loss(model(*(t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs))).backward()
    seen, model.seen = model.seen, None
    return rec, seen, model, inputs


def column(rec, stream, role, statistic):
    return [value for site, value in rec.series(role, statistic, stream=stream) if site.layer is not None]


@pytest.fixture(scope="module", params=MODELS)
def recorded(request):
    return (request.param, *run(request.param))


def pair_streams(rec, seen):
    assert len(rec.streams) == len(seen) > 0
    assert all(seen.values())
    return [*zip(rec.streams, seen.values(), strict=True)]


def arranged(sublayer, name):
    return sublayer.arrange(getattr(sublayer, name)).detach()


ROLES = {"in": "x", "read": "read", "raw": "raw", "write": "raw"}
FORMULAS = {
    **{
        (role, name): lambda s, get=get, formula=formula: formula(arranged(s, get))
        for role, get in ROLES.items()
        for name, formula in REFERENCE.items()
    },
    **{
        ("write", name): lambda s, name=name: compare_write(arranged(s, "x"), arranged(s, "raw"))[name]
        for name in ("ratio", "cosine")
    },
}


def test_statistics_of_sublayers(recorded):
    _, rec, seen, *_ = recorded
    for stream, sublayers in pair_streams(rec, seen):
        for (role, statistic), formula in FORMULAS.items():
            values = column(rec, stream, role, statistic)
            assert values == pytest.approx([*map(formula, sublayers)], **EXACT), (role, statistic)


def test_statistics_and_gradients_of_states(recorded):
    _, rec, seen, *_ = recorded
    for stream, sublayers in pair_streams(rec, seen):
        states = [(sublayers[0].arrange, sublayers[0].x), *((s.arrange, s.out) for s in sublayers)]
        for statistic, formula in {**REFERENCE, "similarity": similarity, "top": top}.items():
            values = [value for _, value in rec.series("out", statistic, stream=stream)]
            expected = [formula(arrange(t).detach()) for arrange, t in states]
            assert values == pytest.approx(expected, **EXACT), statistic
        for statistic, formula in REFERENCE.items():
            values = [value for _, value in rec.series("grad", statistic, stream=stream)]
            expected = [formula(arrange(t.grad)) for arrange, t in states]
            assert values == pytest.approx(expected, **EXACT), statistic
    assert rec.metadata.keys().isdisjoint({"omitted", "note"})


def test_norms(recorded):
    _, rec, seen, *_ = recorded
    for stream, sublayers in pair_streams(rec, seen):
        inputs = [s.arrange(s.normed).detach() for s in sublayers if s.normed is not None]
        rstds = [1 / (((x - x.mean(-1, keepdim=True)).square().mean(-1) + 1e-5).sqrt()) for x in inputs]
        for statistic, reduce in (("rstd", Tensor.mean), ("rstd_min", Tensor.min), ("rstd_max", Tensor.max)):
            expected = [float(reduce(rstd)) for rstd in rstds]
            values = column(rec, stream, "norm_in", statistic)
            assert values == pytest.approx(expected, **EXACT), statistic


def test_balance_and_components_are_of_the_writes(recorded):
    name, rec, seen, model, inputs = recorded
    for stream, sublayers in pair_streams(rec, seen):
        sheet = rec.balances[stream]
        if name == "class token":
            assert sheet.reason == "tokens join or leave the stream before add 3"
            with pytest.raises(ValueError, match=sheet.reason):
                addnorm.decompose(model, *inputs)
            continue
        assert sheet.reason == ""
        x = arranged(sublayers[-1], "out")
        writes = [arranged(sublayers[0], "x"), *(arranged(s, "raw") for s in sublayers)]
        assert sheet.tokens == x.shape[0] * x.shape[1]
        amounts = [float(((write * x).sum(-1) / x.norm(dim=-1)).mean()) for write in writes]
        assert [*sheet.amounts] == pytest.approx(amounts, **EXACT)
        parts = addnorm.decompose(model, *inputs, stream=stream if len(rec.streams) > 1 else None)
        components, shares = parts.components(), parts.shares()
        assert len(components) == len(writes)
        for source, write in zip(components, writes, strict=True):
            assert components[source].shape[-1] == D
            assert REFERENCE["l2"](components[source]) == pytest.approx(REFERENCE["l2"](write), **EXACT)
            share = float(((write * x).sum(-1) / x.square().sum(-1)).mean())
            assert float(shares[source].mean()) == pytest.approx(share, **EXACT)


def test_mean_over_all_tokens(recorded):
    _, rec, seen, model, inputs = recorded
    inspection = addnorm.inspect(model, *inputs)
    for stream, name in zip(inspection.streams, seen, strict=True):
        for number in (0, len(stream.sites) - 1):
            with torch.no_grad():
                model.averaged = name, number
                expected = model(*inputs)
                model.averaged = None
                with addnorm.ablate(stream.sites[number], mode="mean"):
                    output = model(*inputs)
            assert output is not expected
            torch.testing.assert_close(output, expected)
    assert {site.id for site in inspection.sites} < {site.id for site in rec.sites}
