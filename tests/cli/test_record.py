"""Tests of `addnorm record`: output, files, errors, interrupts."""

import errno
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from addnorm.cli import record as cli_record
from addnorm.cli._probe import ProbeLoss
from addnorm.stream.record.recording import Recording
from support.stream_commands import document, names_in, one_sentence, run, user_s_place


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch, threads):
    """Run in a temporary directory, on one thread since the models are small."""
    threads(1)
    with user_s_place(tmp_path, monkeypatch) as folder:
        yield folder


def test_record_steps_through_text_file(place):
    done = run("record", "minilm", "--text", "texts.txt", "--batch", 2, "--out", "run.json")
    assert (done.exit_code, done.stderr) == (0, "Written: run.json\n")
    assert "2 steps 0 ... 1, with gradients" in done.stdout
    assert "the mean over the tokens of ⟨v, y⟩" in " ".join(done.stdout.split())
    assert "3 texts of" in done.stdout
    rec = Recording.load(place / "run.json")
    assert len([site for site in rec.sites if site.kind not in ("start", "final")]) == 12
    assert all(
        value > 0 for role, name in (("grad", "l2"), ("params", "grad_l2")) for _, value in rec.series(role, name)
    )
    assert rec.metadata["name"] == "minilm"
    # The last step is one short text; its numbers equal those of the text alone.
    (place / "short.txt").write_text("Short.\n")
    run("record", "minilm", "--text", "short.txt", "--out", "alone.json")
    alone = Recording.load(place / "alone.json")
    for role, name in (("out", "rms"), ("write", "ratio"), ("grad", "l2")):
        together = [value for _, value in rec.series(role, name, step=1)]
        assert together == pytest.approx([value for _, value in alone.series(role, name)], rel=1e-4)


def test_record_json():
    found = document("record", "llama", "--steps", 3, "--only", "2-3")
    assert (found["schema"], found["metadata"]["name"]) == ("addnorm.recording", "llama")
    assert {site["layer"] for site in found["sites"] if site["layer"] is not None} == {1, 2}
    assert {step for series in found["series"] for step in series["steps"]} == {0, 1, 2}
    steps = [series["values"] for series in found["series"] if (series["role"], series["statistic"]) == ("out", "rms")]
    assert len({*steps[0]}) == 3  # inputs from a file


def test_record_no_grads():
    found = document("record", "gpt2", "--no-grads")
    assert not [series for series in found["series"] if series["statistic"] == "grad_l2" or series["role"] == "grad"]
    assert found["metadata"]["loss"] is None


def test_record_uses_the_models_loss():
    assert document("record", "own_models:with_loss")["metadata"]["loss"] == "The loss is the model's own."


def test_probe_loss_has_gradient():
    """Check the gradient of the probe's loss: of order one, while that of the mean square of LayerNorm's output is round-off."""
    x = torch.randn(2, 5, 64, requires_grad=True)
    y = torch.nn.functional.layer_norm(x, (64,))
    (constant,) = torch.autograd.grad(y.square().mean(), x, retain_graph=True)
    (probed,) = torch.autograd.grad(ProbeLoss(0)(y, None), x)
    assert probed.norm() > 1e3 * constant.norm()
    assert torch.equal(ProbeLoss(0)(y, None), ProbeLoss(0)(y, None))


def test_record_memory_map_sums_to_one():
    done = run("record", "bert", "--memory-map")
    shares = [float(value) for value in re.findall(r"(-?[\d.]+)%$", done.stdout, re.M)]
    assert len(shares) == 8
    assert sum(shares) == pytest.approx(100, abs=0.1)
    assert done.stdout.index("encoder.layer.2 ") < done.stdout.index("norm biases")


