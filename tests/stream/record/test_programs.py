"""Tests of `record` on models with several streams, against the coefficients of models written by hand, and against autograd."""

import json
import math
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_map_only

import addnorm
from addnorm import wirings
from addnorm.stream.program.statistics import MATRICES
from addnorm.stream.record.schema import STATISTICS, find_statistic
from addnorm.wirings.coefficients.base import CoefficientModule
from support.expansion import record_mhc
from support.instrumented_model import REFERENCE, column, compare_write, compute_loss, record, similarity, step
from support.several_streams import FORMS, build_transformers, make_mhc
from support.stacks import encoder
from support.stream_steps import X


def exact(values, **options):
    return pytest.approx([float(value) for value in values], rel=1e-9, **options)


@pytest.mark.parametrize(("form", "masked"), [*((form, False) for form in FORMS), ("flat", True)])
def test_numbers_equal_formulas_of_recorded_run(form, masked):
    run = record_mhc(form, dtype=torch.float64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 2:] = not masked
    rec = record(run.model, run.x, tokens=mask if masked else None)
    states = [x[mask] for x in run.states]
    c, a, b, w = ([getattr(site, name)[mask] for site in run.sites] for name in "cabw")
    before, after = states[:-1], states[1:]
    writes = [inject[..., None] * write[..., None, :] for inject, write in zip(b, w, strict=True)]
    pairs = [compare_write((x - write).flatten(1), write.flatten(1)) for write, x in zip(writes, after, strict=True)]
    share = [(write * x).sum(-1) / x.square().sum(-1) for write, x in zip(writes, after, strict=True)]
    reads = [(collapse[..., None] * x).sum(-2) for collapse, x in zip(c, before, strict=True)]
    numbers = {
        ("in", "rms"): [*map(REFERENCE["rms"], before)],
        ("out", "l2"): [REFERENCE["l2"](x.flatten(1)) for x in after],
        ("out", "max_2"): [REFERENCE["max"](x[:, 2]) for x in after],
        ("out", "rms_3"): [REFERENCE["rms"](x[:, 3]) for x in after],
        ("raw", "rms"): [*map(REFERENCE["rms"], w)],
        ("write", "l2"): [REFERENCE["l2"](write.flatten(1)) for write in writes],
        ("write", "ratio"): [pair["ratio"] for pair in pairs],
        ("write", "cosine"): [pair["cosine"] for pair in pairs],
        ("write", "share_1"): [s[:, 1].mean() for s in share],
        ("norm_in", "rstd"): [(r.square().mean(-1) + 1e-6).rsqrt().mean() for r in reads],
    }
    for (role, statistic), values in numbers.items():
        assert column(rec, role, statistic) == exact(values), (role, statistic)
    matrices = {
        "forward": [(mix.sum(-1) - 1).abs().max() for mix in a],
        "backward": [(mix.sum(-2) - 1).abs().max() for mix in a],
        "concentration": [(p / p.sum(-1, keepdim=True)).square().sum(-1).mean() for p in c],
        "spread_C": [p.std(0, correction=0).mean() for p in c],
        "spread_B": [p.std(0, correction=0).mean() for p in b],
    }
    for name, values in matrices.items():  # without the first, whose state is one value, four times, in a tuple
        assert column(rec, "matrices", name)[-3:] == exact(values[-3:], abs=1e-12), name
    if not masked:
        expected = similarity(run.states[1].flatten(-2))
        assert column(rec, "out", "similarity")[0] == pytest.approx(expected, rel=1e-5)
    assert [site.id for site in rec.sites][:1] == ["x_0"]
    assert rec.metadata["wiring"] == "mhc"
    assert all(find_statistic(row.role, row.statistic) for row in rec.table())


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_autograd(form):
    """Compare with the gradients of the rest of the model, and the frozen ones with those of detached coefficients."""
    run = record_mhc(form, dtype=torch.float64)
    run.model.requires_grad_(False)
    rec = step(run.model, run.x.clone().requires_grad_())
    for role in ("grad", "grad_frozen"):
        assert len(column(rec, role, "l2")) == len(run.sites)
        for k, found in enumerate(column(rec, role, "l2")):
            state = run.states[k + 1].clone().requires_grad_()
            compute_loss(finish(run, state, k + 1, is_detached=role == "grad_frozen")).backward()
            assert found == pytest.approx(float(state.grad.flatten(-2).norm(dim=-1).mean()), rel=1e-9)
            of_stream = float(state.grad[..., 1, :].square().mean().sqrt())
            assert column(rec, role, "rms_1")[k] == pytest.approx(of_stream, rel=1e-9)
    assert column(rec, "grad", "l2") != pytest.approx(column(rec, "grad_frozen", "l2"), rel=1e-3)
    assert "frozen gradient" in str(rec)


