"""Tests of `addnorm inspect`, `decompose` and `ablate`: output, exit codes, and the errors that they share with `record`."""

import json

import pytest
import torch

import addnorm
from addnorm.stream.models.load import load
from support.commands import assert_one_sentence, assert_words, document, run, succeed
from support.report_pages import check_page

pytestmark = pytest.mark.usefixtures("folder")
GPT2 = ("gpt2", "--layers", 2)
COMMANDS = ("inspect", "record", "decompose", "ablate")


# addnorm inspect


def test_inspect_names_post_ln_of_minilm():
    output = document("inspect", "minilm", "--tokens", 16)
    (stream,) = output["streams"]
    assert (output["wiring"], output["closes"], output["name"], len(stream["sites"])) == ("post_ln", True, "minilm", 12)
    assert {site["norms"]["norm_out"]["eps"] for site in stream["sites"]} == {1e-12}
    assert output["closure"] < 1e-6
    assert "all-MiniLM-L6-v2" in output["source"]


def test_inspect_prints_table_and_notes():
    result = succeed("inspect", *GPT2)
    assert result.stderr == ""
    assert_words(
        result.stdout, "GPT2Model, evaluation: pre_ln", "h.0-1.mlp", "x_L = x_0 + all writes", "input_ids (2, 16) int64",
        "random, of seed 0", "proved on these inputs",
    )  # fmt: skip
    assert "\x1b" not in result.stdout


def test_inspect_compares_the_model_with_a_wiring():
    agrees = succeed("inspect", *GPT2, "--expect", "pre-LN")
    assert_words(agrees.stdout, "agrees with pre_ln: 4 sublayers")
    differs = run("inspect", *GPT2, "--expect", "post_ln", "--json")
    assert differs.exit_code == 3
    assert "It is not post_ln: the norm is before the sublayer, expected after the add: in all 4." in differs.stderr
    (deviation,) = json.loads(differs.stdout)["verification"]["deviations"]
    assert (deviation["term"], len(deviation["sites"])) == ("the norm", 4)


def test_inspect_compares_several_streams_with_a_wiring(folder):
    right = succeed("inspect", "own_models:several", "--expect", "mhc")
    assert_words(right.stdout, "Encoder, evaluation: mhc", "4 streams: mhc", "agrees with mhc: 4 sublayers")
    other = run("inspect", "own_models:several", "--expect", "reversible", "--float64")
    assert other.exit_code == 3
    assert "It is not reversible: the number of streams is 4, expected 2" in other.stderr
    recorded = run("record", "own_models:several", "--states", "several.pt")
    assert_words(recorded.stdout, "Recording of Encoder: 4 sublayers", "centration")
    succeed("inspect", "own_models:several", "--like", "several.pt")
    succeed("inspect", "own_models:several", "--report", "page.html")
    assert "The streams by depth" in (folder / "page.html").read_text()


def test_inspect_compares_the_model_with_another():
    same = succeed("inspect", *GPT2, "--dtype", "bfloat16", "--like", "gpt2")
    assert_words(same.stdout, "agrees with the reference, GPT2Model: 4 sublayers", "roundings")
    other = run("inspect", "llama", "--layers", 2, "--like", "gpt2", "--json")
    assert other.exit_code == 3
    verification = json.loads(other.stdout)["verification"]
    assert (verification["reference"], verification["agrees"]) == ("GPT2Model", False)
    assert f"It is not the reference, GPT2Model: {verification['sentences'][0]}." in other.stderr
    assert_words(
        run("inspect", "own_models:toy", "--like", "own_models:block").stderr, "the number of layers is 2, expected 1"
    )


def test_states_of_another_process_are_compared():
    assert "Written: states.pt" in succeed("record", *GPT2, "--no-grads", "--states", "states.pt").stderr
    same = succeed("inspect", *GPT2, "--like", "states.pt")
    assert_words(same.stdout, "agrees with the reference, GPT2Model: 4 sublayers, each computed", "equal to the bit")
    seeded = run("inspect", *GPT2, "--seed", 1, "--like", "states.pt")
    assert_one_sentence(seeded, 3, "the difference begins at the start of the stream: relative error")
    shorter = run("inspect", *GPT2, "--tokens", 5, "--like", "states.pt")
    assert_one_sentence(shorter, 2, "the stream has shape", "as the reference: use the same inputs")


def test_locate_names_a_captured_tensor(folder):
    inputs = torch.randint(50, (1, 7), generator=torch.Generator().manual_seed(0))
    torch.save({"input_ids": inputs}, folder / "in.pt")
    loaded = load("gpt2", layers=2, inputs=folder / "in.pt")
    with torch.no_grad():
        states = loaded.model(**loaded.kwargs, output_hidden_states=True).hidden_states
    torch.save(states[1][:, 2:].bfloat16(), folder / "hidden.pt")
    arguments = ("locate", "gpt2", "hidden.pt", "--layers", 2, "--input", "in.pt")
    found = "the stream after h.0.mlp (some tokens), to the bit; also the model's hidden_states[1]\n"
    assert succeed(*arguments).stdout == found
    assert document(*arguments)["location"]["site"] == "h.0.mlp"
    torch.save(torch.randn(7, states[1].shape[-1]), folder / "hidden.pt")
    none = run(*arguments)
    assert none.exit_code == 3
    assert "hidden.pt has no value of a stream; nearest: " in none.stderr
    ones = torch.ones(2, states[1].shape[-1])
    for content in (ones.long(), ones.to("meta")):
        torch.save(content, folder / "hidden.pt")
        assert_one_sentence(run(*arguments), 2)