def test_record_plots(place):
    done = run("record", "bert", "--plots", "new/plots", "--out", "run.parquet")
    assert done.exit_code == 0
    assert names_in(place / "new" / "plots") == sorted(f"{name}.png" for name in cli_record.PLOTS)
    for path in (place / "new" / "plots").iterdir():
        assert path.read_bytes()[:4] == b"\x89PNG"
        assert f"Written: new/plots/{path.name}" in done.stderr
    assert Recording.load(place / "run.parquet").steps == (0,)
    again = run("record", "bert", "--no-grads", "--plots", "forward")
    assert "Nothing to draw: gradients.png" in again.stderr
    assert not (place / "forward" / "gradients.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "run.csv"], "--out is 'run.csv', expected a file that ends in .json or .parquet"),
        (["--out", "texts.txt/run.json"], "--out is 'texts.txt/run.json', which cannot be written ("),
        (["--plots", "texts.txt"], "--plots is 'texts.txt/"),
        (["--only", "4"], "--only is '4', expected layers from 1 to 3"),
        (["--only", "3-2"], "--only is '3-2', expected layers from 1 to 3"),
        (["--only", "a"], "--only is 'a', expected layers from 1 to 3"),
    ],
)
def test_record_rejects_bad_options(place, arguments, words):
    before = names_in(place)
    done = run("record", "gpt2", *arguments)
    one_sentence(done, 2, words)
    assert done.stdout == ""
    assert names_in(place) == before


def test_record_rejects_too_many_steps():
    one_sentence(
        run("record", "minilm", "--text", "texts.txt", "--steps", 2), 2, "--steps is 2, expected at most 1: there are 3"
    )
    one_sentence(
        run("record", "own_models:toy", "--steps", 2),
        2,
        "--steps is 2, expected 1: MODEL 'own_models:toy' has one batch",
    )


def test_record_suggests_no_grads():
    one_sentence(run("record", "own_models:frozen"), 2, "use --no-grads")
    assert run("record", "own_models:frozen", "--no-grads").exit_code == 0


@pytest.mark.parametrize(
    ("package", "options"), [("matplotlib", ["--plots", "p"]), ("pyarrow", ["--out", "run.parquet"])]
)
def test_record_names_missing_extra(place, monkeypatch, package, options):
    monkeypatch.setitem(sys.modules, package, None)
    one_sentence(run("record", "gpt2", *options), 2, f"{package} is not installed", "pip install 'addnorm[")
    assert not (place / "p").exists()


@pytest.mark.parametrize("options", [["--out", "new/run.json"], ["--out", "new/run.parquet"], ["--plots", "new"]])
def test_record_full_disk(place, monkeypatch, options):
    def full(self, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    done = run("record", "gpt2", *options)
    one_sentence(done, 2, "cannot be written (No space left on device)")
    assert "Recording of GPT2Model" in done.stdout  # the measured steps are not lost
    assert names_in(place / "new") == []


def interrupted_in(monkeypatch, step):
    """Raise KeyboardInterrupt between the forward and the backward of that step."""
    loss, calls = ProbeLoss.__call__, []

    def counted(*arguments):
        calls.append(None)
        if len(calls) == step + 1:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(*arguments)

    monkeypatch.setattr(ProbeLoss, "__call__", counted)


def test_record_interrupt_keeps_finished_steps(place, monkeypatch):
    interrupted_in(monkeypatch, 2)
    done = run("record", "llama", "--steps", 5, "--out", "run.json")
    assert done.exit_code == 130
    assert done.stderr == "Written: run.json\nInterrupted.\n"
    assert "2 steps 0 ... 1" in done.stdout
    rec = Recording.load(place / "run.json")
    assert (rec.steps, rec.metadata["interrupted"]) == ((0, 1), "after 2 of 5 steps")
    assert {series.steps[-1] for *_, series in rec.iter_series()} == {1}
    assert [*rec.memory_maps] == ["stream"]


def test_record_interrupt_in_first_step(place, monkeypatch):
    interrupted_in(monkeypatch, 0)
    done = run("record", "llama", "--out", "run.json")
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "Interrupted.\n")
    assert not (place / "run.json").exists()
