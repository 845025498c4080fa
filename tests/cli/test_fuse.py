"""Tests of `addnorm fuse`: report, JSON and exit codes."""

import json
import re
import sys

import pytest
from click.testing import CliRunner

pytest.importorskip("transformers")

from addnorm.fusion import benchmark
from addnorm_cli.group import addnorm as main

# Models in a user's module in the current directory.
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
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, threads):
    """Run in a temporary directory that holds the factories, on one thread."""
    monkeypatch.setattr(benchmark, "SECONDS", 0.0)
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
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout, parse_constant=refuse), result.stderr


def assert_one_sentence(stderr, *words):
    assert re.fullmatch(r"Error: .+\.\n", stderr), stderr
    for word in words:
        assert word in stderr


def test_fuse_prints_fusion_proof_and_benchmark():
    result = run("fuse_models:good", "--benchmark")
    assert (result.exit_code, result.stderr) == (0, "")
    for words in (
        "Block, evaluation: 1 of 1 Add & Norm is fused",
        "LayerNorm 1e-5",
        "Proven equal",
        "1 output",
        "5 gradients",
        "from float64.",
        "of the forward pass",
        "inference",
        "training step",
        "saved for backward",
        "(2, 3, 8) float32",
        "fuse_models:good",
    ):
        assert words in " ".join(result.stdout.split())
    assert "\x1b" not in result.stdout
    assert "a model that warns" not in result.output


@pytest.mark.parametrize(("name", "count"), [("bert", 6), pytest.param("minilm", 12, marks=pytest.mark.slow)])
def test_fuse_prints_json(name, count):
    fusion, errors = document(name, "--batch", 2, "--tokens", 8)
    assert errors == ""
    assert (fusion["schema"], fusion["name"], fusion["model"]) == ("addnorm.fusion", name, "BertModel")
    assert fusion["fused"] == count
    assert fusion["proof"]["holds"]
    assert fusion["benchmark"] is None
    reasons = [boundary["reason"] for boundary in fusion["boundaries"] if not boundary["is_fused"]]
    assert len(reasons) + fusion["fused"] == len(fusion["boundaries"])
    assert all(reasons)


def test_fuse_fits_the_terminal():
    result = run("llama", "--layers", 2, "--dtype", "bfloat16", "--train", COLUMNS="60")
    assert result.exit_code == 0
    assert "LlamaModel, training: 4 of 4 Add & Norms are fused" in " ".join(result.stdout.split())
    assert "casting llama" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 60


def test_fuse_compile_uses_inductor(monkeypatch):
    from addnorm.fusion import backend

    asked = []
    monkeypatch.setattr(backend, "compile_graph", lambda graph, inputs, options: asked.append(graph) or graph.forward)
    fusion, _ = document("fuse_models:good", "--compile")
    assert fusion["inductor"]
    assert asked


def test_failed_proof_exits_with_3():
    result = run("fuse_models:liar")
    assert result.exit_code == 3
    assert_one_sentence(result.stderr, "Liar is not fused", "output")
    for words in (
        "the proof failed",
        "!!",
        "Attempted:",
        "1 of 1 output",
        "5 of 5 gradients",
        "linear.weight",
        "2 more gradients",
    ):
        assert words in result.stdout
    assert "forward pass" not in result.stdout


def test_failed_proof_as_json():
    fusion, errors = document("fuse_models:liar", code=3)
    assert_one_sentence(errors, "Liar is not fused")
    assert not fusion["proof"]["holds"]
    assert [output["holds"] for output in fusion["proof"]["outputs"]] == [False]


@pytest.mark.parametrize(
    ("model", "reason"), [("broadcasting", "its add broadcasts"), ("none", "in its graphs no norm reads a sum")]
)
def test_nothing_to_fuse_exits_with_3(model, reason):
    result = run(f"fuse_models:{model}")
    assert result.exit_code == 3
    assert_one_sentence(result.stderr, "is not fused", reason)
    assert "the model is unchanged" in result.stdout


def test_compiler_error_exits_with_3(monkeypatch):
    from torch._dynamo.exc import TorchDynamoException

    import addnorm

    def fail(*_, **__):
        raise TorchDynamoException("no such thing\nand much more")

    monkeypatch.setattr(addnorm, "fuse", fail)
    result = run("fuse_models:good")
    assert result.exit_code == 3
    assert_one_sentence(result.stderr, "Block is not fused", "no such thing")
    assert "much more" not in result.stderr
