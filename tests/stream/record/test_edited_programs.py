"""Tests of `ablate` and `scale_write` on several streams, and of `record` inside them, against models edited by hand."""

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import addnorm
from support.families import shake
from support.instrumented_model import assert_same_numbers, column, record, step
from support.scaled_model import change_write, edit, run_backward
from support.several_streams import make_mhc
from support.stacks import encoder
from support.stream_steps import X

CASES = [("hyper_connections", 0.5), ("mhc", 0.0), ("mhc", "mean"), ("denseformer", "mean"), ("attention_residuals", 0.5),
         ("gated_residual", 0.0), ("hand stacked", 0.0), ("hand tuple", 0.5), ("hand batch", "mean")]  # fmt: skip


@torch.library.custom_op("addnorm_test::change", mutates_args=())
def change(w: torch.Tensor, scale: str) -> torch.Tensor:
    return change_write(w, scale if scale == "mean" else float(scale)).clone()


change.register_autograd(
    lambda ctx, dy: (change(dy, ctx.scale), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[1]),
)


def edit_by_hand(model, k, scale):
    """Return a copy of the model whose sublayer k ends with an operator that changes its output."""
    edited = copy.deepcopy(model)
    if isinstance(model, addnorm.nn.Encoder):
        sublayers = [connection.sublayer for layer in edited.stack.layers for connection in layer.connections]
        last = [getattr(sublayer, "out_proj", None) or sublayer.down for sublayer in sublayers]
    else:
        last = [site.down for site in edited.sites]
    last[k].register_forward_hook(lambda module, args, out: change(out, str(scale)))
    return edited


def build(name, k=1):
    """Return a model, its input and its sublayer k."""
    model = make_mhc(name.removeprefix("hand ")) if name.startswith("hand") else shake(encoder(name))
    model, x = model.double(), X.double()
    return model, x, addnorm.inspect(model, x).site(k)


def assert_same(actual, expected):
    assert_same_numbers(actual, expected)
    assert [site.id for site in actual.sites] == [site.id for site in expected.sites]
    maps = [rec.memory_maps.get("streams", ([], [])) for rec in (actual, expected)]
    assert maps[0][0] == maps[1][0]
    torch.testing.assert_close(maps[0][1], maps[1][1])


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_numbers_are_those_of_the_edited_model(name, scale):
    model, x, site = build(name)
    whole = step(model, x)
    edited = edit_by_hand(model, 1, scale)
    with edit(site, scale):
        y, rec = model(x), step(model, x)
    torch.testing.assert_close(y, edited(x))
    assert_same(rec, step(edited, x))
    write, before = (column(each, "write", "l2")[1] for each in (rec, whole))
    assert write != pytest.approx(before, rel=1e-2)
    assert rec.metadata["wiring"] == whole.metadata["wiring"]
    if scale != "mean":
        assert write == pytest.approx(scale * before)


@pytest.mark.parametrize("wiring", ["ngpt", "gated_mix"])
@pytest.mark.parametrize("scale", [0.0, 0.5, "mean"])
def test_normed_write_keeps_its_norm(wiring, scale):
    model, x, site = build(wiring, -1)
    whole = step(model, x)
    with edit(site, scale):
        rec = step(model, x)
    for role, statistic in (
        ("raw", "rms"),
        ("norm_branch", "rstd"),
        ("norm_in", "rstd"),
        ("read", "rms"),
        ("params", "l2"),
    ):
        expected = column(whole, role, statistic)
        assert expected or (wiring, role) == ("ngpt", "norm_in")
        assert column(rec, role, statistic) == pytest.approx(expected), role
    write, before = column(rec, "write", "l2"), column(whole, "write", "l2")
    assert write[:-1] == pytest.approx(before[:-1])
    if scale != "mean":
        assert write[-1] == pytest.approx(before[-1] * scale)


@pytest.mark.parametrize("wiring", ["mhc", "denseformer"])
def test_each_order_and_nested_edits_multiply(wiring):
    model, x, site = build(wiring)
    with addnorm.scale_write(site, 0.25):
        expected = step(model, x)
    grads = [p.grad.clone() for p in model.parameters()]
    with addnorm.scale_write(site, 0.5), addnorm.scale_write(site, 0.5):
        assert_same(step(model, x), expected)
    torch.testing.assert_close([p.grad for p in model.parameters()], grads)
    model.zero_grad()
    with addnorm.record(model) as rec, addnorm.scale_write(site, 0.5):
        y = model(x)
        with addnorm.scale_write(site, 0.5):
            (model(x) * y.detach().sign()).sum().backward()
        with addnorm.record(model) as inner, addnorm.scale_write(site, 0.5):
            model(x)
    assert [column(inner, "out", name) for name in ("rms", "l2")] == [
        column(rec, "out", name, 2) for name in ("rms", "l2")
    ]
    for name in ("rms", "max"):
        assert column(rec, "out", name, 1) == pytest.approx(column(expected, "out", name))
        assert column(rec, "out", name, 0) != pytest.approx(column(expected, "out", name))


@pytest.mark.parametrize("wiring", ["mhc", "attention_residuals"])
def test_training_with_dropout(wiring):
    """The add draws the dropout: the output before it is scaled."""
    model, x = shake(encoder(wiring, dropout=0.3)).double().train(), X.double()
    site, found = addnorm.inspect(model, x).site(1), []
    for edited, s in ((model, 0.5), (edit_by_hand(model, 1, 0.5), 1.0)):
        torch.manual_seed(1)
        with addnorm.scale_write(site, s):
            found.append(step(edited, x))
    assert_same(*found)
    with pytest.raises(RuntimeError, match="its dropout is drawn by the add"), addnorm.ablate(site, "mean"):
        pass