@pytest.mark.parametrize(("name", "columns"), [("t5", 80), ("llama", 140)])
@pytest.mark.parametrize("command", COMMANDS)
def test_stream_commands_fit_the_terminal(command, name, columns):
    result = succeed(command, name, COLUMNS=str(columns))
    assert max(map(len, result.stdout.splitlines())) <= columns


def test_inspect_in_a_pipe_has_100_columns():
    assert "encoder.layer.0-2.attention" in run("inspect", "bert", COLUMNS=None).stdout


def test_inspect_passes_options(folder):
    options = ("--layers", 1, "--tokens", 5, "--batch", 3, "--dtype", "float64", "--train", "--seed", 3)
    output = document("inspect", "gpt2", *options)
    (stream,) = output["streams"]
    assert (stream["layers"], stream["dtype"], output["mode"]) == (1, "float64", "training")
    assert (output["inputs"], "of seed 3" in output["source"]) == ("input_ids (3, 5) int64", True)
    assert document("inspect", "gpt2", "--float64")["closure"] < 1e-10
    torch.save({"input_ids": torch.ones(1, 7, dtype=torch.long)}, folder / "in.pt")
    assert document("inspect", "gpt2", "--input", "in.pt")["inputs"] == "input_ids (1, 7) int64"


@pytest.fixture
def spoil(monkeypatch):
    """Return a function that makes every inspection be changed by another function."""
    inspect = addnorm.inspect

    def install(change):
        def spoiled(*args, **kwargs):
            inspection = inspect(*args, **kwargs)
            change(inspection)
            return inspection

        monkeypatch.setattr(addnorm, "inspect", spoiled)

    return install


def test_inspect_failed_closure_exits_with_3(spoil, folder):
    spoil(lambda inspection: vars(inspection.sites[1]).update(closure=float("nan"), closes=False))
    result = run("inspect", "own_models:toy")
    assert_one_sentence(
        result,
        3,
        "The equations of 1 of 2 sublayers do not close: x' = x + f(x) has a relative error of nan at layers.1",
    )
    assert "Toy, evaluation" in result.stdout
    output = document("inspect", "own_models:toy", "--report", "page.html", code=3)
    assert "Does not hold: " in check_page((folder / "page.html").read_text()).text
    assert (output["closes"], output["streams"][0]["sites"][1]["closure"]) == (False, None)  # JSON has no NaN
    assert run("record", "own_models:toy").exit_code == 3


def test_inspect_failed_sum_exits_with_3(spoil):
    spoil(lambda inspection: vars(inspection.streams[0]).update(closure=0.5, sum_closes=False))
    assert_one_sentence(run("inspect", "own_models:toy"), 3, "is not the sum of x_0 and all writes: relative error 0.5")


@pytest.mark.parametrize("command", COMMANDS)
def test_model_without_stream_exits_with_3(command):
    assert_one_sentence(run(command, "own_models:none"), 3, "Linear has no residual stream: no residual add was found")


# addnorm decompose, addnorm ablate


def test_decompose_shares_sum_to_one():
    (stream,) = document("decompose", "minilm", "--tokens", 16)["streams"]
    assert sum(stream["shares"].values()) == pytest.approx(1, abs=1e-6)
    assert (len(stream["shares"]), stream["closure"] < 1e-5) == (14, True)
    assert document("decompose", "t5", "--float64")["streams"][1]["closure"] < 1e-10
    printed = run("decompose", "bert").stdout
    assert "norm biases" in printed.split("encoder.layer.2 ")[1]
    assert_words(printed, "the sum of its parts, relative error")


def test_decompose_takes_streams_without_a_wiring(folder):
    lines = ("import torch", "from support.random_programs import random_program", "def build():",
             "    return random_program(7), torch.randn(2, 5, 16)")  # fmt: skip
    (folder / "no_wiring.py").write_text("\n".join(lines))
    (stream,) = document("decompose", "no_wiring:build")["streams"]
    assert sum(stream["shares"].values()) == pytest.approx(1.0)


def test_decompose_failure_exits_with_3(monkeypatch):
    def refused(*_, stream, **__):
        raise ValueError(f"{stream} cannot be decomposed: it does not add up.")

    monkeypatch.setattr(addnorm, "decompose", refused)
    assert_one_sentence(run("decompose", "gpt2"), 3, "stream cannot be decomposed: it does not add up")
    assert document("decompose", "gpt2", code=3)["refused"] == ["stream cannot be decomposed: it does not add up."]


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_ablate_lists_sublayers(mode):
    sites = document("ablate", "llama", "--mode", mode)["sites"]
    assert [site["site"] for site in sites][:2] == ["layers.0.self_attn", "layers.0.mlp"]
    assert all(site["output_change"] > 0.01 for site in sites)
    assert "layers.2.mlp" in run("ablate", "llama", "--mode", mode).stdout
    losses = [site["loss_change"] for site in document("ablate", "own_models:with_loss", "--mode", mode)["sites"]]
    assert min(map(abs, losses)) > 0
