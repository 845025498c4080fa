"""Tests of `addnorm record`: output, files, errors, interrupts."""

import errno
import itertools
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

import addnorm
from addnorm._util.numbers import format_percent
from addnorm.cli import record as cli_record
from addnorm.cli._model import ProbeLoss
from addnorm.explorer.recording import Recordings
from addnorm.report.model_findings import recording_findings
from addnorm.stream.models.inputs import read_texts
from addnorm.stream.models.load import load
from addnorm.stream.record.recording import Recording
from support.commands import assert_one_sentence, assert_words, document, run, succeed
from support.recordings import values

pytestmark = pytest.mark.usefixtures("folder")


def test_record_steps_through_text_file(folder):
    result = succeed("record", "minilm", "--text", "texts.txt", "--batch", 2, "--out", "run.json")
    assert result.stderr == "Written: run.json\n"
    assert_words(result.stdout, "2 steps from 0 to 1, with gradients", "mean over the tokens of ⟨v, y⟩", "3 texts with")
    rows = re.findall(r"^ +\d  (?:attention|feed-forward) .*( +[\d.e-]+){6} *$", result.stdout, re.M)
    assert len(rows) == 12
    recording = Recording.load(folder / "run.json")
    for series in (("grad", "l2"), ("params", "grad_l2")):
        assert min(values(recording, *series)) > 1e-4  # of a mean square it would be round-off
    assert recording.metadata["name"] == "minilm"
    # The last step is one short text; its numbers equal those of the text alone.
    (folder / "short.txt").write_text("Short.\n")
    run("record", "minilm", "--text", "short.txt", "--out", "alone.json")
    alone = Recording.load(folder / "alone.json")
    for series in (("out", "rms"), ("write", "ratio"), ("grad", "l2")):
        assert values(recording, *series, step=1) == pytest.approx(values(alone, *series), rel=1e-4)


def test_record_json():
    output = document("record", "llama", "--steps", 3, "--only", "2-3")
    assert (output["schema"], output["metadata"]["name"]) == ("addnorm.recording", "llama")
    assert {site["layer"] for site in output["sites"]} - {None} == {1, 2}
    assert {step for series in output["series"] for step in series["steps"]} == {0, 1, 2}
    sizes = [series["values"] for series in output["series"] if (series["role"], series["statistic"]) == ("out", "rms")]
    assert len({*sizes[0]}) == 3  # inputs from a file


def test_record_uses_the_models_loss():
    assert document("record", "own_models:with_loss")["metadata"]["loss"] == "The model's own."


def test_share_is_one_number_everywhere(folder):
    """Compare the shares of decompose, record, the report and the explorer with their formula, on padded texts."""
    inputs = ("minilm", "--text", "texts.txt")
    loaded = load("minilm", texts=read_texts(folder / "texts.txt"))
    mask = loaded.kwargs["attention_mask"].bool()
    tokens = int(mask.sum())
    assert tokens < mask.numel()
    parts = addnorm.decompose(loaded.model, **loaded.kwargs)
    x = parts.state()
    shares = {source: (c * x).sum(-1) / x.square().sum(-1) for source, c in parts.components().items()}
    expected = {source: float(share[mask].mean()) for source, share in shares.items()}
    run("record", *inputs, "--batch", 3, "--out", "run.json")
    recording = Recording.load(folder / "run.json")
    served = Recordings([folder / "run.json"])
    page = served.compute(served.parse({}))
    everywhere = (
        parts.mean_shares(tokens=mask), document("decompose", *inputs)["streams"][0]["shares"],
        *(dict(zip(sources, rows[-1], strict=True)) for sources, rows in (parts.memory_map(mask), recording.memory_maps["stream"])),
        {row["source"]: row["part"] for row in page["balance"]["rows"]},
    )  # fmt: skip
    for found in everywhere:
        assert found == pytest.approx(expected, rel=1e-6)
    sheet = recording.balances["stream"]
    assert (sheet.tokens, sheet.total_tokens) == (tokens, tokens)
    sentence = f"{format_percent(expected['x_0'])} of the final stream is from x"
    assert any(finding.claim.startswith(sentence) for finding in recording_findings(recording))