def test_autocast():
    model = make_mhc()

    def run(function, *arguments):
        with torch.autocast("cpu", torch.bfloat16):  # each run in its own block, which keeps the casts of parameters
            return function(*arguments)

    site = run(addnorm.inspect, model, X).site(1)
    with addnorm.scale_write(site, 0.5):
        rec = run(step, model, X)
    assert_same_numbers(rec, run(step, edit_by_hand(model, 1, 0.5), X), rtol=1e-5)


def record_both(wrap):
    """Return the recordings of a model whose branches are wrapped: as it is, and ablated, which disables checkpoints."""
    model, x = make_mhc().double(), X.double()
    for site in model.sites:
        site.branch = wrap(site.branch)
    whole = step(model, x.requires_grad_())
    with addnorm.ablate(addnorm.inspect(model, x).site(1)):
        return whole, step(model, x)


@pytest.fixture(scope="module")
def plain():
    """Return the recordings of a model whose branches are called as they are."""
    return record_both(lambda branch: branch)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda branch: lambda read: checkpoint(branch, read, use_reentrant=False),
        lambda branch: lambda read: checkpoint(branch, read, use_reentrant=True),
        lambda branch: torch.compile(branch, backend="eager"),
    ],
    ids=["checkpoint", "reentrant", "compiled"],
)
def test_branches_that_are_called_in_another_way(wrap, plain):
    found = record_both(wrap)
    assert column(found[1], "write", "l2")[1] == 0.0
    for other, expected in zip(found, plain, strict=True):
        assert len(column(other, "grad_frozen", "rms")) == 4
        assert_same_numbers(other, expected)


def test_everything_is_restored_after_an_error():
    model, x, site = build("mhc")
    whole, wider = step(model, x), torch.cat([x, x[..., :1]], -1)
    with pytest.raises(ValueError, match="x has shape"), addnorm.ablate(site), addnorm.record(model):
        model(wider)
    with addnorm.ablate(site):
        with pytest.raises(ValueError, match="x has shape"), addnorm.record(model):
            model(wider)
        rec = step(model, x)
    assert column(rec, "write", "l2")[1] == 0.0
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert_same(step(model, x), whole)


def test_ablated_nan_is_recorded():
    model, x, site = build("hand stacked")
    with torch.no_grad():
        model.layers[0][1].down.bias[0] = torch.nan
    with addnorm.ablate(site):
        rec = step(model, x)
    assert column(rec, "write", "l2")[1] == 0.0
    assert [*map(math.isfinite, column(rec, "out", "rms"))] == [True] * 4


def test_streams_of_an_overflow_are_those_of_the_edited_model():
    model = make_mhc()
    site = addnorm.inspect(model, X).site(0)
    found = []
    for edited, s in ((model, 0.5), (edit_by_hand(model, 0, 0.5), 1.0)):
        with addnorm.scale_write(site, s), addnorm.record(edited) as rec:
            edited(X)
            edited(X * 1e30)
        found.append(column(rec, "out", "max", 1))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_threads_do_not_see_each_other():
    (model, x, site), barrier = build("mhc"), threading.Barrier(2)

    def run(k):
        barrier.wait()
        return [model(x).detach() for _ in range(10)]

    with addnorm.ablate(site):
        expected = model(x).detach()
        with ThreadPoolExecutor(2) as pool:
            found = [y for outputs in pool.map(run, range(2)) for y in outputs]
    for y in found:
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("s", [-0.5, 2.0])
def test_write_by_an_operator_that_saves_its_output(s):
    """The gradient of tanh is computed from its output, which is another one before the edit."""
    model, x = make_mhc().double(), X.double()
    for site in model.sites:
        site.branch = lambda read, site=site: torch.tanh(site.down(site.up(site.norm(read)).relu()))
    site = addnorm.inspect(model, x).site(1)
    with addnorm.ablate(site):
        step(model, x)
    with addnorm.scale_write(site, s), pytest.raises(RuntimeError, match=r"written by tanh, whose gradient"):
        model(x)
    with addnorm.scale_write(site, s), torch.no_grad():
        model(x)


@pytest.mark.parametrize("wiring", ["post_ln", "pre_ln"])
def test_order_of_blocks_with_a_fused_add(wiring):
    """The sum that a fused operator does not return is computed from the changed write."""
    model, x, site = build(wiring)
    with addnorm.ablate(site):
        rec = record(model, x)
    with addnorm.record(model, grads=False) as outer, addnorm.ablate(site), torch.no_grad():
        model(x)
    assert_same_numbers(outer, rec, rtol=1e-12)


@pytest.mark.parametrize("wiring", ["ngpt", "gated_mix"])
def test_changed_normed_write_equals_edited_model_to_the_bit(wiring):
    model = shake(encoder(wiring))
    site, before = addnorm.inspect(model, X).site(1), model(X)
    edited = copy.deepcopy(model)
    edited.stack.layers[0].connections[1].norm_branch.register_forward_hook(lambda module, args, out: 0.5 * out)
    expected = run_backward(edited, X)
    with addnorm.scale_write(site, 0.5):
        actual = run_backward(model, X)
    assert torch.equal(actual[0], expected[0])
    assert not torch.equal(actual[0], before)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(model(X), before)
