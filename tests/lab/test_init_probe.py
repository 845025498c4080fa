"""Tests of `addnorm.lab.init_probe`."""

import contextlib
import math

import pytest
import torch

import addnorm
from addnorm import wirings
from addnorm.lab import InitProbe
from addnorm.lab.init_probe import PLACEMENTS
from addnorm.wirings.catalog import deepnorm_constants
from support.equality import assert_same
from support.lab_runs import RECORDED
from support.pairwise import rotate
from support.refusals import make_test

CHANGED = [
    {}, {"alpha": 1.5}, {"norm": "rms"}, {"residual": False}, {"final_norm": True}, {"final_norm": False}, {"gain": 0.3},
    {"tokens": 1}, {"d_model": 12, "tokens": 5},
]  # fmt: skip


STATISTICS = {**RECORDED, "stream": ("out", "l2"), "cosine": ("write", "cosine")}


def as_a_model(probe):
    """Return the stack as a plain model, its x_0 and its loss."""
    stack, x, v = probe.build()
    return torch.nn.Sequential(stack), x, lambda y: (y * v).sum()


@pytest.mark.parametrize(("placement", "change"), [*zip(PLACEMENTS, CHANGED[:3] * 2, strict=True)], ids=str)
def test_init_probe_matches_record(placement, change):
    wiring_name = PLACEMENTS[placement].__name__.replace("_", "-").title()  # as the field writes it
    probe = InitProbe(wiring_name, sublayers=6, d_model=16, tokens=5, **change)
    assert probe == InitProbe(placement, sublayers=6, d_model=16, tokens=5, **change)
    result = probe.measure()
    model, x, loss = as_a_model(probe)
    with addnorm.record(model) as rec:
        loss(model(x.requires_grad_())).backward()
    for name, series in STATISTICS.items():
        scale = 4 if name == "stream" else 1  # the stream's norm is divided by the root of d_model
        values = [value / scale for site, value in rec.series(*series) if site.kind not in ("start", "final")]
        assert values == pytest.approx(result[name][1:], rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize(("change", "placement"), rotate(CHANGED, [*PLACEMENTS], 2), ids=str)
def test_init_probe_map_matches_decompose(placement, change):
    probe = InitProbe(placement, **{"sublayers": 6, "d_model": 16, "tokens": 5} | change)
    result = probe.measure()
    model, x, _ = as_a_model(probe)
    parts = addnorm.decompose(model, x)
    for depth in range(7):
        of = {name: float(share.mean()) for name, share in parts.shares(depth).items()}
        assert [*of.values()][: depth + 1] == pytest.approx(
            [row[depth] for row in result["map"][: depth + 1]], abs=1e-5
        )
        assert all(row[depth] is None for row in result["map"][depth + 1 :])
    assert result["closure"] < 1e-5
    for low, mean, high in zip(result["low"], result["stream"], result["high"], strict=True):
        assert low <= mean * (1 + 1e-9)
        assert mean <= high * (1 + 1e-9)
    assert (result["similarity"][0] is None) == (probe.tokens == 1)


def test_direct_path_is_the_product_of_the_slopes_of_the_norms():
    assert InitProbe("pre", sublayers=6, d_model=16).measure()["direct_path"] == [1.0] * 7
    post = InitProbe("post", sublayers=6, d_model=16, tokens=5)
    stack, x, _ = post.build()
    path = torch.ones(5)
    with torch.no_grad():
        stream = x
        for connection in stack.connections:
            total = stream + connection.sublayer(stream)
            path = path / (total.var(-1, correction=0) + 1e-5).sqrt()[0]
            stream = connection(stream)
    assert post.measure()["direct_path"][0] == pytest.approx(float(path.mean()), rel=1e-4)


def test_init_probe_weights_are_shared():
    weights = {name: [p.clone() for p in InitProbe(name, sublayers=4).build()[0].parameters()] for name in PLACEMENTS}
    for name in ("pre", "sandwich", "reordered", "none"):
        assert_same(weights[name], weights["post"])
    deep = [*InitProbe("post", sublayers=8).build()[0].parameters()]
    assert_same(deep[: len(weights["post"])], weights["post"])
    beta = deepnorm_constants("encoder-only", 2)[1]
    stack, plain = InitProbe("deepnorm", sublayers=4).build()[0], InitProbe("post", sublayers=4).build()[0]
    for first, other in zip(stack.connections, plain.connections, strict=True):
        for (role, a), (_, b) in zip(first.sublayer.weight_roles(), other.sublayer.weight_roles(), strict=True):
            torch.testing.assert_close(a, b * (1.0 if role in ("query", "key") else beta))


@pytest.mark.parametrize("around", [
    torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu"), lambda: torch.device("meta"), lambda: default_dtype(torch.float64),
], ids=["no_grad", "inference_mode", "autocast", "device", "default_dtype"])  # fmt: skip
def test_init_probe_ignores_global_settings(around):
    probe = InitProbe("pre", sublayers=4, d_model=8)
    alone = probe.measure()
    with around():
        assert probe.measure() == alone


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_init_probe_wiring():
    assert InitProbe("pre").wiring == wirings.pre_ln()
    assert InitProbe("deepnorm").wiring == wirings.deepnorm()
    assert str(InitProbe("pre", final_norm=False).wiring.equation()) == "x' = x + f(N(x))"
    assert str(InitProbe("post", residual=False).wiring.equation()) == "x' = N(f(x))"
    assert str(InitProbe("none", alpha=2.0).wiring.equation()) == "x' = 2 x + f(x)"
    assert InitProbe("deepnorm", sublayers=8).wiring.row(0, 0, 4).a == pytest.approx(8**0.25)


def test_init_probe_reports_overflow():
    result = InitProbe("none", sublayers=96, gain=3.0).measure()
    assert not math.isfinite(result["stream"][-1])
    assert not math.isfinite(result["closure"])


REFUSED = {
    "placement is 'front', expected": lambda: InitProbe("front"),
    "sublayers is 5, expected an even number": lambda: InitProbe(sublayers=5),
    "sublayers is 0": lambda: InitProbe(sublayers=0),
    "norm is 'batch'": lambda: InitProbe(norm="batch"),
    "gain is -0.5, expected a number that is not negative": lambda: InitProbe(gain=-0.5),
    "alpha is nan, expected a finite number, or None": lambda: InitProbe(alpha=math.nan),
    "expected a whole number below 2": lambda: InitProbe(seed=2**63),
    "residual is 1": lambda: InitProbe(residual=1),
    "final_norm is 1": lambda: InitProbe(final_norm=1),
}


test_init_probe_refuses_wrong_arguments = make_test(REFUSED)
