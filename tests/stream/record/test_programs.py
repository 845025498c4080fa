"""Tests of `record` on models with several streams, against the coefficients of models written by hand, and against autograd."""

import json

import pytest
import torch

import addnorm
from addnorm.lab.streams import StreamsRecorder
from addnorm.stream.record.schema import STATISTICS, find_statistic
from support.expansion import record_mhc
from support.several_streams import FORMS, HandMhc, build_transformers


def at(rec, role, name, step=None):
    """Return a statistic of each sublayer."""
    return [value for site, value in rec.series(role, name, step) if site.layer is not None]


def exact(values, **options):
    return pytest.approx([float(value) for value in values], rel=1e-9, **options)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_equal_formulas_of_recorded_run(form):
    run = record_mhc(form, dtype=torch.float64)
    with addnorm.record(run.model) as rec:
        run.model(run.x)
    after, before = run.states[1:], run.states[:-1]
    writes = [site.b[..., None] * site.w[..., None, :] for site in run.sites]
    assert at(rec, "in", "rms") == exact([x.square().mean().sqrt() for x in before])
    assert at(rec, "out", "l2") == exact([x.flatten(-2).norm(dim=-1).mean() for x in after])
    assert at(rec, "out", "max_2") == exact([x[..., 2, :].abs().max() for x in after])
    assert at(rec, "out", "rms_3") == exact([x[..., 3, :].square().mean().sqrt() for x in after])
    assert at(rec, "raw", "rms") == exact([site.w.square().mean().sqrt() for site in run.sites])
    assert at(rec, "write", "l2") == exact([w.flatten(-2).norm(dim=-1).mean() for w in writes])
    ratio = [w.flatten(-2).norm(dim=-1) / (x - w).flatten(-2).norm(dim=-1) for w, x in zip(writes, after, strict=True)]
    assert at(rec, "write", "ratio") == exact([r.mean() for r in ratio])
    cosine = [
        torch.cosine_similarity(w.flatten(-2), (x - w).flatten(-2), -1) for w, x in zip(writes, after, strict=True)
    ]
    assert at(rec, "write", "cosine") == exact([c.mean() for c in cosine])
    share = [(w * x).sum(-1) / x.square().sum(-1) for w, x in zip(writes, after, strict=True)]
    assert at(rec, "write", "share_1") == exact([s[..., 1].mean() for s in share])
    square = 1 if form == "tuple" else 0  # there the first state is one value, four times
    backward = [(s.a.sum(-2) - 1).abs().max() for s in run.sites]
    assert at(rec, "matrices", "backward") == exact(backward[square:], abs=1e-12)
    flat = after[0].flatten(-2)
    pairs = torch.cosine_similarity(flat[:, :, None], flat[:, None], -1)
    assert at(rec, "out", "similarity")[0] == pytest.approx(float((pairs.sum((1, 2)) - 5).mean() / 20), rel=1e-5)
    reads = [(s.c[..., None] * x).sum(-2) for s, x in zip(run.sites, before, strict=True)]
    sigma = [(r.square().mean(-1) + 1e-6).rsqrt().mean() for r in reads]
    assert at(rec, "norm_in", "rstd") == exact(sigma)
    assert [site.id for site in rec.sites][:1] == ["x_0"]
    assert rec.metadata["wiring"] == "mhc"
    assert all(find_statistic(row.role, row.statistic) for row in rec.table())


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_autograd(form):
    run = record_mhc(form, dtype=torch.float64)
    run.model.requires_grad_(False)
    x = run.x.clone().requires_grad_()
    with addnorm.record(run.model) as rec:
        weights = torch.randn(2, 5, 16, dtype=torch.float64)
        (run.model(x) * weights).sum().backward()
    # The same gradient by another way: the rest of the model as a function of each state.
    for k, found in enumerate(at(rec, "grad", "l2")[:-1]):
        state = run.states[k + 1].clone().requires_grad_()
        (finish(run, state, k + 1) * weights).sum().backward()
        assert found == pytest.approx(float(state.grad.flatten(-2).norm(dim=-1).mean()), rel=1e-9)
        assert at(rec, "grad", "rms_1")[k] == pytest.approx(
            float(state.grad[..., 1, :].square().mean().sqrt()), rel=1e-9
        )


def finish(run, state, k):
    """Return the output of a hand-written mHC whose streams before sublayer k are `state`, `(B, T, n, d)`."""
    model = HandMhc("stacked").double().eval()
    model.load_state_dict(run.model.state_dict())
    for site in [site for layer in model.layers for site in layer][k:]:
        c, a, b = site.coefficients(state)
        state = model.write(state, a, b, site.branch(model.read(state, c)))
    z = state.flatten(-2) * torch.rsqrt(state.square().mean((-2, -1)) + 1e-6).unsqueeze(-1) @ model.phi.mT
    return model.norm(model.read(state, torch.sigmoid(model.alpha * z + model.beta) + 1e-6))


