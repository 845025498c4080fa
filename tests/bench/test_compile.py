"""Tests of the benchmark under torch.compile: variants compute the same, errors and bits are reported, the rule chooses."""

import functools
import re

import pytest
import torch

from addnorm.bench.harness import Case
from addnorm.ops import compile_mode
from support.loading import load

# torch.compile builds its own C++ with deprecated parts of setuptools and distutils, which warn.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

JOBS = ("y", "stream", "training", "around", "around_training", "chain", "chain_training", "stack", "stack_training")


@pytest.fixture(scope="module")
def script():
    return load("benchmarks/bench_compile.py")


@pytest.fixture(autouse=True)
def default_mode():
    yield
    compile_mode.set_compile_mode(None)


def case_of(norm="layer", job="y", rows=6, d=16, dtype="float32"):
    return Case(norm=norm, job=job, rows=rows, d=d, dtype=dtype, device="cpu", threads=1)


def uncompiled(function, fullgraph):
    """Return the function itself: the compiler takes seconds for each."""
    return function


@pytest.mark.parametrize(("norm", "job"), [(("layer", "rms")[k % 2], job) for k, job in enumerate(JOBS)])
def test_addnorm_and_torch_compute_the_same_job(script, norm, job):
    case = case_of(norm, job)
    tensors = script.inputs(case)
    ours, theirs = (
        script.JOBS[job].function(script.implementation(norm, name, case.d), *tensors) for name in ("addnorm", "eager")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-2 if job.startswith("around") else 1e-4, atol=1e-4)
    if script.JOBS[job].backward and norm == "layer":  # every input is read
        assert all(grad is not None for grad in torch.autograd.grad([t.sum() for t in ours], tensors))


@pytest.mark.parametrize(("norm", "dtype"), [("layer", "bfloat16"), ("rms", "float32")])
def test_wrong_gradient_is_over_its_limit(script, norm, dtype):
    case = case_of(norm, "training", rows=96, d=48, dtype=dtype)
    tensors, calls = script.inputs(case), script.variants(case)

    def wrong(*tensors):
        outputs, grads = calls["eager"](*tensors)
        return outputs, (*grads[:2], grads[2] * 1.02, *grads[3:])

    rows = script.errors(case, {"op": calls["eager"], "formula": wrong}, tensors)
    assert [(row["variant"], row["what"]) for row in rows if row["error"] > row["limit"]] == [("formula", "weight")]


def test_bits_show_dependence_on_threads_and_other_rows(script):
    case = case_of(job="training", rows=40)
    calls = script.variants(case)

    def dependent(*tensors):
        (y, z), grads = calls["eager"](*tensors)
        return (y + len(y), z), (*grads[:2], grads[2] + torch.get_num_threads(), *grads[3:])

    assert script.bits(case, calls["eager"]) == {"run": True, "threads_kept": True, "rows_kept": True}
    assert script.bits(case, dependent) == {"run": True, "threads_kept": False, "rows_kept": False}


def test_variant_that_does_not_compile_is_a_failure(script, monkeypatch):
    def fail(*tensors):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda function, fullgraph: fail)
    result = script.measure(case_of(), rounds=2)
    assert [row["variant"] for row in result["failures"]] == ["op", "formula", "torch"]
    assert "RuntimeError: no compiler here" in result["failures"][0]["error"]
    assert [row["variant"] for row in result["rows"]] == ["eager"]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_forms_agree_with_eager(script, monkeypatch, backend):
    """Capture the formula's own graph, and the operator, whose bits do not change."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    case = case_of(job="training")
    tensors, calls = script.inputs(case), script.variants(case)
    eager, op, formula = (script.named(calls[name](*tensors)) for name in ("eager", "op", "formula"))
    assert all(op[name].equal(eager[name]) for name in eager)
    torch.testing.assert_close(formula, eager, rtol=1e-4, atol=1e-5)


def test_targets_are_for_the_default_form_of_each_case(script):
    times = {"y": {"op": 5.0, "formula": 10.0, "torch": 9.0}, "dropout": {"op": 20.0, "formula": 90.0, "torch": 80.0}}
    rows = [
        case_of(job=job).row(variant=name, median_us=time) for job, by in times.items() for name, time in by.items()
    ]
    lowest, mean, *others = script.summarize({"rows": rows})
    assert (round(lowest["value"], 3), lowest["met"]) == (
        0.9,
        False,
    )  # y is the formula by default, dropout the operator
    assert (round(mean["value"], 3), mean["met"]) == (1.897, True)
    assert {row["name"]: row["value"] for row in others}["op, y: times as fast as torch alone"] == pytest.approx(1.8)


def test_document_has_rows_and_errors_and_its_sections(script, monkeypatch):
    monkeypatch.setattr(torch, "compile", uncompiled)
    document = load("benchmarks/harness.py").run(script.BENCHMARK, [case_of(), case_of(job="training")], rounds=2)
    assert compile_mode._mode is None
    assert [row["variant"] for row in document["rows"]] == [*script.VARIANTS] * 2
    assert document["failures"] == document["bits"] == []
    names = ["y", "z", "residual", "branch", "weight", "bias"]
    assert [row["what"] for row in document["errors"] if row["variant"] == "op"] == names
    for row in document["rows"]:
        row["median_us"] = {"op": 10.0, "formula": 20.0, "torch": 15.0, "eager": 30.0}[row["variant"]]
    document["errors"][0]["limit"] = 0.0
    document["bits"] = [case_of(job="training").row(variant="formula", run=True, threads_kept=False, rows_kept=True)]
    document["default"] = script.describe_forms(document)
    times = script.times_section(document)
    without_spread = re.sub(r" ±[\d.]+ %", "", times)
    assert "| y | LayerNorm | 6 x 16 | float32 | formula | 20.0 | 0.75 | 0.50 |  | 1.50 |" in without_spread
    assert (
        "The default form is 0.75 times as fast as torch alone in the mean and 0.75 times in the slowest of 2 cases."
        in times
    )
    assert "The operator is 1.50 times as fast as torch alone" in times
    assert "Of the formula's 6 errors 6 are within the contract, and it keeps its bits in 0 of 1 cases." in times
    contract = script.contract_section(document)
    assert contract.count("(over)") == 1
    assert "| float32 | formula | the same | others | the same |" in contract
