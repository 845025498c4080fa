"""Tests of the benchmarks of stacks, streams, fusing and the lab on small models: equal variants, rows, derived numbers."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from addnorm import wirings
from addnorm.bench.harness import Case
from addnorm.fusion.tolerance import Difference
from addnorm.lab import Run, Text
from addnorm.lab.train import Training
from addnorm.stream.models.load import LoadedModel
from support.loading import load


@pytest.fixture(scope="module")
def scripts():
    """Return the benchmarks as modules."""
    return SimpleNamespace(**{name: load(f"benchmarks/bench_{name}.py") for name in ("stack", "stream", "fuse", "lab")})


def storages(module):
    return {parameter.data_ptr() for parameter in module.parameters()}


def assert_separate_weights(*modules):
    for one, other in itertools.combinations(modules, 2):
        assert not storages(one) & storages(other)
        assert sum(p.numel() for p in one.parameters()) == sum(p.numel() for p in other.parameters())


def assert_rows(rows, variants):
    assert [row["variant"] for row in rows] == variants
    assert all(0 < row["q1_us"] <= row["median_us"] <= row["q3_us"] for row in rows)


def rows_of(case, **times):
    return [case.row(variant=name, median_us=time) for name, time in times.items()]


def numbers(summary):
    return {one["name"]: (one["value"], one["met"]) for one in summary}


# Stacks.


def stack_case(wiring="pre_ln", job="inference"):
    return Case(wiring=wiring, job=job, batch=2, tokens=3, d=64, threads=1)


@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln"])
def test_stack_variants_are_equal_with_separate_weights(scripts, wiring):
    modules, x, _ = scripts.stack.variants(stack_case(wiring, "training"))
    outputs = {name: module(x) for name, module in modules.items()}
    for name in scripts.stack.PEERS:
        torch.testing.assert_close(outputs[name], outputs["addnorm"], rtol=1e-5, atol=1e-5)
    assert_separate_weights(*modules.values())
    assert {type(one) for one in modules["plain"].modules() if isinstance(one, nn.LayerNorm)} == {nn.LayerNorm}


@pytest.mark.parametrize(("wiring", "job"), [("pre_ln", "inference"), ("post_ln", "training")])
def test_stack_has_a_row_for_each_variant(scripts, wiring, job):
    rows = scripts.stack.measure(stack_case(wiring, job), rounds=2)["rows"]
    assert_rows(rows, ["addnorm", "plain", "torch"])
    assert all(("saved_bytes" in row) == (job == "training") for row in rows)


def test_stack_with_different_outputs_is_an_error(scripts, monkeypatch):
    real = scripts.stack.variants

    def spoiled(case):
        modules, x, dy = real(case)
        nn.init.constant_(modules["plain"].final.bias, 1.0)
        return modules, x, dy

    monkeypatch.setattr(scripts.stack, "variants", spoiled)
    with pytest.raises(AssertionError):
        scripts.stack.measure(stack_case(), rounds=1)


def test_stack_summary_follows_from_the_rows(scripts):
    rows = []
    for case in (stack_case(), stack_case(job="training"), stack_case("post_ln", "training")):
        for row, saved in zip(rows_of(case, addnorm=10.0, plain=9.0, torch=20.0), (50, 100, 200), strict=True):
            rows.append({**row, "saved_bytes": saved})
    found = {one["name"]: one for one in scripts.stack.summarize({"rows": rows})}
    lowest = found["forward + backward: lowest, against plain PyTorch"]
    assert (lowest["value"], lowest["met"], lowest["cells"], lowest["cells_met"]) == (0.9, False, 2, 0)
    assert found["inference: lowest, against torch.nn.TransformerEncoder"]["met"] is True
    assert found["saved bytes: highest share of plain PyTorch's"]["value"] == 0.5
    assert found["forward + backward: mean, against torch.nn.TransformerEncoder"]["value"] == pytest.approx(2.0)


# Streams, measured on MiniLM.


def test_stream_has_rows_and_calls(scripts, monkeypatch):
    monkeypatch.setattr(scripts.stream, "CALLS", 1)
    found = scripts.stream.measure(Case(batch=1, tokens=8, threads=1), rounds=1)
    assert_rows(found["rows"], ["plain", "recorded", "without gradients"])
    assert [row["call"] for row in found["calls"]] == ["inspect", "decompose"]
    assert all(0 < row["median_s"] <= row["most_s"] for row in found["calls"])
    assert all(row["closure"] <= scripts.stream.CLOSURE for row in found["calls"])


def test_stream_summary_follows_from_the_rows(scripts):
    case = Case(batch=1, tokens=8, threads=1)
    called = [{"call": "inspect", "batch": 1, "tokens": 8, "median_s": 1.0, "most_s": 2.0, "closure": 1e-7}]
    rows = rows_of(case, plain=10.0, recorded=25.0)
    assert numbers(scripts.stream.summarize({"rows": rows, "calls": called})) == {
        "recording, 1 x 8 tokens: times the plain step": (2.5, False),
        "inspect, 1 x 8 tokens: seconds, the slowest of 5": (2.0, True),
        "inspect, 1 x 8 tokens: closure": (1e-7, True),
    }


def test_text_that_is_too_short_is_refused(scripts, monkeypatch):
    monkeypatch.setattr(scripts.stream.minilm, "passages", lambda case: ["short"] * case.batch)
    with pytest.raises(ValueError, match="expected"):
        scripts.stream.minilm.load_model(Case(batch=1, tokens=64))


# Fusing.


INFERENCE = Case(job="inference", batch=1, tokens=8, dtype="float32", threads=1)
TRAINING = Case(job="training", batch=1, tokens=8, dtype="bfloat16", threads=1)


def small_bert(name, *, texts, tokens, dtype):
    """Replace MiniLM by a BERT of two layers with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(BertConfig(vocab_size=50, **sizes)).eval().to(getattr(torch, dtype))
    ids = torch.randint(0, 50, (len(texts), tokens))
    return LoadedModel(
        name, model, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, tuple(texts), "random"
    )


