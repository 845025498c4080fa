"""Tests of `addnorm fuse`: report, JSON and exit codes."""

import pytest

import addnorm
from addnorm.fusion import backend, benchmark
from support.commands import assert_one_sentence, assert_words, document, run, succeed

pytestmark = pytest.mark.usefixtures("folder")


def test_fuse_prints_fusion_proof_and_benchmark(monkeypatch):
    monkeypatch.setattr(benchmark, "MAX_ROUNDS", 2)  # too few to call it slower
    result = succeed("fuse", "own_models:block")
    assert result.stderr == ""
    assert_words(
        result.stdout, "Block, evaluation: 1 of 1 Add & Norm is fused", "LayerNorm 1e-5", "Proven equal", "1 output", "5 gradients",
        "from float64.", "of the forward pass", "inference", "training step", "saved for backward", "(2, 3, 8) float32",
        "own_models:block",
    )  # fmt: skip
    assert "\x1b" not in result.stdout
    assert "a model that warns" not in result.output


@pytest.mark.parametrize(("name", "count"), [("bert", 6), pytest.param("minilm", 12, marks=pytest.mark.slow)])
def test_fuse_prints_json(name, count):
    fusion = document("fuse", name, "--batch", 2, "--tokens", 8, "--no-benchmark")
    assert (fusion["schema"], fusion["name"], fusion["model"]) == ("addnorm.fusion", name, "BertModel")
    assert (fusion["fused"], fusion["proof"]["holds"], fusion["benchmark"]) == (count, True, None)
    reasons = [boundary["reason"] for boundary in fusion["boundaries"] if not boundary["is_fused"]]
    assert len(reasons) + count == len(fusion["boundaries"])
    assert all(reasons)


def test_fuse_fits_the_terminal():
    result = succeed("fuse", "llama", "--layers", 2, "--dtype", "bfloat16", "--train", "--no-benchmark", COLUMNS="60")
    assert_words(result.stdout, "LlamaModel, training: 4 of 4 Add & Norms are fused", "casting llama")
    assert max(map(len, result.stdout.splitlines())) <= 60


def test_slower_model_is_no_failure(monkeypatch):
    monkeypatch.setattr(benchmark, "MAX_ROUNDS", 2)
    monkeypatch.setattr(benchmark.Benchmark, "is_slower", True)
    fusion = document("fuse", "own_models:block")
    assert (fusion["changed"], fusion["fused"], fusion["proof"]["holds"]) == (False, 1, True)
    assert document("fuse", "own_models:block", "--no-benchmark")["changed"]


def test_fuse_compile_uses_inductor(monkeypatch):
    asked = []
    monkeypatch.setattr(backend, "compile_graph", lambda graph, inputs, options: asked.append(graph) or graph.forward)
    assert document("fuse", "own_models:block", "--compile", "--no-benchmark")["inductor"]
    assert asked


def test_failed_proof_exits_with_3():
    result = run("fuse", "own_models:liar")
    assert_one_sentence(result, 3, "Liar is not fused", "output")
    assert_words(
        result.stdout, "the proof failed", "!!", "Attempted:", "1 of 1 output", "5 of 5 gradients", "linear.weight", "2 more gradients"
    )  # fmt: skip
    assert "forward pass" not in result.stdout
    proof = document("fuse", "own_models:liar", code=3)["proof"]
    assert (proof["holds"], [output["holds"] for output in proof["outputs"]]) == (False, [False])


@pytest.mark.parametrize(
    ("model", "reason"), [("broadcasting", "its add broadcasts"), ("none", "in its graphs no norm reads a sum")]
)
def test_nothing_to_fuse_exits_with_3(model, reason):
    result = run("fuse", f"own_models:{model}")
    assert_one_sentence(result, 3, "is not fused", reason)
    assert "the model is unchanged" in result.stdout


def test_compiler_error_exits_with_3(monkeypatch):
    from torch._dynamo.exc import TorchDynamoException

    def fail(*_, **__):
        raise TorchDynamoException("no such thing\nand much more")

    monkeypatch.setattr(addnorm, "fuse", fail)
    result = run("fuse", "own_models:block")
    assert_one_sentence(result, 3, "Block is not fused", "no such thing")
    assert "much more" not in result.stderr
