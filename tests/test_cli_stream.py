"""addnorm inspect, record, decompose and ablate: what they print, what they write, and how they refuse."""

import errno
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import addnorm
from addnorm import cli_record
from addnorm.cli import main
from addnorm.stream.record.recording import Recording

TEXTS = "Norms keep the scale.\n\nThe stream carries everything, and every sublayer adds a little.\nShort.\n"

# Models of a user's own, in a module that is beside them.
FACTORIES = """
from types import SimpleNamespace
import torch
from torch import nn

class Toy(nn.Module):
    def __init__(self, bad=False, own_loss=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.bad, self.own_loss = bad, own_loss

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return SimpleNamespace(loss=x.square().mean(), logits=x) if self.own_loss else x

def toy():
    return Toy(), (torch.randn(2, 3, 8),)

def with_loss():
    return Toy(own_loss=True), (torch.randn(2, 3, 8),)

def frozen():
    model, args = toy()
    return model.requires_grad_(False), args

def none():
    return nn.Linear(8, 8), (torch.randn(2, 3, 8),)

def wrong():
    return Toy(), (torch.randn(2, 3, 9),)

"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch, threads):
    """A directory of the test's own, with the factories in it; one thread, for models so small."""
    threads(1)
    (tmp_path / "own_models.py").write_text(FACTORIES)
    (tmp_path / "texts.txt").write_text(TEXTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("own_models", None)


def run(*arguments, **env):
    return CliRunner().invoke(main, [*map(str, arguments)], env={"COLUMNS": "100", **env}, catch_exceptions=False)


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def document(*arguments, code=0):
    done = run(*arguments, "--json")
    assert done.exit_code == code, done.stderr
    return json.loads(done.stdout, parse_constant=refuse)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def one_sentence(done, code, *words):
    assert done.exit_code == code, done.output
    assert re.fullmatch(r"Error: .+\.\n", done.stderr), done.stderr
    for word in words:
        assert word in done.stderr
    assert "Usage" not in done.stderr


# addnorm inspect


def test_inspect_finds_minilm_post_ln_with_its_eps():
    found = document("inspect", "minilm", "--tokens", 16)
    (stream,) = found["streams"]
    assert (found["wiring"], found["closes"], found["name"], len(stream["sites"])) == ("post_ln", True, "minilm", 12)
    assert stream["norms"]["embedding"]["eps"] == 1e-12
    assert {site["norms"]["norm_out"]["eps"] for site in stream["sites"]} == {1e-12}
    assert found["closure"] < 1e-6
    assert "all-MiniLM-L6-v2" in found["source"]


def test_inspect_prints_the_table_the_inputs_and_where_the_weights_are_from():
    done = run("inspect", "gpt2", "--layers", 2)
    assert (done.exit_code, done.stderr) == (0, "")
    for words in (
        "GPT2Model, evaluation: pre_ln",
        "h.0-1.mlp",
        "x_L = x_0 + all writes",
        "input_ids (2, 16) int64",
        "random, of seed 0",
    ):
        assert words in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("columns", [80, 100, 140])
@pytest.mark.parametrize("name", ["t5", "llama"])
def test_no_line_is_wider_than_the_terminal(name, columns):
    for command in ("inspect", "record", "decompose", "ablate"):
        done = run(command, name, COLUMNS=str(columns))
        assert done.exit_code == 0
        assert max(map(len, done.stdout.splitlines())) <= columns


def test_a_pipe_is_100_columns_wide(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    done = CliRunner().invoke(main, ["inspect", "bert"])
    assert "encoder.layer.0-2.attention" in done.stdout


def test_options_reach_the_model():
    found = document(
        "inspect", "gpt2", "--layers", 1, "--tokens", 5, "--batch", 3, "--dtype", "float64", "--train", "--seed", 3
    )
    assert found["streams"][0]["layers"] == 1
    assert found["streams"][0]["dtype"] == "float64"
    assert (found["mode"], found["inputs"]) == ("training", "input_ids (3, 5) int64")
    assert "of seed 3" in found["source"]
    assert document("inspect", "gpt2", "--float64")["closure"] < 1e-10


def test_inputs_come_from_a_file(place):
    torch.save({"input_ids": torch.ones(1, 7, dtype=torch.long)}, place / "in.pt")
    assert document("inspect", "gpt2", "--input", "in.pt")["inputs"] == "input_ids (1, 7) int64"


def spoilt(monkeypatch):
    """As if the second of two equations were off."""
    inspect = addnorm.inspect

    def spoil(*args, **kwargs):
        found = inspect(*args, **kwargs)
        found.sites[1].closure, found.sites[1].closes = float("nan"), False
        return found

    monkeypatch.setattr(addnorm, "inspect", spoil)


def test_a_closure_that_fails_exits_with_3_and_says_which(monkeypatch):
    spoilt(monkeypatch)
    done = run("inspect", "own_models:toy")
    one_sentence(done, 3, "1 of 2 sublayers do not close: x' = x + f(x) is off by nan at layers.1")
    assert "Toy, evaluation" in done.stdout
    found = document("inspect", "own_models:toy", code=3)
    assert found["closes"] is False
    assert found["streams"][0]["sites"][1]["closure"] is None  # JSON has no NaN
    assert run("record", "own_models:toy").exit_code == 3


def test_a_stream_that_is_no_sum_exits_with_3(monkeypatch):
    inspect = addnorm.inspect

    def spoil(*args, **kwargs):
        found = inspect(*args, **kwargs)
        found.streams[0].closure, found.streams[0].closes = 0.5, False
        return found

    monkeypatch.setattr(addnorm, "inspect", spoil)
    one_sentence(run("inspect", "own_models:toy"), 3, "stream is not x_0 and all writes: their sum is off by 5.0e-01")


@pytest.mark.parametrize("command", ["inspect", "record", "decompose", "ablate"])
def test_a_model_without_a_residual_add_exits_with_3(command):
    one_sentence(run(command, "own_models:none"), 3, "Linear has no residual stream: no residual add was found")


@pytest.mark.parametrize("command", ["inspect", "record", "decompose", "ablate"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nosuch"], "MODEL is 'nosuch', expected minilm, a directory"),
        (["bart/large" * 40], "nothing is downloaded"),
        (["minilm", "--text", "none.txt"], "--text is 'none.txt', expected a text file: there is no such file"),
        (["gpt2", "--text", "texts.txt"], "--text came with MODEL 'gpt2'"),
        (["gpt2", "--input", "texts.txt"], "expected a file that ends in .safetensors or .pt"),
        (["gpt2", "--layers", 0], "--layers is 0, expected"),
        (["minilm", "--batch", -1], "--batch is -1, expected"),
        (["gpt2", "--dtype", "int8"], "--dtype is 'int8', expected one of float32"),
        (["own_models:nosuch"], "nosuch"),
        (["own_models:wrong"], "refuses its inputs, argument 1 (2, 3, 9) float32"),
    ],
    ids=lambda value: str(value[0])[:12] if isinstance(value, list) else "",
)
def test_what_cannot_be_used_is_refused_in_one_sentence(command, arguments, words):
    done = run(command, *arguments)
    one_sentence(done, 2, words)
    assert done.stdout == ""


def test_a_mistyped_option_is_told():
    done = run("inspect", "gpt2", "--float32")
    assert done.exit_code == 2
    assert "--float32" in done.stderr


# addnorm record


def test_record_reads_a_file_a_batch_a_step_and_counts_no_padding(place):
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
    assert rec.facts["name"] == "minilm"
    # The last step is one short text: as if it had been read alone.
    (place / "short.txt").write_text("Short.\n")
    run("record", "minilm", "--text", "short.txt", "--out", "alone.json")
    alone = Recording.load(place / "alone.json")
    for role, name in (("out", "rms"), ("write", "ratio"), ("grad", "l2")):
        together = [value for _, value in rec.series(role, name, step=1)]
        assert together == pytest.approx([value for _, value in alone.series(role, name)], rel=1e-4)


def test_json_is_the_recording_on_stdout():
    found = document("record", "llama", "--steps", 3, "--only", "2-3")
    assert (found["schema"], found["facts"]["name"]) == ("addnorm.recording", "llama")
    assert {site["layer"] for site in found["sites"] if site["layer"] is not None} == {1, 2}
    assert {step for series in found["series"] for step in series["steps"]} == {0, 1, 2}
    steps = [series["values"] for series in found["series"] if (series["role"], series["statistic"]) == ("out", "rms")]
    assert len({*steps[0]}) == 3  # inputs of their own


def test_without_gradients_there_are_none():
    found = document("record", "gpt2", "--no-grads")
    assert not [series for series in found["series"] if series["statistic"] == "grad_l2" or series["role"] == "grad"]
    assert found["facts"]["loss"] is None


def test_the_models_own_loss_is_taken():
    assert document("record", "own_models:with_loss")["facts"]["loss"] == cli_record.OWN_LOSS


def test_the_probes_gradient_is_not_that_of_a_constant():
    """The mean square of LayerNorm's output has a gradient of rounding; the probe's is of order one."""
    x = torch.randn(2, 5, 64, requires_grad=True)
    y = torch.nn.functional.layer_norm(x, (64,))
    (constant,) = torch.autograd.grad(y.square().mean(), x, retain_graph=True)
    (probed,) = torch.autograd.grad(cli_record.Probe(0)(y, None), x)
    assert probed.norm() > 1e3 * constant.norm()
    assert torch.equal(cli_record.Probe(0)(y, None), cli_record.Probe(0)(y, None))


def test_the_memory_map_sums_to_one():
    done = run("record", "bert", "--memory-map")
    shares = [float(value) for value in re.findall(r"(-?[\d.]+)%$", done.stdout, re.M)]
    assert len(shares) == 8
    assert sum(shares) == pytest.approx(100, abs=0.1)
    assert done.stdout.index("encoder.layer.2 ") < done.stdout.index("norm biases")


def test_plots_are_png_files(place):
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
        (["--plots", "texts.txt"], "--plots is 'texts.txt', which cannot be written ("),
        (["--only", "4"], "--only is '4', expected layers from 1 to 3"),
        (["--only", "3-2"], "--only is '3-2', expected layers from 1 to 3"),
        (["--only", "a"], "--only is 'a', expected layers from 1 to 3"),
    ],
)
def test_record_refuses_in_one_sentence(place, arguments, words):
    before = names_in(place)
    done = run("record", "gpt2", *arguments)
    one_sentence(done, 2, words)
    assert done.stdout == ""
    assert names_in(place) == before


