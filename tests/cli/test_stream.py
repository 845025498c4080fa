"""Tests of `addnorm inspect`, `decompose` and `ablate`: output, exit codes, and the errors that they share with `record`."""

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import addnorm
from addnorm_cli.group import addnorm as main
from support.stream_commands import assert_one_sentence, document, run, user_folder


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, threads):
    """Run in a temporary directory, on one thread since the models are small."""
    threads(1)
    with user_folder(tmp_path, monkeypatch) as folder:
        yield folder


# addnorm inspect


def test_inspect_names_post_ln_of_minilm():
    output = document("inspect", "minilm", "--tokens", 16)
    (stream,) = output["streams"]
    assert (output["wiring"], output["closes"], output["name"], len(stream["sites"])) == ("post_ln", True, "minilm", 12)
    assert stream["norms"]["embedding"]["eps"] == 1e-12
    assert {site["norms"]["norm_out"]["eps"] for site in stream["sites"]} == {1e-12}
    assert output["closure"] < 1e-6
    assert "all-MiniLM-L6-v2" in output["source"]


def test_inspect_prints_table_and_notes():
    result = run("inspect", "gpt2", "--layers", 2)
    assert (result.exit_code, result.stderr) == (0, "")
    for words in (
        "GPT2Model, evaluation: pre_ln",
        "h.0-1.mlp",
        "x_L = x_0 + all writes",
        "input_ids (2, 16) int64",
        "random, of seed 0",
    ):
        assert words in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(("name", "columns"), [("t5", 80), ("llama", 140)])
def test_stream_commands_fit_the_terminal(name, columns):
    for command in ("inspect", "record", "decompose", "ablate"):
        result = run(command, name, COLUMNS=str(columns))
        assert result.exit_code == 0
        assert max(map(len, result.stdout.splitlines())) <= columns


def test_inspect_in_a_pipe_has_100_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    result = CliRunner().invoke(main, ["inspect", "bert"])
    assert "encoder.layer.0-2.attention" in result.stdout


def test_inspect_passes_options():
    output = document(
        "inspect", "gpt2", "--layers", 1, "--tokens", 5, "--batch", 3, "--dtype", "float64", "--train", "--seed", 3
    )
    assert output["streams"][0]["layers"] == 1
    assert output["streams"][0]["dtype"] == "float64"
    assert (output["mode"], output["inputs"]) == ("training", "input_ids (3, 5) int64")
    assert "of seed 3" in output["source"]
    assert document("inspect", "gpt2", "--float64")["closure"] < 1e-10


def test_inspect_reads_input_file(folder):
    torch.save({"input_ids": torch.ones(1, 7, dtype=torch.long)}, folder / "in.pt")
    assert document("inspect", "gpt2", "--input", "in.pt")["inputs"] == "input_ids (1, 7) int64"


def spoil_closure(monkeypatch):
    """Make the second of two equations fail."""
    inspect = addnorm.inspect

    def spoil(*args, **kwargs):
        inspection = inspect(*args, **kwargs)
        inspection.sites[1].closure, inspection.sites[1].closes = float("nan"), False
        return inspection

    monkeypatch.setattr(addnorm, "inspect", spoil)


def test_inspect_failed_closure_exits_with_3(monkeypatch):
    spoil_closure(monkeypatch)
    result = run("inspect", "own_models:toy")
    assert_one_sentence(
        result, 3, "1 of 2 sublayers does not close: x' = x + f(x) has a relative error of nan at layers.1"
    )
    assert "Toy, evaluation" in result.stdout
    output = document("inspect", "own_models:toy", code=3)
    assert output["closes"] is False
    assert output["streams"][0]["sites"][1]["closure"] is None  # JSON has no NaN
    assert run("record", "own_models:toy").exit_code == 3


def test_inspect_failed_sum_exits_with_3(monkeypatch):
    inspect = addnorm.inspect

    def spoil(*args, **kwargs):
        inspection = inspect(*args, **kwargs)
        inspection.streams[0].closure, inspection.streams[0].sum_closes = 0.5, False
        return inspection

    monkeypatch.setattr(addnorm, "inspect", spoil)
    assert_one_sentence(run("inspect", "own_models:toy"), 3, "is not the sum of x_0 and all writes: relative error 0.5")


@pytest.mark.parametrize("command", ["inspect", "record", "decompose", "ablate"])
def test_model_without_stream_exits_with_3(command):
    assert_one_sentence(run(command, "own_models:none"), 3, "Linear has no residual stream: no residual add was found")


# addnorm decompose, addnorm ablate


def test_decompose_shares_sum_to_one():
    output = document("decompose", "minilm", "--tokens", 16)
    (stream,) = output["streams"]
    assert sum(stream["shares"].values()) == pytest.approx(1, abs=1e-6)
    assert len(stream["shares"]) == 14
    assert stream["closure"] < 1e-5
    assert document("decompose", "t5", "--float64")["streams"][1]["closure"] < 1e-10
    result = run("decompose", "bert")
    assert "norm biases" in result.stdout.split("encoder.layer.2 ")[1]


def test_decompose_failure_exits_with_3(monkeypatch):
    def refused(*_, stream, **__):
        raise ValueError(f"{stream} cannot be decomposed: it does not add up.")

    monkeypatch.setattr(addnorm, "decompose", refused)
    result = run("decompose", "gpt2")
    assert_one_sentence(result, 3, "stream cannot be decomposed: it does not add up")
    assert document("decompose", "gpt2", code=3)["refused"] == ["stream cannot be decomposed: it does not add up."]


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_ablate_lists_sublayers(mode):
    output = document("ablate", "llama", "--mode", mode)
    assert [site["site"] for site in output["sites"]][:2] == ["layers.0.self_attn", "layers.0.mlp"]
    assert all(site["output_change"] > 0.01 for site in output["sites"])
    result = run("ablate", "llama", "--mode", mode)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "layers.2.mlp" in result.stdout


def test_ablate_reports_loss_change():
    for site in document("ablate", "own_models:with_loss")["sites"]:
        assert site["loss_change"] != 0
