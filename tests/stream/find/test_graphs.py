"""Tests of `inspect` on unusual graphs: it makes no false claims, and states a reason for unsupported parts."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from addnorm import inspect
from support.families import shake
from support.handwritten_models import IDS, Attention, D, Mlp, Tiny, make_input, pre
from support.inspection_checks import AFAF
from support.stream_steps import make_steps, repeat


def make_stack(*layers):
    return shake(nn.Sequential(*layers))


class Block(nn.Module):
    """Pre-LN layer."""

    def __init__(self, norm=lambda: nn.LayerNorm(D), attention=Attention, mlp=Mlp):
        super().__init__()
        self.n1, self.n2, self.a, self.m = norm(), norm(), attention(), mlp()

    def forward(self, x):
        x = x + self.a(self.n1(x))
        return x + self.m(self.n2(x))


class Residual(nn.Module):
    """Residual connection x + f(x) around any modules."""

    def __init__(self, *parts):
        super().__init__()
        self.f = nn.Sequential(*parts)

    def forward(self, x):
        return x + self.f(x)


# Rows in unusual spellings.


def test_inspect_finds_width_of_one_feature():
    inspection = inspect(
        make_stack(*(Residual(nn.LayerNorm(1), nn.Linear(1, 4), nn.GELU(), nn.Linear(4, 1)) for _ in range(2))),
        make_input(2, 5, 1),
    )
    assert (inspection.wiring, inspection.streams[0].width) == ("pre_ln", 1)


@pytest.mark.parametrize("num_layers", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_inspect_finds_many_layers(num_layers):
    inspection = inspect(make_stack(*(Block() for _ in range(num_layers))), make_input(1, 3, D))
    assert (inspection.wiring, len(inspection.sites), inspection.streams[0].num_layers) == (
        "pre_ln",
        2 * num_layers,
        num_layers,
    )


class Experts(nn.Module):
    def __init__(self, n=64):
        super().__init__()
        self.router, self.experts = nn.Linear(D, n), nn.ModuleList(Mlp() for _ in range(n))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            here = (chosen == k).any(-1)
            if here.any():
                out[here] += expert(x[here]) * (weights * (chosen == k)).sum(-1)[here][:, None]
        return out


class LoRa(nn.Module):
    """Linear map W x + B A x, which is no residual add."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.a = linear, nn.Linear(linear.in_features, 4, bias=False)
        self.b = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.b(self.a(x))


class Recurrent(nn.LSTM):
    def __init__(self):
        super().__init__(D, D, batch_first=True)

    def forward(self, x):
        return super().forward(x)[0]


def with_lora():
    model = Tiny(pre, final_norm=True)
    for part in model.parts:
        for name, linear in [*part.f.named_children()]:
            setattr(part.f, name, LoRa(linear))
    return shake(model)


class Crossing(Block):
    """Layer of a Perceiver: latents read an array."""

    def forward(self, inputs):
        z, array = inputs
        z = z + self.a(self.n1(z), array)
        return z + self.m(self.n2(z)), array


PRE_LN = {
    "sixty-four experts": (lambda: make_stack(*(Block(mlp=Experts) for _ in range(2)), nn.LayerNorm(D)), make_input(), [AFAF]),
    "LoRA": (with_lora, IDS, [AFAF]),
    "latents": (lambda: make_stack(Crossing(), Crossing()), (make_input(2, 4, D), make_input()), [["cross-attention", "feed-forward"] * 2]),
    "a sum of a list": (lambda: make_steps(repeat(lambda m, k, x: sum([x, m.branch(k, x)]))), make_input(), [["feed-forward"] * 4]),
    "from .data": (lambda: make_steps(repeat(lambda m, k, x: x.data + m.branch(k, x))), make_input(), [["feed-forward"] * 4]),
    "vmap": (lambda: make_steps(repeat(lambda m, k, x: torch.vmap(lambda y: y + m.branch(k, y))(x))), make_input(), [["feed-forward"] * 4]),
    "LSTM": (lambda: make_stack(*(Block(attention=Recurrent) for _ in range(2))), make_input(), [["other", "feed-forward"] * 2]),
    "shared norm and sublayer": (lambda: make_stack(*[Block()] * 3), make_input(), [["attention", "feed-forward"] * 3]),
}  # fmt: skip


@pytest.mark.parametrize("name", PRE_LN)
def test_inspect_finds_pre_ln_in_unusual_model(name):
    make, inputs, expected = PRE_LN[name]
    inspection = inspect(make(), inputs)
    assert inspection.unknown == ()
    assert [stream.wiring.name for stream in inspection.streams if stream.wiring] == ["pre_ln"] * len(expected)
    assert [[site.kind for site in stream.sites] for stream in inspection.streams] == expected
    assert inspection.closes