def test_record_memory_map_sums_to_one():
    result = run("record", "bert", "--memory-map")
    shares = [float(value) for value in re.findall(r"(-?[\d.]+)%$", result.stdout, re.M)]
    assert len(shares) == 8
    assert sum(shares) == pytest.approx(100, abs=0.1)
    assert result.stdout.index("encoder.layer.2 ") < result.stdout.index("norm biases")


def test_record_plots(folder):
    result = succeed("record", "bert", "--plots", "new/plots", "--out", "run.parquet")
    written = sorted((folder / "new" / "plots").iterdir())
    assert [path.stem for path in written] == sorted(cli_record.PLOTS)
    for path in written:
        assert path.read_bytes()[:4] == b"\x89PNG"
        assert f"Written: new/plots/{path.name}" in result.stderr
    assert Recording.load(folder / "run.parquet").steps == (0,)
    again = run("record", "bert", "--no-grads", "--plots", "forward")
    assert "Nothing to draw: gradients.png" in again.stderr
    assert not (folder / "forward" / "gradients.png").exists()


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(("--input", "--out", "--states"), 2)])
def test_record_replaces_no_file_of_another_option(folder, first, second):
    (folder / "same.json").write_text("before")
    result = run("record", "gpt2", first, "same.json", second, "../" + str(Path(folder.name, "same.json")))
    assert_one_sentence(result, 2, f"{second} is '../{folder.name}/same.json', the file of {first}")
    assert (folder / "same.json").read_text() == "before"


@pytest.mark.parametrize("options", [["--out", "new/run.json"], ["--out", "new/run.parquet"], ["--plots", "new"]])
def test_record_full_disk(folder, monkeypatch, options):
    replace = Path.replace

    def full(self, target):
        if folder in target.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    result = run("record", "gpt2", *options)
    assert_one_sentence(result, 1, "cannot be written (No space left on device): the result is in '")
    saved = Path(re.search("in '(.+)'", result.stderr)[1])
    sizes = [path.stat().st_size for path in (saved.iterdir() if saved.is_dir() else [saved])]
    shutil.rmtree(saved.parent)
    assert min(sizes) > 100
    assert "Recording of GPT2Model" in result.stdout  # the measured steps are not lost
    assert [*(folder / "new").iterdir()] == []


@pytest.fixture
def interruptible():
    """Take SIGINT, also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_in(monkeypatch, step):
    """Raise KeyboardInterrupt between the forward and the backward of that step."""
    loss, calls = ProbeLoss.__call__, itertools.count()

    def counted(*arguments):
        if next(calls) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(*arguments)

    monkeypatch.setattr(ProbeLoss, "__call__", counted)


@pytest.mark.usefixtures("interruptible")
def test_record_interrupt_keeps_finished_steps(folder, monkeypatch):
    interrupt_in(monkeypatch, 2)
    result = run("record", "llama", "--steps", 5, "--out", "run.json")
    assert result.exit_code == 130
    assert result.stderr == "Written: run.json\nInterrupted.\n"
    assert "2 steps from 0 to 1" in result.stdout
    recording = Recording.load(folder / "run.json")
    assert (recording.steps, recording.metadata["interrupted"]) == ((0, 1), "after 2 of 5 steps")
    assert {series.steps[-1] for *_, series in recording.iter_series()} == {1}
    assert [*recording.memory_maps] == ["stream"]


@pytest.mark.usefixtures("interruptible")
def test_record_interrupt_in_first_step(folder, monkeypatch):
    interrupt_in(monkeypatch, 0)
    result = run("record", "llama", "--out", "run.json")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Interrupted.\n")
    assert not (folder / "run.json").exists()