def test_more_steps_than_there_are_inputs_are_refused():
    one_sentence(
        run("record", "minilm", "--text", "texts.txt", "--steps", 2), 2, "--steps is 2, expected at most 1: there are 3"
    )
    one_sentence(
        run("record", "own_models:toy", "--steps", 2),
        2,
        "--steps is 2, expected 1: the inputs of MODEL 'own_models:toy'",
    )


def test_a_model_without_gradients_is_told_to_go_without():
    one_sentence(run("record", "own_models:frozen"), 2, "use --no-grads")
    assert run("record", "own_models:frozen", "--no-grads").exit_code == 0


@pytest.mark.parametrize(
    ("package", "options"), [("matplotlib", ["--plots", "p"]), ("pyarrow", ["--out", "run.parquet"])]
)
def test_a_package_that_is_missing_is_told_before_anything_runs(place, monkeypatch, package, options):
    monkeypatch.setitem(sys.modules, package, None)
    one_sentence(run("record", "gpt2", *options), 2, f"{package} is not installed", "pip install 'addnorm[")
    assert not (place / "p").exists()


@pytest.mark.parametrize("options", [["--out", "new/run.json"], ["--out", "new/run.parquet"], ["--plots", "new"]])
def test_a_full_disk_leaves_nothing_half_written(place, monkeypatch, options):
    def full(self, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    done = run("record", "gpt2", *options)
    one_sentence(done, 2, "cannot be written (No space left on device)")
    assert "Recording of GPT2Model" in done.stdout  # what was measured is not lost
    assert names_in(place / "new") == []


def interrupted_in(monkeypatch, step):
    """Ctrl-C between the forward and the backward of that step."""
    loss, calls = cli_record.Probe.__call__, []

    def counted(*arguments):
        calls.append(None)
        if len(calls) == step + 1:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(*arguments)

    monkeypatch.setattr(cli_record.Probe, "__call__", counted)


def test_an_interrupt_keeps_the_steps_that_were_finished(place, monkeypatch):
    interrupted_in(monkeypatch, 2)
    done = run("record", "llama", "--steps", 5, "--out", "run.json")
    assert done.exit_code == 130
    assert done.stderr == "Written: run.json\nInterrupted.\n"
    assert "2 steps 0 ... 1" in done.stdout
    rec = Recording.load(place / "run.json")
    assert (rec.steps, rec.facts["interrupted"]) == ((0, 1), "after 2 of 5 steps")
    assert {series.steps[-1] for *_, series in rec.each_series()} == {1}
    assert [*rec.maps] == ["stream"]


def test_an_interrupt_in_the_first_step_writes_nothing(place, monkeypatch):
    interrupted_in(monkeypatch, 0)
    done = run("record", "llama", "--out", "run.json")
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "Interrupted.\n")
    assert not (place / "run.json").exists()


