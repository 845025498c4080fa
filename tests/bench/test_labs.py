"""The benchmark of the lab's training: all three variants train the same model, and what is said of them follows from the rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from addnorm import bench, wirings
from addnorm.bench import labs
from addnorm.lab import Run, Text
from addnorm.lab.train import Training

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "lab.json"
TEXT = Text("counting", "one two three four five six seven eight nine ten eleven twelve " * 40)


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


def cell(wiring="pre_ln", num_layers=2):
    return labs.Cell(wiring, num_layers, 16, 2, 8, 1)


def models(wiring):
    run = Run(wirings.get(wiring), num_layers=2, d_model=16, nhead=4, tokens=8, batch=2, every=0)
    training = Training(run, TEXT)
    return training.model, labs.Plain(training.model, 4)


@pytest.mark.parametrize("wiring", labs.WIRINGS)
def test_the_plain_model_is_the_labs_in_torchs_own_modules_with_weights_of_its_own(wiring):
    ours, plain = models(wiring)
    assert {type(one) for one in plain.modules() if isinstance(one, nn.LayerNorm)} == {nn.LayerNorm}
    read, following = TEXT.batch(0, 0, 2, 8)
    one, other = ours(read), plain(read)
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    for logits in (one, other):
        nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten()).backward()
    torch.testing.assert_close(plain.embedding.weight.grad, ours.embedding.weight.grad, rtol=1e-4, atol=1e-6)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in ours.parameters())
    assert not {p.data_ptr() for p in plain.parameters()} & {p.data_ptr() for p in ours.parameters()}


@pytest.mark.parametrize("wiring", labs.WIRINGS)
def test_all_variants_have_the_same_losses(wiring):
    row = labs.check(cell(wiring), TEXT)
    assert len(row["losses"]) == row["steps"] == labs.CHECKED
    assert row["off"] <= labs.CLOSE
    assert len(set(row["losses"])) == labs.CHECKED, "the weights change"


def test_a_loop_that_trains_something_else_is_an_error(monkeypatch):
    whole = labs.started

    def spoiled(cell, variant, text, steps):
        train = whole(cell, variant, text, steps)
        return (lambda told: train(lambda step, loss: told(step, loss * 1.001))) if variant == "plain" else train

    monkeypatch.setattr(labs, "started", spoiled)
    with pytest.raises(ValueError, match=r"the losses of pre_ln, 2 layers, d = 16 differ by .* expected roundings"):
        labs.check(cell(), TEXT)


def test_a_window_has_one_recorded_step(monkeypatch):
    """The first step by itself; then windows whose last step is one that is recorded."""
    steps = {}
    whole = labs.Training

    def kept(run, text):
        steps[run.every] = training = whole(run, text)
        return training

    monkeypatch.setattr(labs, "Training", kept)
    rows = {row["variant"]: row for row in labs.measure(cell(), TEXT, rounds=1, windows=2)}
    assert list(rows) == list(labs.VARIANTS)
    assert steps[labs.EVERY].recorded["steps"] == [0, labs.EVERY, 2 * labs.EVERY]
    assert steps[0].recorded["steps"] == []
    for row in rows.values():
        assert row["rounds"] == 2, "a window each"
        assert 0 < row["q1_us"] <= row["median_us"] <= row["q3_us"]
        assert row["first_us"] > 0 < row["last_us"]


def test_times_are_those_between_two_steps(monkeypatch):
    clock = iter([10.0, 11.0, 13.0, 16.0])
    monkeypatch.setattr(labs.time, "perf_counter", lambda: next(clock))
    found = labs.clocked(lambda told: [told(step, 0.5) for step in (1, 2, 3)])
    assert found == ([0.5] * 3, [1.0, 2.0, 3.0])


def rows_of(**times):
    return [
        {**one._asdict(), "variant": name, "median_us": time, "first_us": 10 * time}
        for one in (cell(), cell("post_ln")) for name, time in times.items()
    ]  # fmt: skip


def test_the_summary_follows_from_the_rows():
    found = {one["name"]: one for one in labs.summarize(rows_of(plain=9e4, addnorm=1e5, recorded=1.08e5))}
    assert len(found) == 6
    fast = found["pre_ln, 2 layers, d = 16: times as fast as plain PyTorch"]
    assert (fast["value"], fast["met"]) == (0.9, False)
    recording = found["post_ln, 2 layers, d = 16: recording every 20th step, times without"]
    assert (recording["value"], recording["met"]) == (1.08, True)
    first = found["pre_ln, 2 layers, d = 16: the first recorded step, seconds more"]
    assert (first["value"], first["met"]) == (pytest.approx(0.08), None)


def test_a_document_is_written_whole_or_marked_as_partial(tmp_path, monkeypatch):
    document = labs.run([cell()], text=TEXT, rounds=1, windows=1)
    assert document["complete"]
    path = bench.write(document, tmp_path / "lab.json")
    assert json.loads(path.read_text()) == json.loads(json.dumps(document))

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(labs, "measure", interrupted)
    lines = []
    document = labs.run([cell(), cell()], text=TEXT, progress=lines.append)
    assert not document["complete"]
    assert len(lines) == 1
    assert bench.write(document, tmp_path / "lab.json").name == "lab.partial.json"


def test_the_committed_results_are_of_the_whole_matrix():
    document = json.loads(RESULTS.read_text())
    assert document["complete"]
    assert not document["dirty"]
    assert set(labs.by_cell(document["rows"])) == set(labs.cells())
    assert all(row["off"] <= labs.CLOSE for row in document["losses"])
    assert document["summary"] == json.loads(json.dumps(labs.summarize(document["rows"])))


def test_the_script_tells_its_options():
    script = str(ROOT / "benchmarks" / "bench_lab.py")
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert "--rounds" in done.stdout
