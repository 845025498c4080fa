"""addnorm fuse: what it prints, the JSON, and how it exits where nothing was proved, fused or understood."""

import json
import re
import sys

import pytest
from click.testing import CliRunner

pytest.importorskip("transformers")

from addnorm.cli import main

# Models of a user's own, in a module that is beside them.
FACTORIES = """
import warnings
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        warnings.warn("a model that warns")
        return self.norm(x + self.linear(x))

class Liar(Block):
    def forward(self, x):
        y = super().forward(x)
        return 2 * y if torch.compiler.is_compiling() else y

class Broadcasting(Block):
    def forward(self, x):
        return self.norm(x + self.linear(x)[:1])

x = torch.randn(2, 3, 8)

def good():
    return Block(), (x,)

def liar():
    return Liar(), (x,)

def broadcasting():
    return Broadcasting(), (x,)

def none():
    return nn.Linear(8, 8), (x,)

def wrong():
    return Block(), (torch.randn(2, 3, 9),)

def frozen():
    return Block().requires_grad_(False), (x,)
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch, threads):
    """A directory of the test's own, with the factories in it; one thread, for models so small."""
    threads(1)
    (tmp_path / "fuse_models.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("fuse_models", None)


def run(*arguments, **env):
    return CliRunner().invoke(
        main, ["fuse", *map(str, arguments)], env={"COLUMNS": "100", **env}, catch_exceptions=False
    )


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def document(*arguments, code=0):
    done = run(*arguments, "--json")
    assert done.exit_code == code, done.stderr
    return json.loads(done.stdout, parse_constant=refuse), done.stderr


def one_sentence(stderr, *words):
    assert re.fullmatch(r"Error: .+\.\n", stderr), stderr
    for word in words:
        assert word in stderr


def test_it_reports_what_is_fused_the_proof_and_what_it_brings():
    done = run("fuse_models:good", "--benchmark")
    assert (done.exit_code, done.stderr) == (0, "")
    for words in (
        "Block, evaluation: 1 of 1 Add & Norm is fused",
        "LayerNorm 1e-5",
        "Proven equal",
        "1 output",
        "4 gradients",
        "from float64.",
        "of the forward pass",
        "inference",
        "training step",
        "saved for backward",
        "(2, 3, 8) float32",
        "fuse_models:good",
    ):
        assert words in " ".join(done.stdout.split())
    assert "\x1b" not in done.stdout
    assert "a model that warns" not in done.output


def test_minilm_is_fused_but_for_what_is_told():
    found, errors = document("minilm", "--batch", 1, "--tokens", 8)
    assert errors == ""
    assert (found["schema"], found["name"], found["model"]) == ("addnorm.fusion", "minilm", "BertModel")
    assert found["fused"] >= 12
    assert found["proof"]["holds"]
    assert found["benchmark"] is None
    reasons = [one["reason"] for one in found["boundaries"] if not one["is_fused"]]
    assert len(reasons) + found["fused"] == len(found["boundaries"])
    assert all(reasons)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(columns):
    done = run("llama", "--dtype", "bfloat16", "--train", COLUMNS=str(columns))
    assert done.exit_code == 0
    assert "LlamaModel, training: 6 of 6 Add & Norms are fused" in " ".join(done.stdout.split())
    assert "casting llama" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= columns


def test_fuse_measures_only_when_asked():
    done = run("fuse_models:good")
    assert done.exit_code == 0
    assert "of the forward pass" in done.stdout
    assert "training step" not in done.stdout


def test_the_graphs_go_on_to_inductor(monkeypatch):
    from addnorm.fusion import backend

    asked = []
    monkeypatch.setattr(backend, "compile_graph", lambda graph, inputs, options: asked.append(graph) or graph.forward)
    found, _ = document("fuse_models:good", "--compile")
    assert found["inductor"]
    assert asked


def test_a_model_without_gradients_has_no_training_step():
    found, _ = document("fuse_models:frozen", "--benchmark")
    assert found["proof"]["gradients"] == []
    assert found["benchmark"]["training"] is None


def test_a_failed_proof_is_shown_and_exits_with_3():
    done = run("fuse_models:liar")
    assert done.exit_code == 3
    one_sentence(done.stderr, "Liar is not fused", "output")
    for words in (
        "the proof failed",
        "!!",
        "Attempted:",
        "1 of 1 output",
        "4 of 4 gradients",
        "linear.weight",
        "1 more gradient",
    ):
        assert words in done.stdout
    assert "forward pass" not in done.stdout


def test_a_failed_proof_as_json():
    found, errors = document("fuse_models:liar", code=3)
    one_sentence(errors, "Liar is not fused")
    assert not found["proof"]["holds"]
    assert [one["holds"] for one in found["proof"]["outputs"]] == [False]


@pytest.mark.parametrize(
    ("model", "reason"), [("broadcasting", "its add broadcasts"), ("none", "in its graphs no norm reads a sum")]
)
def test_where_nothing_can_be_fused_it_says_why_and_exits_with_3(model, reason):
    done = run(f"fuse_models:{model}")
    assert done.exit_code == 3
    one_sentence(done.stderr, "is not fused", reason)
    assert "the model is unchanged" in done.stdout


def test_where_the_compiler_fails_it_is_not_the_inputs_that_are_blamed(monkeypatch):
    from torch._dynamo.exc import TorchDynamoException

    import addnorm

    def fail(*_, **__):
        raise TorchDynamoException("no such thing\nand much more")

    monkeypatch.setattr(addnorm, "fuse", fail)
    done = run("fuse_models:good")
    assert done.exit_code == 3
    one_sentence(done.stderr, "Block is not fused", "no such thing")
    assert "much more" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("fuse_models:wrong",), "fails with its inputs"), (("minilmm",), "similar names are minilm"),
     (("fuse_models:good", "--layers", 2), "leave --layers out"), (("fuse_models:good", "--dtype", "int8"), "--dtype is 'int8'")],
)  # fmt: skip
def test_what_is_wrong_with_the_arguments_is_a_sentence_and_a_2(arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2
    one_sentence(done.stderr, words)
    assert done.stdout == ""


def test_the_examples_of_the_help_are_lines_of_their_own():
    shown = [line.strip() for line in run("--help").stdout.splitlines()]
    assert "addnorm fuse minilm" in shown
    assert "addnorm fuse llama --dtype bfloat16 --train" in shown
