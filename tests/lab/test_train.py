"""Tests of `addnorm.lab.train`: a run equals a plain training loop, and its statistics are the model's."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from addnorm._util.jsonio import to_jsonable
from addnorm.lab.models import CharLM
from addnorm.lab.train import Training, train
from support.lab_runs import TEXT, measured, small
from support.stacks import ALL

f64 = torch.float64


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


def model_of(run):
    return CharLM(len(TEXT.characters), run.num_layers, run.wiring, d_model=run.d_model, nhead=run.nhead, tokens=run.tokens,
                  norm=run.norm, seed=run.seed, text=TEXT.batch(run.seed, 0, run.batch, run.tokens)[0])  # fmt: skip


def by_hand(run):
    """Return the losses of a plain loop, and its model."""
    model = model_of(run)
    optimizer, losses = torch.optim.Adam(model.parameters(), fused=True), []
    for step in range(run.steps):
        read, following = TEXT.batch(run.seed, step, run.batch, run.tokens)
        loss = F.cross_entropy(model(read).flatten(0, 1), following.flatten())
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
    found = train(run, TEXT)
    losses, model = by_hand(run)
    assert found["losses"] == losses
    read, following = TEXT.held_out("test", 256, run.tokens)
    with torch.no_grad():
        judged = float(F.cross_entropy(model(read).flatten(0, 1), following.flatten()))
    assert found["test"] == pytest.approx(judged, rel=1e-5)
    assert found["validation"] != found["test"]


def streams_of(model, x):
    """Return x_0, the stream after each sublayer, and every write, computed by the modules alone."""
    states, writes = [x], []
    for connection in model.decoder.stack.connections:
        read = states[-1] if connection.norm_in is None else connection.norm_in(states[-1])
        write = connection.sublayer(read)
        summed = states[-1] + write
        states.append(summed if connection.norm_out is None else connection.norm_out(summed))
        writes.append(write)
    return states, writes


@pytest.mark.parametrize("wiring", ["post_ln", "pre_ln"])
def test_statistics_by_depth_match_float64(wiring):
    run = small(wiring, steps=1)
    found = train(run, TEXT)["recorded"]
    model = model_of(run).to(f64)
    read, following = TEXT.batch(run.seed, 0, run.batch, run.tokens)
    probe = TEXT.held_out("validation", 4, run.tokens)[0]
    half = run.batch // 2  # the recorded part; the step uses the whole batch
    states, writes = streams_of(model, model.embed(read[:half]))
    for state in states:
        state.retain_grad()
    last = states[-1] if model.decoder.stack.norm_final is None else model.decoder.stack.norm_final(states[-1])
    F.cross_entropy(model.head(last).flatten(0, 1), following[:half].flatten()).backward()
    gradients = [math.sqrt(sum(float(p.grad.square().sum()) for p in c.sublayer.parameters()))
                 for c in model.decoder.stack.connections]  # fmt: skip
    before = model(probe).detach()
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr)
    optimizer.zero_grad()
    F.cross_entropy(model(read).flatten(0, 1), following.flatten()).backward()
    optimizer.step()

    def token(t):
        return t.flatten(0, -2).norm(dim=-1)

    exact = {
        "stream": [float(t.detach().square().mean().sqrt()) for t in states],
        "ratio": [None, *(float((token(w) / token(x)).mean().detach()) for w, x in zip(writes, states, strict=False))],
        "gradient": [float(token(t.grad).mean()) for t in states],
    }
    for name, values in exact.items():
        none = values.count(None)  # x_0 has no write
        assert found[name][0][:none] == values[:none]
        assert found[name][0][none:] == pytest.approx(values[none:], rel=1e-4), name
    assert found["parameters"][0][0] is None
    assert found["parameters"][0][1:] == pytest.approx(gradients, rel=1e-4)
    assert found["logit_change"] == [
        pytest.approx(float((model(probe).detach() - before).norm() / before.norm()), rel=1e-3)
    ]


def test_recording_does_not_change_losses():
    silent, heard = (train(small(every=every), TEXT) for every in (0, 5))
    assert heard["losses"] == silent["losses"]
    assert (heard["test"], heard["validation"]) == (silent["test"], silent["validation"])
    assert heard["recorded"]["steps"] == [0, 5]
    assert silent["recorded"]["steps"] == []
    assert "after" not in silent


def test_result_has_numbers_for_every_site():
    found = train(small("post_ln", steps=3, every=2), TEXT)
    assert [one["id"] for one in found["sites"]] == [
        "x_0",
        "attention 1",
        "feed-forward 1",
        "attention 2",
        "feed-forward 2",
    ]
    assert all(len(values) == 5 for name in ("stream", "gradient") for values in found["recorded"][name])
    assert [one["site"] for one in found["ablation"]] == [one["id"] for one in found["sites"][1:]]
    assert sum(found["map"]["shares"][-1]) == pytest.approx(1)
    assert found["map"]["sources"][:2] == ["x_0", "attention 1"]
    assert found["after"]["stream"] != found["recorded"]["stream"][-1]


class Stopped(Exception):
    pass


def stopped(run, path, at, seconds=0.0):
    """Interrupt a run after `at` steps."""

    def told(step, loss):
        if step == at:
            raise Stopped

    with pytest.raises(Stopped):
        train(run, TEXT, checkpoint=path, seconds=seconds, on_step=told)


@pytest.mark.parametrize(("wiring", "at"), [("post_ln", 7), ("admin", 10)])
def test_continued_run_equals_uninterrupted_run(wiring, at, tmp_path):
    run = small(wiring, steps=15, warm_up=8)
    whole = train(run, TEXT)
    stopped(run, tmp_path / "one.pt", 3)
    stopped(run, tmp_path / "one.pt", at)
    assert [path.name for path in tmp_path.iterdir()] == ["one.pt"]
    told = []
    found = train(run, TEXT, checkpoint=tmp_path / "one.pt", on_step=lambda step, loss: told.append(step))
    assert told[0] == at, "training continues after the last checkpoint"
    assert found["resumed"] == 2
    assert measured(found) == measured(whole)


def test_damaged_or_foreign_checkpoints_are_ignored(tmp_path):
    run, path = small(), tmp_path / "one.pt"
    whole = train(run, TEXT)
    stopped(small(seed=1), path, 7)
    for damage in (path.read_bytes(), path.read_bytes()[:-100], b"", b"\x80\x04nonsense"):
        path.write_bytes(damage)
        found = train(run, TEXT, checkpoint=path, seconds=100.0)
        assert found["resumed"] == 0
        assert measured(found) == measured(whole)
    assert Training(run, TEXT).step == 0


def test_checkpoint_runs_no_code(tmp_path):
    class Bad:
        def __reduce__(self):
            return (tmp_path / "ran").touch, ()

    torch.save({"key": small().key(TEXT), "model": Bad()}, tmp_path / "one.pt")
    assert train(small(steps=1), TEXT, checkpoint=tmp_path / "one.pt")["resumed"] == 0
    assert not (tmp_path / "ran").exists()


def test_unwritable_checkpoint_does_not_end_a_run(tmp_path, monkeypatch):
    whole = measured(train(small(), TEXT))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert measured(train(small(), TEXT, checkpoint=tmp_path / "one.pt", seconds=0)) == whole
    assert measured(train(small(), TEXT, checkpoint=tmp_path / "nowhere" / "one.pt", seconds=0)) == whole


@pytest.mark.parametrize("options", [{"lr": 1e30}, {"wiring": "no_norm", "num_layers": 4, "lr": 1e6}])
def test_diverging_run_stops(options):
    found = train(small(steps=400, **options), TEXT)
    assert found["diverged"]
    assert len(found["losses"]) <= 400
    if not math.isfinite(found["losses"][-1]):
        assert len(found["losses"]) < 400
        assert math.isnan(found["test"])
        assert "ablation" not in found
    assert "NaN" not in json.dumps(to_jsonable(found), allow_nan=False).replace('"NaN"', "")


def test_untrained_model_has_not_diverged():
    for seed in range(5):
        found = train(small("no_norm", steps=1, lr=1e-9, every=0, seed=seed), TEXT)
        assert found["uniform"] < found["test"]
        assert not found["diverged"]


@pytest.mark.parametrize("wiring", ALL, ids=lambda wiring: wiring.name)
def test_every_wiring_trains_and_is_recorded(wiring):
    found = train(small(wiring, steps=2, every=1), TEXT)
    assert len(found["losses"]) == 2
    assert found["recording_error"] == ""
    assert len({one["id"] for one in found["sites"]}) == 5
    assert all(value is not None and value > 0 for value in found["recorded"]["gradient"][1])
    assert len(found["ablation"]) == (6 if wiring.name == "b2t" else 4)
    json.dumps(to_jsonable(found), allow_nan=False)


def test_unrecordable_model_still_trains(monkeypatch, tmp_path):
    from addnorm.stream.record import recorder

    whole = train(small(), TEXT)

    def refuse(*_):
        raise ValueError("CharLM has no residual stream to record: so it is.")

    monkeypatch.setattr(recorder, "build_inspection", refuse)
    found = train(small(), TEXT)
    assert found["recording_error"] == "CharLM has no residual stream to record: so it is."
    assert (found["losses"], found["test"]) == (whole["losses"], whole["test"])
    assert found["recorded"]["steps"] == found["sites"] == []
    assert not {"after", "ablation"} & set(found)
    stopped(small(every=3), tmp_path / "one.pt", 7)
    again = train(small(every=3), TEXT, checkpoint=tmp_path / "one.pt")
    assert (again["resumed"], again["losses"]) == (1, whole["losses"])


@pytest.mark.parametrize(
    "odd", [{"d_model": 1, "nhead": 1}, {"tokens": 1}, {"batch": 1}, {"num_layers": 1}, {"every": 1000}]
)
def test_smallest_runs_train(odd):
    found = train(small(**{"steps": 2, **odd}), TEXT)
    assert len(found["losses"]) == 2
    assert found["test"] > 0


def test_train_restores_thread_count(threads):
    threads(2)
    train(small(steps=1, every=0), TEXT)
    assert torch.get_num_threads() == 2
