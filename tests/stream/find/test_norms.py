"""Tests of `find_norms`: every spelling of a norm is matched with its eps; other formulas are not."""

import math

import pytest
import torch
from torch.nn import functional as F

from addnorm.stream.dataflow.flow_capture import FlowCapture
from addnorm.stream.dataflow.graph import DATA, Frame, Op, Value
from addnorm.stream.find.norms import find_norms, match_fused
from support.random_models import norms as random_norms
from support.random_models.norms import mean
from support.stream_steps import D, X, make_steps

EPS = 1e-6


def norms_of(formula, x=X, dtype=torch.float32):
    model = make_steps(lambda m, x: formula(x, m.gammas[0], m.shifts[0], m.heads[0, 0])).to(dtype)
    with torch.no_grad():
        flow = FlowCapture(model).run((x.to(dtype),), {})
    return find_norms(flow), flow


def squares(x):
    return mean(x.square())


# Beside those of test_random_models.py.
SPELLINGS = {
    # name: formula, kind, eps, true entries of to_dict()
    "RMSNorm, torch's eps": (lambda x, w, *_: F.rms_norm(x, (D,), w), "rms", torch.finfo(torch.float32).eps, {"weight"}),
    "RMSNorm of centred x": (lambda x, w, *_: F.rms_norm(x - mean(x), (D,), w, EPS), "layer", EPS, {"weight"}),
    "no eps": (lambda x, w, *_: x / squares(x).sqrt() * w, "rms", 0.0, {"weight"}),
    "unbiased": (lambda x, *_: (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + EPS), "layer", EPS, {"unbiased"}),
    "group norm of tokens": (lambda x, w, b, g: F.group_norm(x.flatten(0, 1), 1, w, b, EPS).view_as(x), "layer", EPS,
                             {"weight", "bias"}),
    "bound of the root": (lambda x, w, *_: x / squares(x).sqrt().clamp(min=0.1) * w, "rms", 0.1, {"weight"}),
    "ScaleNorm of centred x": (lambda x, w, b, g: g * F.normalize(x - mean(x), dim=-1, eps=EPS), "scale", EPS, {"weight"}),
    "LayerNorm by the length": (lambda x, w, b, g: F.normalize(x - mean(x), dim=-1, eps=EPS) * D**0.5 * w + b, "layer", EPS,
                                {"weight", "bias"}),
    "length with eps in the root": (lambda x, *_: x / (x.square().sum(-1, keepdim=True) + EPS).sqrt(), "scale", EPS, set()),
    "eps of float32": (lambda x, *_: x * torch.rsqrt(squares(x) + torch.tensor(EPS)), "rms", EPS, set()),
    "channels first": (lambda x, w, b, g: F.layer_norm(x.transpose(1, 2).contiguous().transpose(1, 2), (D,), w, b, EPS), "layer", EPS,
                       {"weight", "bias"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_find_norms_matches_spelling(name):
    formula, kind, eps, more = SPELLINGS[name]
    (norm,), flow = norms_of(formula)
    assert (norm.kind, norm.is_whole) == (kind, True)
    assert norm.eps == pytest.approx(eps, rel=1e-6)
    assert {key for key, value in norm.to_dict().items() if value is True} == more
    assert norm.error < 1
    y = flow.result.tensor
    assert torch.allclose(norm(norm.x.tensor.double()).float().reshape(y.shape), y, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, spelling in random_norms.SPELLINGS.items() if spelling.formula])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_find_norms_matches_spelling_in_dtype(name, dtype):
    spelling = random_norms.SPELLINGS[name]
    (norm,), _ = norms_of(lambda x, w, b, g: spelling.formula(x, w, b, EPS), dtype=dtype)
    assert norm.kind == spelling.kind


def test_fused_rms_norm_without_eps_has_the_eps_of_its_arithmetic():
    # CUDA runs F.rms_norm as one operator; its arithmetic, and so the default of eps, is float32 for bfloat16.
    value = Value(None, 0, torch.randn(2, D, dtype=torch.bfloat16), DATA, -1)
    func = torch.ops.aten._fused_rms_norm.default
    op = Op(0, "_fused_rms_norm", func, (value, [D], None, None), {}, [value], Frame("", 0, None), 0)
    op.outputs.append(value)
    assert match_fused(op).eps == torch.finfo(torch.float32).eps


OWN_FORMULAS = {
    # rescaled by a statistic of the token that is no root of the mean square
    "a cubed root": lambda x, *_: x / (squares(x) + EPS).pow(1 / 3),
    "twice the root": lambda x, *_: x / (2 * (squares(x) + EPS).sqrt()),
    "mean square, centred": lambda x, w, b, g: (x - mean(x)) * torch.rsqrt(squares(x) + EPS) * w + b,
    "median": lambda x, w, *_: x / (x.abs().median(-1, keepdim=True).values + EPS) * w,
}  # fmt: skip

OTHER_FORMULAS = {
    "of two axes": lambda x, *_: F.layer_norm(x, (5, D)),
    "of tokens": lambda x, *_: x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS),
    "of another value": lambda x, w, b, g: x * torch.rsqrt(squares(x + b) + EPS),
    "mean of another value": lambda x, w, *_: (x - mean(x * w)) / torch.sqrt(x.var(-1, keepdim=True) + EPS),
    "mean taken away": lambda x, *_: x - mean(x),
    "softmax": lambda x, *_: x.softmax(-1),
    "share of the sum": lambda x, *_: x / x.sum(-1, keepdim=True),
    "gate of a statistic": lambda x, *_: x * mean(x).sigmoid(),
    "rescaled and scaled back": lambda x, *_: (lambda s: (x / s).round() * s)(x.abs().amax(-1, keepdim=True)),
    "group norm": lambda x, *_: F.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "larger numerator": lambda x, *_: x[:, None].expand(2, 3, 5, D) * torch.rsqrt(squares(x) + EPS)[:, None],
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_FORMULAS)
def test_find_norms_finds_norm_of_own_formula(name):
    (norm,), flow = norms_of(OWN_FORMULAS[name])
    assert (norm.kind, norm.eps, norm.is_whole) == ("own", None, True)
    x = norm.x.tensor.double().flatten(0, 1)[:7]  # the formula holds for any number of tokens
    assert torch.allclose(norm(x).float(), flow.result.tensor.flatten(0, 1)[:7], atol=1e-5)


@pytest.mark.parametrize("name", OTHER_FORMULAS)
def test_find_norms_rejects_other_formula(name):
    norms, _ = norms_of(OTHER_FORMULAS[name])
    assert norms == []


def test_norm_of_heads_is_not_whole():
    (norm,), flow = norms_of(lambda x, *_: F.rms_norm(x.unflatten(-1, (2, 8)), (8,)).flatten(-2))
    assert not norm.is_whole
    assert all(value.norm is None for op in flow.ops for value in op.outputs)


def test_find_norms_finds_two_norms_of_one_x():
    norms, _ = norms_of(lambda x, w, *_: F.layer_norm(x, (D,), w) + F.rms_norm(x, (D,)))
    assert [norm.kind for norm in norms] == ["layer", "rms"]


@pytest.mark.parametrize(("fill", "size"), [(0.0, 2), (7.0, 2), (math.nan, 2), (0.0, 0)])
def test_find_norms_matches_special_values(fill, size):
    (norm,), _ = norms_of(lambda x, w, b, g: F.layer_norm(x, (D,), w, b, EPS), torch.full((size, 5, D), fill))
    assert norm.kind == "layer"