@pytest.mark.parametrize("wiring", ["mhc", "hyper_connections", "gated_residual", "attention_residuals", "muddformer"])
def test_frozen_gradients_of_own_stacks(wiring):
    def record_grads(is_detached):
        model = encoder(wiring).double()
        for name, p in model.stack.named_parameters():
            if "coefficients" in name:
                torch.nn.init.normal_(p, std=0.3)
        for module in model.modules():
            if is_detached and isinstance(module, CoefficientModule):
                module.register_forward_hook(lambda module, args, out: tree_map_only(torch.Tensor, torch.detach, out))
        rec = step(model, X.double().requires_grad_())
        return [
            {(row.site, row.statistic): row.value for row in rec.table() if row.role == role}
            for role in ("grad", "grad_frozen")
        ]

    (whole, frozen), (detached, _) = map(record_grads, (False, True))
    assert frozen == pytest.approx(detached, rel=1e-5)
    assert frozen != pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("wiring", ["siamese_norm", "pre_ln", wirings.hyper_connections(dynamic=False)], ids=repr)
def test_fixed_coefficients_have_no_frozen_gradient(wiring):
    rec = step(encoder(wiring), X)
    assert rec.series("grad", "l2")
    assert not any(row.role == "grad_frozen" for row in rec.table())
    assert "frozen" not in str(rec)


def test_frozen_gradient_of_a_model_with_two_results_is_left_out():
    run = record_mhc("stacked")
    stack, seen = run.model.stack, []
    run.model.stack = lambda X: seen.append(stack(X)) or seen[-1]
    forward = run.model.forward
    run.model.forward = lambda x: (forward(x), seen[1] * 1.0)
    with addnorm.record(run.model) as rec:
        y, early = run.model(run.x)
        (y.square().sum() + early.square().sum()).backward()
    assert rec.series("grad", "l2")
    assert not rec.series("grad_frozen", "l2")
    assert "returns more" in rec.metadata["omitted"]["gradients with frozen coefficients"]


def finish(run, state, k, is_detached=False):
    """Return the output of the same model whose streams before sublayer k are `state`, `(B, T, n, d)`."""
    model = make_mhc().double()
    if is_detached:
        read, write = model.read, model.write
        model.read = lambda X, c: read(X, c.detach())
        model.write = lambda X, a, b, w: write(X, a.detach(), b.detach(), w)
    model.layers, model.start = torch.nn.ModuleList([torch.nn.ModuleList(model.sites[k:])]), lambda x: state
    return model(run.x)


@pytest.mark.parametrize(
    "name", ["deepseek_v4:DeepseekV4", "muse_spark:MuseSparkText", "mhc", "attention_residuals", "denseformer"]
)
def test_memory_map_is_that_of_decompose(name):
    model, x = (build_transformers(name), torch.randint(1, 60, (2, 5))) if ":" in name else (encoder(name), X)
    parts, mask = addnorm.decompose(model, x), torch.ones(2, 5)
    mask[1, 3:] = 0
    for tokens, count in ((None, 10), (mask, 8)):
        rec = record(model, x, tokens=tokens)
        sources, rows = parts.memory_map(tokens)
        (found, shares), sheet = rec.memory_maps["streams"], rec.balances["streams"]
        assert found == sources
        assert len(shares) == len(rec.sites) - ("final" in [site.id for site in rec.sites])
        for ours, theirs in zip(shares, rows, strict=False):
            assert ours == pytest.approx(theirs, abs=1e-6)
        assert sheet.tokens == count
        assert sheet.error < 1e-6
        assert sheet.stream_norm == pytest.approx(column(rec, "out", "l2")[-1], rel=1e-5)