@pytest.mark.parametrize("wiring", ["mhc", "hyper_connections", "independent_hc", "gated_residual"])
def test_own_stacks_have_the_numbers_of_their_hooks(wiring):
    torch.manual_seed(0)
    model, x, weights = addnorm.nn.Encoder(2, 16, nhead=2, wiring=wiring), *torch.randn(2, 2, 5, 16)
    with StreamsRecorder(model.stack) as recorder:
        (model(x) * weights).sum().backward()
    expected = recorder.statistics()
    model.zero_grad()
    with addnorm.record(model) as rec:
        (model(x) * weights).sum().backward()
    assert at(rec, "out", "rms") == pytest.approx(expected["stream"][1:], rel=1e-5)
    for k in range(len(expected["streams"][0])):
        assert at(rec, "out", f"rms_{k}") == pytest.approx([row[k] for row in expected["streams"][1:]], rel=1e-5)
        sizes = [(2 * 5 * 16) ** 0.5 * value for value in at(rec, "grad", f"rms_{k}")]
        assert sizes == pytest.approx([row[k] for row in expected["gradients"][1:]], rel=1e-4)
    norms = {name: p.grad.norm() for name, p in model.named_parameters() if "linear1" in name}
    assert all(norm > 0 for norm in norms.values())
    assert len(at(rec, "params", "grad_l2")) == 4


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "name", ["deepseek_v4:DeepseekV4", "muse_spark:MuseSparkText", "mhc", "attention_residuals", "denseformer"]
)
def test_memory_map_is_that_of_decompose(name, masked):
    torch.manual_seed(0)
    if ":" in name:
        model, kwargs = build_transformers(name).eval(), {"input_ids": torch.randint(1, 60, (2, 5))}
    else:
        model, kwargs = addnorm.nn.Encoder(2, 16, nhead=2, wiring=name).eval(), {"x": torch.randn(2, 5, 16)}
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    tokens = mask if masked else None
    args = () if "input_ids" in kwargs else (kwargs.pop("x"),)
    with addnorm.record(model, tokens=tokens) as rec:
        model(*args, **kwargs)
    parts = addnorm.decompose(model, *args, **kwargs)
    sources, rows = parts.memory_map(None)
    if masked:
        rows = [parts.mean_shares(k, mask) for k in range(parts.depth)]
        rows = [[row.get(source, 0.0) for source in sources] for row in rows]
    (found, shares), sheet = rec.memory_maps["streams"], rec.balances["streams"]
    assert found == sources
    assert len(shares) == len(rec.sites) - ("final" in [site.id for site in rec.sites])
    for ours, theirs in zip(shares, rows, strict=False):
        assert ours == pytest.approx(theirs, abs=1e-6)
    assert sheet.tokens == (8 if masked else 10)
    assert sheet.error < 1e-6
    assert sheet.stream_norm == pytest.approx(at(rec, "out", "l2")[-1], rel=1e-5)


def test_mask_selects_the_tokens_of_all_numbers():
    run = record_mhc("flat", dtype=torch.float64)
    mask = torch.ones(2, 5)
    mask[0, 2:] = 0
    with addnorm.record(run.model, tokens=mask) as rec:
        run.model(run.x)
    counted = [x[mask.bool()] for x in run.states[1:]]
    assert at(rec, "out", "rms_1") == exact([x[..., 1, :].square().mean().sqrt() for x in counted])
    assert at(rec, "raw", "rms") == exact([site.w[mask.bool()].square().mean().sqrt() for site in run.sites])
    writes = [(site.b[..., None] * site.w[..., None, :])[mask.bool()] for site in run.sites]
    assert at(rec, "write", "l2") == exact([w.flatten(1).norm(dim=-1).mean() for w in writes])
    reads = [(s.c[..., None] * x).sum(-2)[mask.bool()] for s, x in zip(run.sites, run.states, strict=False)]
    assert at(rec, "norm_in", "rstd") == exact([(r.square().mean(-1) + 1e-6).rsqrt().mean() for r in reads])
    forward = [(site.a[mask.bool()].sum(-1) - 1).abs().max() for site in run.sites]
    assert at(rec, "matrices", "forward") == exact(forward, abs=1e-12)
    with pytest.raises(ValueError, match="tokens has shape"), addnorm.record(run.model, tokens=torch.ones(3, 4)):
        run.model(run.x)


def test_each_step_has_its_own_numbers():
    torch.manual_seed(0)
    model = addnorm.nn.Encoder(2, 16, nhead=2, wiring="mhc", dropout=0.2).train()
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
    assert at(rec, "out", "rms", 0) != at(rec, "out", "rms", 2)
    assert len(at(rec, "grad", "l2", 2)) == len(at(rec, "params", "grad_l2", 0)) == 4


