"""Tests of `decompose`: components add up to the stream for every norm placement; the lens; errors."""

import pytest
import torch
from torch import nn

import addnorm
from support import stacks
from support.families import families, shake
from support.instrumented_model import record
from support.random_models.graphs import Graph
from support.stream_steps import D, make_steps, noise, repeat

WIRINGS = (
    "pre_ln", "sandwich", "peri_ln", "reordered", "layernorm_scaling", "no_norm", "parallel", "depth_mup", "layer_scale",
    "post_ln", "deepnorm", "mix_ln", "admin",
)  # fmt: skip


X = noise(2, 7, D)


def encoder(wiring, **options):
    return shake(stacks.encoder(wiring, 3, **options))


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_components_and_shares_add_up(wiring, norm):
    model = encoder(wiring, norm=norm)
    parts = addnorm.decompose(model, X)
    for depth in range(parts.depth + 1):
        total = torch.stack([*parts.components(depth).values()]).sum(0)
        assert (total - parts.state(depth)).norm() <= 1e-5 * parts.state(depth).norm()
    total = torch.stack([*parts.shares().values()]).sum(0)
    assert torch.allclose(total, torch.ones(2, 7, dtype=torch.float64))
    assert addnorm.decompose(model, X, float64=True).closure <= 1e-10


def head(y):
    return y @ torch.eye(D)[:, :5]


def transformer():
    return nn.Transformer(D, 2, 2, 2, 32, batch_first=True).eval()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: addnorm.decompose(encoder("pre_ln"), X).lens(), TypeError, "norm"),
        (
            lambda: addnorm.decompose(encoder("pre_ln"), X).lens(norm="cached"),
            ValueError,
            "'recompute' .* or 'frozen'",
        ),
        (lambda: addnorm.decompose(encoder("pre_ln"), X).components(7), IndexError, "expected a number from 0"),
        (lambda: addnorm.decompose(nn.Linear(D, D), X), ValueError, "no residual stream to decompose"),
        (lambda: addnorm.decompose(lambda x: x, 1), TypeError, r"expected a torch\.nn\.Module"),
        (
            lambda: addnorm.decompose(transformer(), X, X),
            ValueError,
            "stream is None, expected one of 'encoder', 'decoder'",
        ),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_stream_of_several():
    parts = addnorm.decompose(transformer(), X, X, stream="decoder")
    assert (parts.depth, parts.closure <= 1e-5) == (6, True)


def test_last_depth_is_the_output():
    model = encoder("pre_ln")
    outputs = addnorm.decompose(model, X).lens(head, norm="frozen")
    assert len(outputs) == 7
    assert torch.allclose(outputs[-1], head(model(X)), atol=1e-5)


def test_recompute_normalizes_each_depth():
    model = encoder("pre_ln")
    parts = addnorm.decompose(model, X)
    final = parts.stream.final_norm
    assert final is not None
    for state, y in zip([parts.state(k) for k in range(7)], parts.lens(norm="recompute"), strict=True):
        assert torch.allclose(y, final(state).float(), atol=1e-5)


def test_frozen_is_linear():
    """Compare the difference of two depths with the contributions of the writes between them."""
    parts = addnorm.decompose(encoder("pre_ln"), X, float64=True)
    final, lens = parts.stream.final_norm, parts.lens(norm="frozen")
    assert final is not None
    denominator = final.denominator(parts.state())
    writes = parts.components(2)
    of_two = sum(final.linear(writes[site.id], denominator) for site in parts.stream.sites[:2])
    assert torch.allclose(lens[2] - lens[0], of_two)


def test_final_norm_may_have_another_order_of_tokens():
    def run(m, x):
        x = x.transpose(0, 1)
        for k in range(3):
            x = x + m.branch(k, x.transpose(0, 1)).transpose(0, 1)
        return m.last(x.transpose(0, 1))

    model = make_steps(run)
    total = sum(addnorm.decompose(model, X).normed_components().values())
    assert torch.allclose(total.float(), model(X).transpose(0, 1), atol=1e-5)


def test_flattened_tokens():
    model, args, kwargs = families()["opt post"].build()
    assert addnorm.decompose(model, *args, **kwargs).closure < 1e-5


def test_adds_in_float64_are_cast_back():
    model = make_steps(repeat(lambda m, k, x: (x.double() + torch.tanh(m.branch(k, x)).double()).float(), count=2))
    parts = addnorm.decompose(model, X)
    assert 1e-10 < parts.closure < 1e-6  # the casts round
    components = parts.components(1)
    torch.testing.assert_close(components["x_0"], X.double())
    (write,) = (part for name, part in components.items() if name != "x_0")
    torch.testing.assert_close(write, torch.tanh(model.branch(0, X)).double())


def multiply(m, x, factor):
    if factor is KEPT:
        return x.masked_fill(~factor, 0.0)
    return x * m.scale if factor == "scale" else x if factor is None else x * factor


def make_multiplied(multiply=multiply):
    """Return a post-LN stream of three sublayers that is multiplied before and after each norm."""

    def run(m, x, before, after):
        for f, norm in zip(m.f, m.norm, strict=True):
            x = multiply(m, norm(multiply(m, x + f(x), before)), after)
        return x

    f, norm = (
        nn.ModuleList(make() for _ in range(3))
        for make in (lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh()), lambda: nn.LayerNorm(D, bias=False))
    )
    return shake(Graph(run, f=f, norm=norm, scale=nn.Parameter(torch.ones(D)))).double()


KEPT = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])[..., None]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0.5, None),
        ("scale", None),
        (KEPT, None),
        (None, -2.0),
        (None, "scale"),
        (None, KEPT.double()),
        (0.5, KEPT),
    ],
)
def test_factors_between_adds(before, after):
    model = make_multiplied()
    x = torch.randn(2, 7, D, dtype=torch.float64)
    parts = addnorm.decompose(model, x, before, after)
    assert parts.closure < 1e-12
    # By hand: the path of each source through the norms with the denominators of the sum.
    state = x
    components = [x]
    with torch.no_grad():
        for k, (f, norm) in enumerate(zip(model.f, model.norm, strict=True)):
            write = f(state)
            components.append(write)
            total = multiply(model, state + write, before)
            std = (total.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
            components = [multiply(model, part, before) for part in components]
            components = [(part - part.mean(-1, keepdim=True)) / std * norm.weight for part in components]
            state = norm(total)
            if k < 2:
                components = [multiply(model, part, after) for part in components]
                state = multiply(model, state, after)
    assert [*parts.components()] == ["x_0", "f.0", "f.1", "f.2"]
    torch.testing.assert_close([*parts.components().values()], components, rtol=1e-9, atol=1e-12)

    if all(factor is None or isinstance(factor, float) for factor in (before, after)):
        rec = record(model, x, before, after)
        assert rec.balances["stream"].reason == ""
        sources, rows = rec.memory_maps["stream"]
        assert [*parts.sources] == sources
        assert rows == [pytest.approx(row, rel=1e-9, abs=1e-12) for row in parts.memory_map()[1]]


def test_guards_of_values_in_range_are_no_factors():
    model = make_multiplied(lambda m, x, bound: x.clamp(-bound, bound))
    x = torch.randn(2, 7, D, dtype=torch.float64)
    assert addnorm.decompose(model, x, 20.0, 5.0).closure < 1e-12
    with pytest.raises(ValueError, match="the components add up to the stream with a relative error"):
        addnorm.decompose(model, x, 20.0, 0.5)