def test_each_step_has_its_own_numbers():
    model = encoder("mhc", dropout=0.2).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with addnorm.record(model, every=2) as rec:
        for step in range(4):
            torch.manual_seed(step)
            before = torch.get_rng_state()
            model(torch.randn(2 + step, 5, 16)).square().sum().backward()
            assert not torch.equal(before, torch.get_rng_state())
            optimizer.step()
            optimizer.zero_grad()
    assert rec.steps == (0, 2)
    assert column(rec, "out", "rms", 0) != column(rec, "out", "rms", 2)
    assert len(column(rec, "grad", "l2", 2)) == len(column(rec, "params", "grad_l2", 0)) == 4


@pytest.mark.parametrize("size", [1e30, 1e38])
def test_a_forward_that_overflows_does_not_end_the_recording(size):
    model = encoder("mhc").train()
    with addnorm.record(model) as rec:
        for scale in (1.0, size, 1.0):
            model(X * scale).square().sum().backward()
    assert rec.steps == (0, 1, 2)
    assert "forward 1 is only in part recorded" in rec.metadata["note"]
    assert not rec.series("matrices", "forward", step=1)
    assert len(column(rec, "out", "rms", 1)) == len(column(rec, "out", "rms", 2)) == 4
    bad = {(spike.role, spike.statistic) for spike in rec.spikes() if spike.step == 1}
    assert {("out", "rms"), ("out", "rms_3"), ("in", "l2")} <= bad
    assert {spike.step for spike in rec.spikes()} == {1}
    assert rec.balances["streams"].amounts


def test_numbers_of_a_forward_that_overflows_are_those_of_its_streams():
    run = record_mhc("stacked")
    with addnorm.record(run.model) as rec:
        run.model(run.x)
        run.model(run.x * 1e30)
    assert "equations do not close" in rec.balances["streams"].reason
    assert column(rec, "out", "max", 1)[0] == pytest.approx(1e30 * float(run.x.abs().max()), rel=1e-2)
    assert math.isinf(column(rec, "out", "rms", 1)[0])


@pytest.mark.parametrize("wiring", ["siamese_norm", "x0_residual", "gated_mix"])
def test_sites_of_training_are_those_of_the_evaluation_before(wiring):
    model = encoder(wiring, dropout=0.1)
    with addnorm.record(model) as rec:
        model(X).square().sum().backward()
        model.train()(X).square().sum().backward()
    assert len(column(rec, "matrices", "spread_B", 0)) == len(column(rec, "matrices", "spread_B", 1))
    assert len(column(rec, "in", "rms_0", 0)) == len(column(rec, "in", "rms_0", 1)) == 4


@pytest.mark.parametrize(("make", "roundings"), [(make_mhc, 0), (partial(encoder, "mhc", dropout=0.3), 32)])
def test_recording_does_not_change_the_run(make, roundings):
    model = make().train()

    def train():
        torch.manual_seed(1)
        model.zero_grad()
        start = (X.clone().requires_grad_() * 1.0).requires_grad_()
        start.retain_grad()
        y = model(start)
        y.retain_grad()
        compute_loss(y).backward()
        return [start.grad, y.grad, *(p.grad.clone() for p in model.parameters())]

    before = train()
    with addnorm.record(model) as rec:
        recorded = train()
    assert len(column(rec, "grad_frozen", "l2")) == 4
    # While it is recorded, a stack calls norms as modules: 32 roundings of the largest number, as some gradients cancel to 0.
    limit = roundings * torch.finfo(torch.float32).eps * max(float(a.abs().max()) for a in before)
    assert all((a - b).abs().max() <= limit for a, b in zip(before, recorded, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, train(), strict=True))