@pytest.fixture
def fuse(scripts, monkeypatch):
    monkeypatch.setattr(scripts.fuse.minilm, "load", small_bert)
    monkeypatch.setattr(scripts.fuse, "SECONDS", 0.0)
    return scripts.fuse


@pytest.mark.parametrize(("case", "mode"), [(INFERENCE, "evaluation"), (TRAINING, "training")])
def test_fuse_has_rows_and_the_proof(fuse, case, mode):
    found = fuse.measure(case, rounds=1)
    assert_rows(found["rows"], ["plain", "fused", "frontend"])
    assert 0 < found["rows"][0]["share"] < 1
    assert all(
        row.get("saved_bytes", 0) > 0 if mode == "training" else "saved_bytes" not in row for row in found["rows"]
    )
    assert found["failures"] == []
    (row,) = found["fusions"]
    assert (row["variant"], row["mode"], row["fused"], row["left"]) == (
        "fused",
        mode,
        5,
        [],
    )  # two a layer, one of the embedding
    assert row["seconds"] > 0
    for part in ("outputs", "gradients"):
        assert row[part]["holds"]
        assert row[part]["times_error"] == row[part]["max_abs"] / row[part]["eager_error"]


def test_fuse_variants_have_separate_weights_in_the_mode_of_the_job(fuse, monkeypatch):
    models = []
    make = {name: lambda model, kwargs: models.append(model) for name in ("plain", "fused")}
    monkeypatch.setattr(fuse, "MAKE", make)
    fuse.measure(TRAINING, rounds=1)
    assert [model.training for model in models] == [True, True]
    assert_separate_weights(*models)


def test_training_step_replaces_the_gradients(fuse):
    loaded = fuse.minilm.load_model(TRAINING, "float32")
    steps = []
    for _ in range(2):
        fuse.call_of(TRAINING, loaded.model, loaded.kwargs)()
        steps.append({name: p.grad for name, p in loaded.model.named_parameters() if p.grad is not None})
    assert any(gradient.any() for gradient in steps[0].values())
    assert all(torch.equal(gradient, steps[1][name]) for name, gradient in steps[0].items())
    assert not fuse.call_of(INFERENCE, loaded.model, loaded.kwargs)().requires_grad


