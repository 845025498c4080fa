"""Tests of the benchmark under torch.compile: variants compute the same, errors and bits are reported, the rule chooses."""

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


def case_of(norm="layer", job="y", rows=6, d=16, dtype="float32"):
    return Case(norm=norm, job=job, rows=rows, d=d, dtype=dtype, device="cpu", threads=1)


@pytest.fixture
def uncompiled(monkeypatch):
    """Run the variants without the compiler, which takes seconds for each."""
    monkeypatch.setattr(torch, "compile", lambda function, fullgraph: function)


def test_matrix_has_every_job_once_for_each_norm_dtype_and_shape(script):
    chosen = script.cases(2)
    assert {case.job for case in chosen} == {*script.JOBS} == {*JOBS, "dropout"}
    assert len({*chosen}) == len(chosen)
    assert {case.device for case in script.cases(2, "cuda")} == {"cuda"}


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


def test_fewer_rows_are_the_first_ones(script):
    case = case_of(job="around_training")
    whole, few = script.inputs(case), script.inputs(case, 4)
    assert few[0].equal(whole[0][:4])
    assert few[2].equal(whole[2])
    assert script.cotangents(case, few[:2])[1].equal(script.cotangents(case, whole[:2])[1][:4])


@pytest.mark.parametrize("job", ["y", "training"])
def test_case_has_rows_and_training_has_errors(script, uncompiled, job):
    found = script.measure(case_of(job=job), rounds=2)
    assert [row["variant"] for row in found["rows"]] == [*script.VARIANTS]
    assert found["failures"] == found["bits"] == []
    names = ["y", "z", "residual", "branch", "weight", "bias"]
    assert [row["what"] for row in found["errors"] if row["variant"] == "op"] == (names if job == "training" else [])
    assert compile_mode._mode is None


@pytest.mark.parametrize(("norm", "dtype"), [("layer", "bfloat16"), ("rms", "float32")])
def test_wrong_gradient_is_over_its_limit(script, norm, dtype):
    case = case_of(norm, "training", rows=96, d=48, dtype=dtype)
    tensors, calls = script.inputs(case), script.variants(case)

    def spoiled(*tensors):
        outputs, grads = calls["eager"](*tensors)
        return outputs, (*grads[:2], grads[2] * 1.02, *grads[3:])

    rows = script.errors(case, {"op": calls["eager"], "formula": spoiled}, tensors)
    assert [(row["variant"], row["what"]) for row in rows if row["error"] > row["limit"]] == [("formula", "weight")]


def test_bits_show_dependence_on_threads_and_other_rows(script):
    case = case_of(job="training", rows=40)
    calls = script.variants(case)

    def spoiled(*tensors):
        (y, z), grads = calls["eager"](*tensors)
        return (y + len(y), z), (*grads[:2], grads[2] + torch.get_num_threads(), *grads[3:])

    assert script.bits(case, calls["eager"]) == {"run": True, "threads_kept": True, "rows_kept": True}
    assert script.bits(case, spoiled) == {"run": True, "threads_kept": False, "rows_kept": False}


def test_variant_that_does_not_compile_is_a_failure(script, monkeypatch):
    def refuses(function, fullgraph):
        def call(*tensors):
            raise RuntimeError("no compiler here")

        return call

    monkeypatch.setattr(torch, "compile", refuses)
    found = script.measure(case_of(), rounds=2)
    assert [row["variant"] for row in found["failures"]] == ["op", "formula", "torch"]
    assert "RuntimeError: no compiler here" in found["failures"][0]["error"]
    assert [row["variant"] for row in found["rows"]] == ["eager"]


def test_compiled_forms_agree_with_eager(script):
    """Run the compiler: the formula's own graph, and the operator's bits."""
    case = case_of(job="training")
    tensors, calls = script.inputs(case), script.variants(case)
    eager, op, formula = (script.named(calls[name](*tensors)) for name in ("eager", "op", "formula"))
    assert all(op[name].equal(eager[name]) for name in eager)
    for name in eager:
        torch.testing.assert_close(formula[name], eager[name], rtol=1e-4, atol=1e-5)


def found_of(op, formula, *, error=0.5, kept=True):
    """Return results of three cases with these times."""
    times = {"op": op, "formula": formula}
    rows = [case_of(rows=k + 1).row(variant=name, median_us=times[name][k]) for k in range(3) for name in times]
    return {
        "rows": rows,
        "errors": [{"variant": "formula", "error": error, "limit": 1.0}],
        "bits": [{"variant": "formula", "run": True, "threads_kept": kept, "rows_kept": True}],
    }


def test_formula_is_chosen_if_faster_and_within_the_contract(script):
    fast = ([10.0] * 3, [8.0, 9.0, 20.0])
    assert script.choose(found_of(*fast))["form"] == "formula"
    assert script.choose(found_of(*fast))["cells_faster"] == 2
    assert script.choose(found_of([10.0] * 3, [8.0, 9.5, 20.0]))["form"] == "op"
    assert script.choose(found_of(*fast, error=1.5))["form"] == "op"
    assert script.choose(found_of(*fast, kept=False))["form"] == "op"
    assert script.choose({**found_of(*fast), "errors": []})["form"] == "op"  # not compared counts as broken
    assert script.choose({**found_of(*fast), "bits": []})["form"] == "op"


def test_sections_have_times_errors_bits_and_choice(script, uncompiled):
    document = load("benchmarks/harness.py").run(script.BENCHMARK, [case_of(), case_of(job="training")], rounds=2)
    for row in document["rows"]:
        row["median_us"] = {"op": 10.0, "formula": 20.0, "torch": 15.0, "eager": 30.0}[row["variant"]]
    document["errors"][0]["limit"] = 0.0
    document["bits"] = [case_of(job="training").row(variant="formula", run=True, threads_kept=False, rows_kept=True)]
    document["choice"] = script.choose(document)
    times = script.times_section(document)
    assert "| y | LayerNorm | 6 x 16 | float32 | 10.0 | 2.00 | 1.50 | 3.00 |" in times
    assert "On cpu a compiled call is therefore **the operator**" in times
    assert "in 0 of 2 cases, 6 of its 6 errors are within the contract, and it keeps its bits in 0 of 1 cases." in times
    contract = script.contract_section(document)
    assert contract.count("(over)") == 1
    assert "| float32 | formula | the same | others | the same |" in contract