def test_streams_that_are_passed_on_have_no_later_gradient():
    rec = step(encoder("attention_residuals"), X.clone().requires_grad_())
    by_site = {site.id: site for site, _ in rec.series("out", "rms")}
    assert len(by_site) == 5
    for k, site in enumerate(by_site):
        of_site = {name for _, place, _, role, name, _ in rec.table() if place == site and role == "grad"}
        streams = {int(name.partition("_")[2]) for name in of_site if "_" in name}
        assert streams == {k}, site


def test_streams_that_the_loss_does_not_use_have_gradient_zero():
    run, written = record_mhc("tuple"), []
    write = run.model.write
    run.model.write = lambda *args: written.append(write(*args)) or written[-1]
    with addnorm.record(run.model) as rec:
        run.model(run.x)
        streams = written[-3]  # of the second of four sublayers
        streams[0].square().sum().backward()
    assert column(rec, "grad", "rms_0")[1] == pytest.approx(
        float(2 * streams[0].detach().square().mean().sqrt()), rel=1e-5
    )
    assert column(rec, "grad", "rms_1")[1] == column(rec, "grad", "rms_3")[1] == 0.0
    assert len(column(rec, "grad", "l2")) == 2
    assert column(rec, "grad", "rms_1")[0] > 0


def test_other_calls_are_refused_in_a_sentence():
    model = encoder("mhc")
    with pytest.raises(ValueError, match=r"layers is \[7\], expected numbers from 0 to 1"):
        record(model, X, layers=[7])
    with pytest.raises(ValueError, match="tokens has shape"):
        record(model, X, tokens=torch.ones(3, 4))
    rec = record(model, X, layers=[1])
    assert [site.layer for site in rec.sites] == [None, 1, 1, None]


def test_a_recording_of_streams_has_all_matrices_and_drawings():
    rec = step(encoder("mhc"), X)
    assert rec.metadata["streams"]["streams"]["wiring"] == "mhc"
    assert {name for role, name, *_ in STATISTICS if role == "matrices"} == {
        row.statistic for row in rec.table() if row.role == "matrices"
    }
    for draw in (rec.plot.stream, rec.plot.gradients, rec.plot.writes, rec.plot.memory_map):
        assert draw().figure is not None


# `measure_streams`.


def test_statistics_are_those_of_a_recording():
    run = record_mhc("flat", dtype=torch.float64)
    rows = addnorm.stream.measure_streams(addnorm.inspect(run.model, run.x).program)
    rec = record(run.model, run.x)
    for name in MATRICES:
        assert [getattr(row, name) for row in rows] == pytest.approx(column(rec, "matrices", name), abs=1e-12)
    for k in range(4):
        assert [row.rms[k] for row in rows] == pytest.approx(column(rec, "in", f"rms_{k}"))
        assert [row.write_share[k] for row in rows] == pytest.approx(column(rec, "write", f"share_{k}"))
    # The iterations end with the rows.
    assert max(row.forward for row in rows) < 1e-5 < max(row.backward for row in rows)
    (first, *_), text = json.loads(json.dumps(rows.to_dict())), str(rows)
    assert first["site"] == rows[0].site
    assert first["rms"] == [*rows[0].rms]
    assert text.lower().count("backward") == 2  # in the heading, and in the note
    assert "write" in text
    assert "share" in text


def test_statistics_leave_out_constant_matrices():
    model = encoder("attention_residuals")
    rows = addnorm.stream.measure_streams(addnorm.inspect(model, X).program)
    assert all(row.forward is row.backward is row.spread_B is None for row in rows)
    assert rows[0].write_share == (0.0, 1.0)
    assert len(rows[-1].rms) == 4
    assert str(rows).lower().count("backward") == 1
    with pytest.raises(TypeError, match="program is NoneType"):
        addnorm.stream.measure_streams(None)
