"""Tests of `addnorm.lab.train`: a run equals a plain training loop, and its statistics are the model's."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

import addnorm
from addnorm._util.jsonio import to_jsonable
from addnorm.lab import measure
from addnorm.lab.models import CharLM
from addnorm.lab.train import Training, train
from addnorm.stream.ablate import ablate_each
from support.lab_runs import RECORDED, TEXT, interrupt_training, measured, small
from support.pairwise import some
from support.stacks import ALL

f64 = torch.float64
NAMED = {wiring.name: wiring for wiring in ALL}


def model_of(run):
    return CharLM(len(TEXT.characters), run.num_layers, run.wiring, d_model=run.d_model, nhead=run.nhead, tokens=run.tokens,
                  norm=run.norm, seed=run.seed, text=TEXT.batch(run.seed, 0, run.batch, run.tokens)[0])  # fmt: skip


def loss_of(model, read, following):
    return F.cross_entropy(model(read).flatten(0, 1), following.flatten())


def plain_loop(run):
    """Return the losses of a plain loop, and its model."""
    model = model_of(run)
    optimizer, losses = torch.optim.Adam(model.parameters(), fused=True), []
    for step in range(run.steps):
        read, following = TEXT.batch(run.seed, step, run.batch, run.tokens)
        loss = loss_of(model, read, following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = run.lr * min(1, (step + 1) / (run.warm_up + 1))
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize(
    "options", [{"warm_up": 4}, {"wiring": "post_ln", "seed": 2}, {"wiring": "admin"}, {"norm": "rms"}]
)
def test_train_matches_plain_loop(options):
    run = small(**options)
    result = train(run, TEXT)
    losses, model = plain_loop(run)
    assert result["losses"] == losses
    read, following = TEXT.held_out("test", 256, run.tokens)
    with torch.no_grad():
        test_loss = float(loss_of(model, read, following))
    assert result["test"] == pytest.approx(test_loss, rel=1e-5)
    assert result["validation"] != result["test"]


@pytest.mark.parametrize("wiring", ["post_ln", "pre_ln"])
def test_recorded_statistics_match_float64(wiring):
    run = small(wiring, steps=1)
    result = train(run, TEXT)["recorded"]
    model = model_of(run).to(f64)
    read, following = TEXT.batch(run.seed, 0, run.batch, run.tokens)
    probe = TEXT.held_out("validation", 4, run.tokens)[0]
    half = run.batch // 2  # the recorded part; the step uses the whole batch
    with addnorm.record(model) as recording:
        loss_of(model, read[:half], following[:half]).backward()
    for name, series in {**RECORDED, "stream": ("out", "rms")}.items():
        values = {site.id: value for site, value in recording.series(*series)}
        expected = [values.get(site.id) for site in recording.sites if site.kind != "final"]
        assert result[name] == [[one and pytest.approx(one, rel=1e-4) for one in expected]], name
    before = model(probe).detach()
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr)
    optimizer.zero_grad()
    loss_of(model, read, following).backward()
    optimizer.step()
    assert result["logit_change"] == [
        pytest.approx(float((model(probe).detach() - before).norm() / before.norm()), rel=1e-3)
    ]


def test_result_has_shares_and_statistics_after_training():
    result = train(small("post_ln", steps=3, every=2), TEXT)
    assert sum(result["map"]["shares"][-1]) == pytest.approx(1)
    assert result["map"]["sources"][:2] == ["x_0", "attention 1"]
    assert result["after"]["stream"] != result["recorded"]["stream"][-1]


def test_ablation_is_that_of_a_model_without_the_write():
    model = model_of(small("post_ln"))
    inputs, targets = TEXT.held_out("test", measure.PROBE, 8)
    sites = addnorm.inspect(model, inputs)
    expected = ablate_each(sites, inputs, loss=lambda y: measure.cross_entropy(y, targets))
    rises = [one["rise"] for one in measure.measure_ablation(model, TEXT, 8)]
    assert rises == pytest.approx([one.loss_change for one in expected], abs=1e-6)


@pytest.mark.parametrize(("wiring", "at"), [("post_ln", 7), ("admin", 10)])
def test_continued_run_equals_uninterrupted_run(wiring, at, tmp_path):
    run = small(wiring, steps=15, warm_up=8)
    uninterrupted = train(run, TEXT)
    interrupt_training(run, tmp_path / "one.pt", 3)
    interrupt_training(run, tmp_path / "one.pt", at)
    assert [path.name for path in tmp_path.iterdir()] == ["one.pt"]
    steps = []
    result = train(run, TEXT, checkpoint=tmp_path / "one.pt", on_step=lambda step, loss: steps.append(step))
    assert steps[0] == at, "training continues after the last checkpoint"
    assert result["resumed"] == 2
    assert measured(result) == measured(uninterrupted)


def test_damaged_or_foreign_checkpoints_are_ignored(tmp_path):
    run, path = small(every=0), tmp_path / "one.pt"
    uninterrupted = train(run, TEXT)
    interrupt_training(small(every=0, seed=1), path, 7)
    for damage in (path.read_bytes(), path.read_bytes()[:-100], b"", b"\x80\x04nonsense"):
        path.write_bytes(damage)
        result = train(run, TEXT, checkpoint=path, seconds=100.0)
        assert result["resumed"] == 0
        assert measured(result) == measured(uninterrupted)
    assert Training(run, TEXT).step == 0


def test_checkpoint_runs_no_code(tmp_path):
    class Bad:
        def __reduce__(self):
            return (tmp_path / "ran").touch, ()

    torch.save({"key": small().key(TEXT), "model": Bad()}, tmp_path / "one.pt")
    assert train(small(steps=1), TEXT, checkpoint=tmp_path / "one.pt")["resumed"] == 0
    assert not (tmp_path / "ran").exists()


def test_unwritable_checkpoint_does_not_end_a_run(tmp_path, monkeypatch):
    uninterrupted = measured(train(small(), TEXT))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert measured(train(small(), TEXT, checkpoint=tmp_path / "one.pt", seconds=0)) == uninterrupted
    assert measured(train(small(), TEXT, checkpoint=tmp_path / "nowhere" / "one.pt", seconds=0)) == uninterrupted


@pytest.mark.parametrize("options", [{"lr": 1e30}, {"wiring": "no_norm", "num_layers": 4, "lr": 1e6}])
def test_diverging_run_stops(options):
    result = train(small(steps=400, **options), TEXT)
    assert result["diverged"]
    if not math.isfinite(result["losses"][-1]):
        assert len(result["losses"]) < 400
        assert math.isnan(result["test"])
        assert "ablation" not in result
    assert "NaN" not in json.dumps(to_jsonable(result), allow_nan=False).replace('"NaN"', "")


def test_untrained_model_has_not_diverged():
    for seed in range(5):
        result = train(small("no_norm", steps=1, lr=1e-9, every=0, seed=seed), TEXT)
        assert result["uniform"] < result["test"]
        assert not result["diverged"]


@pytest.mark.parametrize("name", some([*NAMED], ("post_ln", "admin", "b2t", "resi_dual", "parallel", "rezero")))
def test_every_wiring_trains_and_is_recorded(name):
    result = train(small(NAMED[name], steps=2, every=1), TEXT)
    assert len(result["losses"]) == 2
    assert result["recording_error"] == ""
    sites = [site["id"] for site in result["sites"]]
    assert ", ".join(sites) == "x_0, attention 1, feed-forward 1, attention 2, feed-forward 2"
    assert [row["site"] for row in result["ablation"]] == sites[1:]
    assert all(value is not None and value > 0 for value in result["recorded"]["gradient"][1])
    json.dumps(to_jsonable(result), allow_nan=False)


def test_unrecordable_model_still_trains(monkeypatch, tmp_path):
    from addnorm.stream.record import recorder

    uninterrupted = train(small(), TEXT)

    def refuse(*_):
        raise ValueError("CharLM has no residual stream to record: so it is.")

    monkeypatch.setattr(recorder, "inspect_flow", refuse)
    result = train(small(), TEXT)
    assert result["recording_error"] == "CharLM has no residual stream to record: so it is."
    assert (result["losses"], result["test"]) == (uninterrupted["losses"], uninterrupted["test"])
    assert result["recorded"]["steps"] == result["sites"] == []
    assert not {"after", "ablation"} & set(result)
    interrupt_training(small(every=3), tmp_path / "one.pt", 7)
    again = train(small(every=3), TEXT, checkpoint=tmp_path / "one.pt")
    assert (again["resumed"], again["losses"]) == (1, uninterrupted["losses"])


@pytest.mark.parametrize(
    "odd", [{"d_model": 1, "nhead": 1}, {"tokens": 1}, {"batch": 1}, {"num_layers": 1}, {"every": 1000}]
)
def test_smallest_runs_train(odd):
    result = train(small(**{"steps": 2, **odd}), TEXT)
    assert len(result["losses"]) == 2
    assert result["test"] > 0


def test_train_restores_thread_count(threads):
    threads(2)
    train(small(steps=1, every=0), TEXT)
    assert torch.get_num_threads() == 2