@pytest.mark.parametrize("size", [1e30, 1e38])
def test_a_forward_that_overflows_does_not_end_the_recording(size):
    torch.manual_seed(0)
    model = addnorm.nn.Encoder(2, 16, nhead=2, wiring="mhc").train()
    with addnorm.record(model) as rec:
        for scale in (1.0, size, 1.0):
            model(torch.randn(2, 5, 16) * scale).square().sum().backward()
    assert rec.steps == (0, 2)
    assert "forward 1 is not recorded" in rec.metadata["note"]


@pytest.mark.parametrize("wiring", ["siamese_norm", "x0_residual", "gated_mix"])
def test_sites_of_training_are_those_of_the_evaluation_before(wiring):
    torch.manual_seed(0)
    model = addnorm.nn.Encoder(2, 16, nhead=2, wiring=wiring, dropout=0.1).eval()
    with addnorm.record(model) as rec:
        model(torch.randn(2, 5, 16)).square().sum().backward()
        model.train()(torch.randn(2, 5, 16)).square().sum().backward()
    assert len(at(rec, "matrices", "spread_B", 0)) == len(at(rec, "matrices", "spread_B", 1))
    assert len(at(rec, "in", "rms_0", 0)) == len(at(rec, "in", "rms_0", 1)) == 4


def test_recording_does_not_change_the_run():
    torch.manual_seed(0)
    model = addnorm.nn.Encoder(2, 16, nhead=2, wiring="mhc", dropout=0.3).train()
    x, weights = torch.randn(2, 2, 5, 16)

    def run():
        torch.manual_seed(1)
        model.zero_grad()
        y = model(x)
        (y * weights).sum().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters())]

    before = run()
    with addnorm.record(model):
        recorded = run()
    # While it is recorded, the stack calls norms as modules: 32 roundings of the largest number, as some gradients cancel to 0.
    limit = 32 * torch.finfo(torch.float32).eps * max(float(a.abs().max()) for a in before)
    assert all((a - b).abs().max() <= limit for a, b in zip(before, recorded, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, run(), strict=True))


def test_streams_that_are_passed_on_have_no_later_gradient():
    torch.manual_seed(0)
    model, x = addnorm.nn.Encoder(2, 16, nhead=2, wiring="attention_residuals"), torch.randn(2, 5, 16)
    with addnorm.record(model) as rec:
        model(x.requires_grad_()).square().sum().backward()
    by_site = {site.id: site for site, _ in rec.series("out", "rms")}
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
    assert at(rec, "grad", "rms_0")[1] == pytest.approx(float(2 * streams[0].detach().square().mean().sqrt()), rel=1e-5)
    assert at(rec, "grad", "rms_1")[1] == at(rec, "grad", "rms_3")[1] == 0.0
    assert len(at(rec, "grad", "l2")) == 2
    assert at(rec, "grad", "rms_1")[0] > 0


def test_other_calls_are_refused_in_a_sentence():
    torch.manual_seed(0)
    model, x = addnorm.nn.Encoder(2, 16, nhead=2, wiring="mhc").eval(), torch.randn(2, 5, 16)
    inspection = addnorm.inspect(model, x)
    with (
        addnorm.ablate(inspection.program.sites[0]),
        pytest.raises(RuntimeError, match="record is called inside"),
        addnorm.record(model),
    ):
        model(x)
    with (
        pytest.raises(ValueError, match=r"layers is \[7\], expected numbers from 0 to 1"),
        addnorm.record(model, layers=[7]),
    ):
        model(x)
    with addnorm.record(model, layers=[1]) as rec:
        model(x)
    assert [site.layer for site in rec.sites] == [None, 1, 1, None]


def test_a_recording_of_streams_prints_and_is_a_file(tmp_path):
    torch.manual_seed(0)
    model, x = addnorm.nn.Encoder(2, 16, nhead=2, wiring="mhc"), torch.randn(2, 5, 16)
    with addnorm.record(model) as rec:
        model(x).square().sum().backward()
    text = str(rec)
    for words in ("forward", "backward", "centration", "share"):
        assert words in text, words
    site = rec.sites[-2]
    again = addnorm.stream.Recording.load(rec.save(tmp_path / "streams.json"))
    assert again.table() == rec.table()
    assert json.loads((tmp_path / "streams.json").read_text())["metadata"]["streams"]["streams"]["wiring"] == "mhc"
    assert again.over_time(site, "out", "rms_3") == rec.over_time(site, "out", "rms_3") != []
    assert {name for role, name, *_ in STATISTICS if role == "matrices"} == {
        row.statistic for row in rec.table() if row.role == "matrices"
    }
    for draw in (rec.plot.stream, rec.plot.gradients, rec.plot.writes, rec.plot.memory_map):
        assert draw().figure is not None
