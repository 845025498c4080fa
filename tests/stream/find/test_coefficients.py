"""Tests that a name holds only if every coefficient does: of the stream, of the write, of a second stream."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import addnorm
from addnorm import Learned, inspect
from addnorm.stream.find.naming import identify_wiring
from stream.find.test_naming import BY_ROWS, summarize
from support.judge import rows_match
from support.stream_steps import X, inspect_steps, make_steps, noise, silence, stacked_sublayers

NUM_LAYERS = 3


def steps(add, norm_out=False):
    """Return the model of four sublayers: `add(m, x, f)` of the stream and an output."""

    def run(m, x):
        for k in range(4):
            x = add(m, x, m.mlps[k](x if norm_out else m.norms[k](x)))
            x = m.norms[k](x) if norm_out else x
        return x if norm_out else m.last(x)

    return make_steps(run)


SUMS = {
    "(x + f) + x": (lambda m, x, f: (x + f) + x, "unknown", "x' = 2 x + f(N(x))"),
    "in place": (lambda m, x, f: f.add_(x).add_(x), "unknown", "x' = 2 x + f(N(x))"),
    "2 x + f, post-LN": (lambda m, x, f: x + f + x, "unknown", "x' = N(2 x + f(x))"),
    "x + g f + x": (lambda m, x, f: x + m.gammas[0] * f + x, "unknown", "x' = 2 x + b ⊙ f(N(x))"),
    "(x + f) - x / 4": (lambda m, x, f: (x + f) - 0.25 * x, "unknown", "x' = 0.75 x + f(N(x))"),
    "x + 0.1 x.detach() + f": (lambda m, x, f: x + 0.1 * x.detach() + f, "unknown", "x' = 1.1 x + f(N(x))"),
    "x + (f + f)": (lambda m, x, f: x + (f + f), "residual_multiplier", "x' = x + 2 f(N(x))"),
    "lerp": (lambda m, x, f: torch.lerp(x, f, 0.25), "unknown", "x' = 0.75 x + 0.25 f(N(x))"),
    "a tensor of 2": (lambda m, x, f: torch.tensor(2.0) * x + f, "unknown", "x' = 2 x + f(N(x))"),
    "a parameter": (lambda m, x, f: m.heads[0, 0] * x + f, "unknown", "x' = a x + f(N(x))"),
    "0 added": (lambda m, x, f: sum([x, f]), "pre_ln", "x' = x + f(N(x))"),
}


@pytest.mark.parametrize("name", SUMS)
def test_inspect_counts_all_multiples_of_one_value(name):
    add, wiring, equation = SUMS[name]
    found = inspect(steps(add, norm_out="post-LN" in name), X)
    assert (found.wiring, found.closes) == (wiring, True)
    assert {site.equation.partition(", ")[0].strip() for site in found.sites} == {equation}


def test_learned_multiple_of_the_stream_is_no_sublayer():
    def run(m, x):
        x = x + m.mlps[0](m.norms[0](x))
        x = x + m.gammas[0] * x
        return m.last(x + m.mlps[1](m.norms[1](x)))

    found = inspect(make_steps(run), X)
    assert not found.closes
    assert [site.equation.partition(", ")[0] for site in found.sites] == [
        "x' = x + f(N(x))", "x' = x + b ⊙ injection", "x' = x + f(N(x))",
    ]  # fmt: skip


def test_inspect_refuses_write_of_two_operators():
    found = inspect(steps(lambda m, x, f: (x + f) + f), X)
    assert (found.wiring, found.closes) == ("unknown", False)


UNUSUAL = {name: steps(SUMS[name][0]) for name in ("(x + f) + x", "x + (f + f)")} | {
    "stack": make_steps(stacked_sublayers)
}


@pytest.mark.parametrize("model", UNUSUAL.values(), ids=UNUSUAL)
def test_ablate_removes_write_of_unusual_sum(model):
    def run():
        x = X.clone().requires_grad_()
        out = model(x)
        return out, *torch.autograd.grad(out, x, noise(*out.shape, seed=3))

    with addnorm.ablate(inspect(model, X).sites[1]):
        actual = run()
    silence(model, 1)
    torch.testing.assert_close(actual, run(), atol=1e-5, rtol=1e-5)
    assert addnorm.decompose(model, X).closure < 1e-5


def test_inspect_remarks_on_detached_part_of_residual():
    found = inspect(steps(SUMS["x + 0.1 x.detach() + f"][0]), X)
    (remark,) = found.streams[0].remarks
    assert remark.startswith("a part of the residual of 4 of its 4 sublayers is detached, ")


def make_layers(run):
    """Return the model of a forward with its sublayers in two layers of two."""
    model = make_steps(lambda m, x: run(SimpleNamespace(norms=m.norms, last=m.last, mlps=mlps), x))
    mlps = [*model.mlps[:4]]
    model.mlps = torch.nn.ModuleList(torch.nn.ModuleList(mlps[k : k + 2]) for k in (0, 2))
    return model


def skips(length):
    """Return a pre-LN forward of four sublayers that adds the state of `length` sublayers ago after each `length`."""

    def run(m, x):
        first = x
        for k in range(4):
            first = x if k % length == 0 else first
            x = x + m.mlps[k](m.norms[k](x))
            x = x + first if k % length == length - 1 else x
        return m.last(x)

    return run


@pytest.mark.parametrize(("length", "wiring", "remark"), [
    (2, "unknown", "every layer adds an earlier state once more"),
    (4, "pre_ln", "an earlier state is added once more, which this wiring does not do"),
])  # fmt: skip
def test_inspect_names_no_wiring_with_skip_in_each_layer(length, wiring, remark):
    found = inspect(make_layers(skips(length)), X)
    assert (found.wiring, found.closes) == (wiring, True)
    assert found.streams[0].remarks == (remark,)


def bottom_to_top(skip=1.0, inner=1.0, outer=1.0, add=lambda x, h, f: h + f + x):
    def run(m, x):
        for k in (0, 2):
            h = m.norms[k](x + times(inner, m.mlps[k](x)))
            x = m.norms[k + 1](add(times(skip, x), h, times(outer, m.mlps[k + 1](h))))
        return x

    return run


def resi_dual(start=1.0, decay=1.0, write=1.0, second=1.0, end=1.0):
    def run(m, x):
        u, v = times(start, x), x
        for k in range(4):
            f = m.mlps[k](u)
            u, v = m.norms[k](u + times(write, f)), times(decay, v) + times(second, f)
        return u + times(end, m.last(v))

    return run


def times(factor, x):
    return x if factor == 1.0 else factor * x


@pytest.mark.parametrize("change", [
    {}, {"skip": 0.5}, {"skip": -1.0}, {"inner": 0.5}, {"outer": 2.0},
], ids=str)  # fmt: skip
def test_inspect_names_bottom_to_top_by_all_factors(change):
    found = inspect(make_layers(bottom_to_top(**change)), X)
    assert (found.wiring == "b2t") == (not change)


ORDERS = {
    "x + (h + f)": lambda x, h, f: x + (h + f), "(h + f) + x": lambda x, h, f: (h + f) + x,
    "(x + f) + h": lambda x, h, f: (x + f) + h, "(x + h) + f": lambda x, h, f: (x + h) + f,
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_order_of_the_sums_of_bottom_to_top_is_no_difference(order):
    found = addnorm.verify(make_layers(bottom_to_top(add=ORDERS[order])), X, wiring="b2t")
    assert found.agrees, str(found)
    assert found.inspection.program.sizes == [1, 2] * 2 + [1]


@pytest.mark.parametrize("change", [
    {}, {"start": 2.0}, {"decay": 0.9}, {"write": 2.0}, {"second": 2.0}, {"write": 2.0, "second": 2.0}, {"end": 0.5}, {"end": -1.0},
], ids=str)  # fmt: skip
def test_inspect_names_resi_dual_by_all_factors(change):
    found = inspect_steps(resi_dual(**change))
    assert (found.wiring == "resi_dual") == (not change)
    assert found.closes == (change.keys() <= {"write"})  # otherwise the second stream is in no row


def change_factor(factor):
    """Return other factors than this one."""
    if isinstance(factor, Learned):
        return [1.0, replace(factor, per_feature=not factor.per_feature)]
    return [1.01 * factor, -factor, Learned(factor)]


@pytest.mark.parametrize("wiring", BY_ROWS, ids=lambda wiring: wiring.name)
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_identify_wiring_compares_each_factor(wiring, name):
    """A wiring that is named in spite of a changed factor must have that factor."""
    rows = wiring.rows(NUM_LAYERS)
    for at in ((0,), (3,), range(len(rows))):
        for factor in change_factor(getattr(rows[at[0]], name)):
            changed = [replace(row, **{name: factor}) if k in at else row for k, row in enumerate(rows)]
            named, _ = identify_wiring(summarize(changed), wiring.ends_in_norm(NUM_LAYERS), wiring.embedding_norm, None)
            assert named is None or all(map(rows_match, named.rows(NUM_LAYERS), changed)), (named, changed[at[0]])
