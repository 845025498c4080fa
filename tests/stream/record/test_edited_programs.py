"""Tests of `record` inside `ablate` and `scale_write` on several streams, against models edited by hand, in float64."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import addnorm
from support.families import shake
from support.instrumented_model import column, step
from support.several_streams import make_mhc
from support.stacks import encoder

CASES = [("hyper_connections", "half"), ("mhc", "zero"), ("mhc", "mean"), ("denseformer", "mean"), ("attention_residuals", "half"),
         ("gated_residual", "zero"), ("hand stacked", "zero"), ("hand tuple", "half"), ("hand batch", "mean")]  # fmt: skip


@torch.library.custom_op("addnorm_test::change_write", mutates_args=())
def change_write(w: torch.Tensor, mode: str) -> torch.Tensor:
    return w.mean((0, 1), keepdim=True).expand_as(w).clone() if mode == "mean" else w * {"zero": 0.0, "half": 0.5}[mode]


change_write.register_autograd(
    lambda ctx, dy: (change_write(dy, ctx.mode), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "mode", inputs[1]),
)


def edit(site, mode):
    return addnorm.scale_write(site, 0.5) if mode == "half" else addnorm.ablate(site, mode)


def edit_by_hand(model, k, mode):
    """Return a copy of the model whose sublayer k ends with an operator that changes its output."""
    edited = copy.deepcopy(model)
    if isinstance(model, addnorm.nn.Encoder):
        sublayers = [connection.sublayer for layer in edited.stack.layers for connection in layer.connections]
        last = [getattr(sublayer, "out_proj", None) or sublayer.down for sublayer in sublayers]
    else:
        last = [site.down for layer in edited.layers for site in layer]
    last[k].register_forward_hook(lambda module, args, out: change_write(out, mode))
    return edited


def build(name):
    model = make_mhc(name.removeprefix("hand ")) if name.startswith("hand") else shake(encoder(name))
    return model.double(), torch.randn(2, 5, 16, dtype=torch.float64)


def numbers(rec, without=()):
    rows = {(row.site, row.role, row.statistic): row.value for row in rec.table() if row.role not in without}
    return {key: value for key, value in rows.items() if value == value}


def assert_same(actual, expected):
    assert numbers(actual) == pytest.approx(numbers(expected), rel=1e-8, abs=1e-12)
    assert [site.id for site in actual.sites] == [site.id for site in expected.sites]
    maps = [rec.memory_maps.get("streams", ([], [])) for rec in (actual, expected)]
    assert maps[0][0] == maps[1][0]
    torch.testing.assert_close(maps[0][1], maps[1][1])


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_numbers_are_those_of_the_edited_model(name, mode):
    model, x = build(name)
    sites, whole = addnorm.inspect(model, x).program.sites, step(model, x)
    with edit(sites[1], mode):
        rec = step(model, x)
    assert_same(rec, step(edit_by_hand(model, 1, mode), x))
    assert numbers(rec) != pytest.approx(numbers(whole), rel=1e-2)
    assert rec.metadata["wiring"] == whole.metadata["wiring"]
    if mode != "mean":
        write = column(whole, "write", "l2")[1]
        assert column(rec, "write", "l2")[1] == pytest.approx({"zero": 0.0, "half": 0.5}[mode] * write)


@pytest.mark.parametrize("wiring", ["ngpt", "gated_mix"])
@pytest.mark.parametrize("mode", ["zero", "half", "mean"])
def test_normed_write_keeps_its_norm(wiring, mode):
    model, x = build(wiring)
    sites, whole = addnorm.inspect(model, x).program.sites, step(model, x)
    with addnorm.scale_write(sites[-1], 0.5) if mode == "half" else addnorm.ablate(sites[-1], mode):
        rec = step(model, x)
    for role, statistic in (
        ("raw", "rms"),
        ("norm_branch", "rstd"),
        ("norm_in", "rstd"),
        ("read", "rms"),
        ("params", "l2"),
    ):
        assert column(rec, role, statistic) == pytest.approx(column(whole, role, statistic)), role
    write, before = column(rec, "write", "l2"), column(whole, "write", "l2")
    assert write[:-1] == pytest.approx(before[:-1])
    if mode != "mean":
        assert write[-1] == pytest.approx(before[-1] * {"zero": 0.0, "half": 0.5}[mode])


@pytest.mark.parametrize("wiring", ["mhc", "denseformer"])
def test_each_order_and_nested_edits_multiply(wiring):
    model, x = build(wiring)
    site = addnorm.inspect(model, x).program.sites[1]
    with addnorm.scale_write(site, 0.25):
        expected = step(model, x)
    grads = [p.grad.clone() for p in model.parameters()]
    with addnorm.scale_write(site, 0.5), addnorm.scale_write(site, 0.5):
        assert_same(step(model, x), expected)
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
    with addnorm.scale_write(site, 0.5), addnorm.scale_write(site, 0.5):
        step(model, x)
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad)


@pytest.mark.parametrize("wiring", ["mhc", "attention_residuals"])
def test_training_with_dropout(wiring):
    """The add draws the dropout: the output before it is scaled."""
    model, x = shake(encoder(wiring, dropout=0.3)).double().train(), torch.randn(2, 5, 16, dtype=torch.float64)
    site, found = addnorm.inspect(model, x).program.sites[1], []
    for edited, s in ((model, 0.5), (edit_by_hand(model, 1, "half"), 1.0)):
        torch.manual_seed(1)
        with addnorm.scale_write(site, s):
            found.append(step(edited, x))
    assert_same(*found)
    with pytest.raises(RuntimeError, match="its dropout is drawn by the add"), addnorm.ablate(site, "mean"):
        pass


def test_autocast():
    model, x = make_mhc(), torch.randn(2, 5, 16)

    def run(function, *arguments):
        with torch.autocast("cpu", torch.bfloat16):  # each run in its own block, which keeps the casts of parameters
            return function(*arguments)

    site = run(addnorm.inspect, model, x).program.sites[1]
    with addnorm.scale_write(site, 0.5):
        rec = run(step, model, x)
    assert numbers(rec) == pytest.approx(numbers(run(step, edit_by_hand(model, 1, "half"), x)), rel=1e-5)


class Part(nn.Module):
    """Site of mHC by hand, whose branch is called in another way."""

    def __init__(self, site, wrap):
        super().__init__()
        self.site, self.fault, self.coefficients, self.branch = site, site.fault, site.coefficients, wrap(site.branch)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda branch: lambda read: checkpoint(branch, read, use_reentrant=False),
        lambda branch: lambda read: checkpoint(branch, read, use_reentrant=True),
        lambda branch: torch.compile(branch, backend="eager"),
    ],
    ids=["checkpoint", "reentrant", "compiled"],
)
def test_branches_that_are_called_in_another_way(wrap):
    whole, edited = [], []  # ablate disables checkpoints
    for way in (lambda branch: branch, wrap):
        model, x = build("hand stacked")
        model.layers = nn.ModuleList(nn.ModuleList(Part(site, way) for site in layer) for layer in model.layers)
        whole.append(step(model, x.requires_grad_()))
        with addnorm.ablate(addnorm.inspect(model, x).program.sites[1]):
            edited.append(step(model, x))
    assert column(edited[1], "write", "l2")[1] == 0.0
    for plain, other in (whole, edited):
        assert len(column(other, "grad_frozen", "rms")) == 4
        assert numbers(other) == pytest.approx(numbers(plain), rel=1e-8, abs=1e-12)


def test_everything_is_restored_after_an_error():
    model, x = build("mhc")
    site, whole = addnorm.inspect(model, x).program.sites[1], step(model, x)
    with pytest.raises(ValueError, match="x has shape"), addnorm.ablate(site), addnorm.record(model):
        model(torch.randn(2, 5, 17, dtype=torch.float64))
    with addnorm.ablate(site):
        with pytest.raises(ValueError, match="x has shape"), addnorm.record(model):
            model(torch.randn(2, 5, 17, dtype=torch.float64))
        rec = step(model, x)
    assert column(rec, "write", "l2")[1] == 0.0
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert_same(step(model, x), whole)


def test_ablated_nan_is_recorded():
    model, x = build("hand stacked")
    site = addnorm.inspect(model, x).program.sites[1]
    with torch.no_grad():
        model.layers[0][1].down.bias[0] = torch.nan
    with addnorm.ablate(site):
        rec = step(model, x)
    assert column(rec, "write", "l2")[1] == 0.0
    assert all(value == value for value in column(rec, "out", "rms"))


def test_streams_of_an_overflow_are_those_of_the_edited_model():
    model, x = make_mhc(), torch.randn(2, 5, 16)
    site = addnorm.inspect(model, x).program.sites[0]
    found = []
    for edited, s in ((model, 0.5), (edit_by_hand(model, 0, "half"), 1.0)):
        with addnorm.scale_write(site, s), addnorm.record(edited) as rec:
            edited(x)
            edited(x * 1e30)
        found.append(column(rec, "out", "max", 1))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_threads_do_not_see_each_other():
    (model, x), barrier = build("mhc"), threading.Barrier(2)

    def run(k):
        barrier.wait()
        return [model(x).detach() for _ in range(10)]

    with addnorm.ablate(addnorm.inspect(model, x).program.sites[1]):
        expected = model(x).detach()
        with ThreadPoolExecutor(2) as pool:
            found = [y for outputs in pool.map(run, range(2)) for y in outputs]
    for y in found:
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("s", [-0.5, 2.0])
def test_write_by_an_operator_that_saves_its_output(s):
    """The gradient of tanh is computed from its output, which is another one before the edit."""
    model, x = build("hand stacked")
    for site in (site for layer in model.layers for site in layer):
        site.branch = lambda read, site=site: torch.tanh(site.down(site.up(site.norm(read)).relu()))
    site = addnorm.inspect(model, x).program.sites[1]
    with addnorm.ablate(site):
        step(model, x)
    with addnorm.scale_write(site, s), pytest.raises(RuntimeError, match=r"written by tanh, whose gradient"):
        model(x)
    with addnorm.scale_write(site, s), torch.no_grad():
        model(x)


@pytest.mark.parametrize("wiring", ["post_ln", "pre_ln"])
def test_order_of_blocks_with_a_fused_add(wiring):
    """The sum that a fused operator does not return is computed from the changed write."""
    model, x = build(wiring)
    site = addnorm.inspect(model, x).sites[1]
    with addnorm.ablate(site), addnorm.record(model, grads=False) as rec, torch.no_grad():
        model(x)
    with addnorm.record(model, grads=False) as outer, addnorm.ablate(site), torch.no_grad():
        model(x)
    assert numbers(outer) == pytest.approx(numbers(rec), rel=1e-12)