def test_inspect_follows_in_place_adds_through_views():
    def run(m, x):
        x = x.clone()
        turned = x.transpose(1, 2)
        for k in range(4):
            turned += m.branch(k, x).transpose(1, 2)
        return x

    inspection = inspect(make_steps(run), make_input())
    assert (inspection.wiring, len(inspection.sites), inspection.closes, inspection.unknown) == ("pre_ln", 4, True, ())


# Models that no row expresses.


def dense(m, x):
    states = [x]
    for k in range(4):
        states.append(m.branch(k, torch.stack(states).sum(0)))
    return torch.stack(states).sum(0)


def projected(m, x, axis=-1):
    """Multiply the output of an einsum, whose memory has the features first, by a matrix; or mix tokens."""
    weight = torch.eye(x.shape[axis]).roll(1, 0) * 0.5 * m.norms[0].weight[0]
    for k in range(4):
        x = torch.einsum("bnd,hd->bnd", x, m.norms[k].weight[None].expand(4, -1) * 0.25) if axis == -1 else x
        x = (x @ weight if axis == -1 else (x.transpose(1, 2) @ weight).transpose(1, 2)) + m.branch(k, x)
    return x


WITHOUT_ROWS = {
    "matrix on the features": (projected, "a matrix over its last dimension"),
    "matrix on the tokens": (lambda m, x: projected(m, x, axis=1), "it mixes states or tokens"),
    "dense connections": (dense, "a sum of three or more values"),
    "relu after the add": (
        repeat(lambda m, k, x: F.relu(x + m.branch(k, x))),
        "begins with a function of the end of another stream",
    ),
    "relu after the add, no norms": (repeat(lambda m, k, x: F.relu(x + m.mlps[k](x))), "a single add"),
}


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_inspect_explains_model_without_rows(name):
    run, reason = WITHOUT_ROWS[name]
    inspection = inspect(make_steps(run), make_input())
    assert inspection.wiring in ("none", "unknown") or name == "dense connections"
    assert any(reason in unknown.reason for unknown in inspection.unknown), inspection.unknown


class Snake(nn.Module):
    """Activation x + sin(x)^2, an add that is no sublayer."""

    def forward(self, x):
        return x + torch.sin(x).square()


NO_WIRING = {
    "residual convolutions, batch norms": (
        lambda: Residual(nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3, padding=1)), (2, 8, 9), 8,
    ),
    "group norms": (lambda: Residual(nn.GroupNorm(1, 8), nn.Conv1d(8, 8, 3, padding=1)), (2, 8, 9), 8),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_WIRING)
def test_inspect_names_no_wiring_with_other_norms(name):
    make, shape, width = NO_WIRING[name]
    inspection = inspect(nn.Sequential(*(make() for _ in range(3))), make_input(*shape))
    assert inspection.wiring == "unknown"
    assert inspection.closes
    assert len(inspection.sites) == 3
    assert inspection.streams[0].width == width
    assert inspection.streams[0].axis == shape.index(width) - len(shape)


def test_inspect_ignores_adds_in_activations():
    layers = [
        part
        for _ in range(2)
        for part in (Residual(Snake(), nn.Conv1d(8, 8, 3, padding=1)), Snake(), nn.Conv1d(8, 8, 1))
    ]
    inspection = inspect(nn.Sequential(*layers), make_input(2, 8, 9))
    assert inspection.sites == ()
    assert {unknown.path: "twice" in unknown.reason for unknown in inspection.unknown} == {"0": False, "1": False}


def test_inspect_explains_model_without_stream():
    for model, inputs in (
        (nn.LSTM(D, D, 2), make_input()),
        (nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)), make_input()),
    ):
        inspection = inspect(model, inputs)
        assert (inspection.wiring, inspection.sites, inspection.closes) == ("none", (), False)
        assert "no residual add was found" in inspection.unknown[0].reason


ROWS = torch.tensor([3, 0, 4, 1, 2])


@pytest.mark.parametrize(
    ("target", "kind"), [(ROWS.roll(1), "other"), (ROWS, "feed-forward")], ids=["edges", "experts"]
)
@pytest.mark.parametrize("spelling", ["index_add", "scatter_add", "index_put"])
def test_inspect_tells_messages_from_experts(target, kind, spelling):
    def send(rows):
        zeros = torch.zeros(5, D)
        if spelling == "index_add":
            return zeros.index_add(0, target, rows)
        if spelling == "scatter_add":
            return zeros.scatter_add(0, target[:, None].expand(5, D), rows)
        return zeros.index_put((target,), rows, accumulate=True)

    run = repeat(lambda m, k, x: x + send(m.mlps[k](m.norms[k](x)[ROWS])))
    inspection = inspect(make_steps(run), make_input(5, D))
    assert {site.kind for site in inspection.sites} == {kind}