# addnorm decompose, addnorm ablate


def test_decompose_has_shares_that_sum_to_one():
    found = document("decompose", "minilm", "--tokens", 16)
    (stream,) = found["streams"]
    assert sum(stream["shares"].values()) == pytest.approx(1, abs=1e-6)
    assert len(stream["shares"]) == 14
    assert stream["closure"] < 1e-5
    assert document("decompose", "t5", "--float64")["streams"][1]["closure"] < 1e-10
    done = run("decompose", "bert")
    assert "norm biases" in done.stdout.split("encoder.layer.2 ")[1]


def test_what_cannot_be_decomposed_exits_with_3(monkeypatch):
    def refused(*_, stream, **__):
        raise ValueError(f"{stream} cannot be decomposed: it does not add up.")

    monkeypatch.setattr(addnorm, "decompose", refused)
    done = run("decompose", "gpt2")
    one_sentence(done, 3, "stream cannot be decomposed: it does not add up")
    assert document("decompose", "gpt2", code=3)["refused"] == ["stream cannot be decomposed: it does not add up."]


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_ablate_has_a_line_for_each_sublayer(mode):
    found = document("ablate", "llama", "--mode", mode)
    assert [site["site"] for site in found["sites"]][:2] == ["layers.0.self_attn", "layers.0.mlp"]
    assert all(site["output_change"] > 0.01 for site in found["sites"])
    done = run("ablate", "llama", "--mode", mode)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "layers.2.mlp" in done.stdout


def test_ablate_tells_the_change_of_the_models_own_loss():
    for site in document("ablate", "own_models:with_loss")["sites"]:
        assert site["loss_change"] != 0