def test_fuse_measures_inductor_in_chosen_cases_and_reports_failures(fuse, monkeypatch):
    def broken(model, kwargs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(fuse, "MAKE", {"plain": fuse.MAKE["plain"], "fused": broken, "inductor": broken})
    monkeypatch.setattr(fuse, "INDUCTOR", (("inference", 1, 8, "float32"),))
    found = fuse.measure(INFERENCE, rounds=1)
    assert [row["variant"] for row in found["rows"]] == ["plain"]
    assert [row["variant"] for row in found["failures"]] == ["fused", "inductor"]
    assert found["failures"][0]["error"] == "RuntimeError: no compiler here"
    assert [row["variant"] for row in fuse.measure(INFERENCE, rounds=1, inductor=False)["failures"]] == ["fused"]
    assert [row["variant"] for row in fuse.measure(TRAINING, rounds=1)["failures"]] == ["fused"]
    monkeypatch.setattr(fuse, "MAKE", {"plain": broken})
    with pytest.raises(RuntimeError, match="no compiler here"):
        fuse.measure(INFERENCE, rounds=1)


def test_fuse_summary_counts_a_case_without_proof_as_missed(scripts):
    name = "fused, inference, 1 x 8 tokens, float32: times as fast as the model as it was"
    other = "fused, forward + backward, 1 x 8 tokens, bfloat16: times as fast as the model as it was"
    proven = "cells in which the fused model is proven"
    rows = rows_of(INFERENCE, plain=9.0, fused=10.0) + rows_of(TRAINING, plain=19.0, fused=20.0)
    assert numbers(scripts.fuse.summarize({"rows": rows})) == {
        name: (0.9, False),
        other: (0.95, True),
        proven: (2, True),
    }
    rows = rows_of(INFERENCE, plain=9.0)
    assert numbers(scripts.fuse.summarize({"rows": rows})) == {name: (None, None), proven: (0, False)}


def test_worst_difference_is_relative_to_the_models_own_error(scripts):
    def difference(name, off, error):
        return Difference(name, max_abs=off, eager_error=error, magnitude=1.0, tolerance=1.0)

    exact, unknown = difference("exact", 0.0, 0.0), difference("unknown", 0.5, None)
    small, large = difference("small", 0.1, 0.05), difference("large", 0.2, 0.4)
    assert scripts.fuse.worst([exact, unknown, large, small])["name"] == "small"
    assert scripts.fuse.worst([exact, unknown]) is None


# The lab.


TEXT = Text("counting", "one two three four five six seven eight nine ten eleven twelve " * 40)


def lab_case(wiring="pre_ln"):
    return Case(wiring=wiring, num_layers=2, d=16, batch=2, tokens=8, threads=1)


@pytest.mark.parametrize("wiring", ["post_ln", "pre_ln"])
def test_plain_model_equals_the_labs(scripts, wiring, threads):
    threads(1)
    run = Run(wirings.get(wiring), num_layers=2, d_model=16, nhead=4, tokens=8, batch=2, every=0)
    ours = Training(run, TEXT).model
    plain = scripts.lab.Plain(ours, 4)
    assert {type(one) for one in plain.modules() if isinstance(one, nn.LayerNorm)} == {nn.LayerNorm}
    assert_separate_weights(plain, ours)
    read, following = TEXT.batch(0, 0, 2, 8)
    one, other = ours(read), plain(read)
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    for logits in (one, other):
        nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten()).backward()
    torch.testing.assert_close(plain.embedding.weight.grad, ours.embedding.weight.grad, rtol=1e-4, atol=1e-6)


def test_lab_has_rows_of_windows_and_equal_losses(scripts, monkeypatch, threads):
    """Check the windows: the first step is separate, and the last step of each later window is recorded."""
    threads(1)
    trainings = {}

    def kept(run, text):
        trainings[run.every] = training = Training(run, text)
        return training

    monkeypatch.setattr(scripts.lab, "Training", kept)
    found = scripts.lab.measure(lab_case("post_ln"), rounds=1, text=TEXT, windows=2)
    (losses,) = found["losses"]
    assert len({*losses["losses"]}) == scripts.lab.CHECKED
    assert losses["off"] <= scripts.lab.CLOSE
    assert_rows(found["rows"], ["plain", "addnorm", "recorded"])
    assert all(row["rounds"] == 2 and row["first_us"] > 0 < row["last_us"] for row in found["rows"])
    assert trainings[scripts.lab.EVERY].recorded["steps"] == [0, scripts.lab.EVERY, 2 * scripts.lab.EVERY]
    assert trainings[0].recorded["steps"] == []


def test_loop_that_trains_another_model_is_an_error(scripts, monkeypatch, threads):
    threads(1)
    real = scripts.lab.prepare

    def spoiled(case, variant, text, steps):
        train = real(case, variant, text, steps)
        return (lambda observe: train(lambda step, loss: observe(step, loss * 1.001))) if variant == "plain" else train

    monkeypatch.setattr(scripts.lab, "prepare", spoiled)
    with pytest.raises(ValueError, match=r"the losses of pre_ln, 2 layers, d = 16 differ by .* expected round-off"):
        scripts.lab.check_losses(lab_case(), TEXT)


def test_step_times_are_those_between_two_observations(scripts, monkeypatch):
    clock = iter([10.0, 11.0, 13.0, 16.0])
    monkeypatch.setattr(scripts.lab.time, "perf_counter", lambda: next(clock))
    found = scripts.lab.timed(lambda observe: [observe(step, 0.5) for step in (1, 2, 3)])
    assert found == ([0.5] * 3, [1.0, 2.0, 3.0])


def test_lab_summary_follows_from_the_rows(scripts):
    rows = [
        {**row, "first_us": 10 * row["median_us"]}
        for row in rows_of(lab_case(), plain=9e4, addnorm=1e5, recorded=1.08e5)
    ]
    name = "pre_ln, 2 layers, d = 16"
    assert numbers(scripts.lab.summarize({"rows": rows})) == {
        f"{name}: times as fast as plain PyTorch": (0.9, False),
        f"{name}: recording every 20th step, times without": (1.08, True),
        f"{name}: the first recorded step, seconds more": (pytest.approx(0.08), None),
    }
