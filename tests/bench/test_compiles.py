"""The benchmark under torch.compile: every variant computes the same, errors and bits are told, the rule chooses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from addnorm import bench
from addnorm.bench import compiles, compiles_shown
from addnorm.bench.ways import JOBS, WAYS
from addnorm.ops import compile_mode
from support.loading import load

ROOT = Path(__file__).parent.parent.parent
RESULTS = [
    path for name in ("compile.json", "compile_cuda.json") if (path := ROOT / "benchmarks" / "results" / name).exists()
]

# torch.compile builds its own C++ with setuptools' and distutils' deprecated parts, and warns about itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def cell(norm="layer", job="y", rows=6, d=16, dtype="float32"):
    return compiles.Cell(norm, job, rows, d, dtype, "cpu", 1)


@pytest.fixture
def uncompiled(monkeypatch):
    """The variants as they are without a compiler, which takes seconds for each."""
    monkeypatch.setattr(torch, "compile", lambda function, fullgraph: function)


def test_the_matrix_has_every_job_once_a_norm_dtype_and_size():
    chosen = compiles.cells(threads=2)
    assert {one.job for one in chosen} == set(JOBS)
    assert len(set(chosen)) == len(chosen)
    assert {one.threads for one in chosen} == {2}
    assert {one.device for one in compiles.cells("cuda")} == {"cuda"}
    assert {(one.rows, one.d) for one in chosen if one.job == "y"} >= {(1, 768), (4096, 1024)}


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("job", [name for name in JOBS if name != "dropout"])
def test_both_ways_write_down_the_same_job(norm, job):
    one = cell(norm, job)
    tensors = compiles.inputs(one)
    ours, theirs = (JOBS[job].function(WAYS[norm, way], *tensors) for way in ("addnorm", "torch"))
    torch.testing.assert_close(ours, theirs, rtol=1e-2 if job.startswith("around") else 1e-4, atol=1e-4)
    if JOBS[job].backward and norm == "layer":  # all that is given is read
        assert all(grad is not None for grad in torch.autograd.grad([t.sum() for t in ours], tensors))


def test_dropout_drops_about_a_tenth_in_both_ways():
    for way in WAYS.values():
        x, s, w, b = torch.zeros(400, 16), torch.ones(400, 16), torch.ones(16), torch.zeros(16)
        kept = way.dropped(x, s, w, b)[1] != 0
        assert 0.85 < kept.float().mean() < 0.95


def test_inputs_and_gradients_of_fewer_rows_are_those_of_the_first():
    one = cell(job="around_training")
    whole, few = compiles.inputs(one), compiles.inputs(one, 4)
    assert few[0].equal(whole[0][:4])
    assert few[2].equal(whole[2])
    assert compiles.cotangents(one, few[:2])[1].equal(compiles.cotangents(one, whole[:2])[1][:4])


@pytest.mark.parametrize("job", ["y", "training"])
def test_a_cell_has_a_row_a_variant_and_training_has_errors(uncompiled, job):
    found = compiles.measure(cell(job=job), rounds=2)
    assert [row["variant"] for row in found["rows"]] == list(compiles.VARIANTS)
    assert all(0 < row["q1_us"] <= row["median_us"] <= row["q3_us"] for row in found["rows"])
    assert found["failures"] == found["bits"] == []
    names = ["y", "z", "residual", "branch", "weight", "bias"]
    assert [row["what"] for row in found["errors"] if row["variant"] == "op"] == (names if job == "training" else [])
    assert compile_mode._mode is None


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_operator_is_within_the_limits_and_a_wrong_gradient_is_not(norm, dtype):
    one = cell(norm, "training", rows=96, d=48, dtype=dtype)
    tensors, calls = compiles.inputs(one), compiles.calls(one)

    def spoiled(*tensors):
        outputs, grads = calls["eager"](*tensors)
        return outputs, (*grads[:2], grads[2] * 1.02, *grads[3:])

    rows = compiles.errors(one, {"op": calls["eager"], "formula": spoiled}, tensors)
    over = [(row["variant"], row["what"]) for row in rows if row["error"] > row["limit"]]
    assert over == [("formula", "weight")]


def test_bits_tell_what_depends_on_the_threads_and_on_other_rows():
    one = cell(job="training", rows=40)

    def spoiled(*tensors):
        (y, z), grads = calls["eager"](*tensors)
        weight = grads[2] + torch.get_num_threads()
        return (y + len(y), z), (*grads[:2], weight, *grads[3:])

    calls = compiles.calls(one)
    assert compiles.bits(one, calls["eager"]) == {"run": True, "threads_kept": True, "rows_kept": True}
    assert compiles.bits(one, spoiled) == {"run": True, "threads_kept": False, "rows_kept": False}


def test_what_does_not_compile_is_a_failure_and_the_rest_is_measured(monkeypatch):
    def refuses(function, fullgraph):
        def call(*tensors):
            raise RuntimeError("no compiler here")

        return call

    monkeypatch.setattr(torch, "compile", refuses)
    found = compiles.measure(cell(), rounds=2)
    assert [row["variant"] for row in found["failures"]] == ["op", "formula", "torch"]
    assert "RuntimeError: no compiler here" in found["failures"][0]["error"]
    assert [row["variant"] for row in found["rows"]] == ["eager"]


def test_the_forms_are_what_is_compiled():
    """With the compiler itself: the formula's own graph, and the operator's bits."""
    one = cell(job="training", dtype="float32")
    tensors, calls = compiles.inputs(one), compiles.calls(one)
    eager, op, formula = (compiles.named(one, calls[name](*tensors)) for name in ("eager", "op", "formula"))
    assert all(op[name].equal(eager[name]) for name in eager)
    for name in eager:
        torch.testing.assert_close(formula[name], eager[name], rtol=1e-4, atol=1e-5)


def found_of(op, formula, *, error=0.5, kept=True):
    """What was found in three cells, in which these are the times."""
    cells = [cell(rows=rows) for rows in (1, 2, 3)]
    times = {"op": op, "formula": formula}
    rows = [
        {**one._asdict(), "variant": name, "median_us": times[name][k]} for k, one in enumerate(cells) for name in times
    ]
    told = {"variant": "formula", "error": error, "limit": 1.0}
    return {
        "rows": rows,
        "errors": [told],
        "bits": [{"variant": "formula", "run": True, "threads_kept": kept, "rows_kept": True}],
    }


def test_the_formula_is_chosen_where_it_is_faster_in_most_cells_and_keeps_the_contract():
    fast = ([10.0] * 3, [8.0, 9.0, 20.0])
    assert compiles.choice(found_of(*fast))["form"] == "formula"
    assert compiles.choice(found_of(*fast))["cells_faster"] == 2
    assert compiles.choice(found_of([10.0] * 3, [8.0, 9.5, 20.0]))["form"] == "op"
    assert compiles.choice(found_of(*fast, error=1.5))["form"] == "op"
    assert compiles.choice(found_of(*fast, kept=False))["form"] == "op"
    assert compiles.choice({**found_of(*fast), "errors": []})["form"] == "op"  # not compared is not kept
    assert compiles.choice({**found_of(*fast), "bits": []})["form"] == "op"


def test_the_tables_say_what_was_found_and_what_follows(uncompiled):
    document = compiles.run([cell(), cell(job="training")], rounds=2)
    for row in document["rows"]:
        row["median_us"] = {"op": 10.0, "formula": 20.0, "torch": 15.0, "eager": 30.0}[row["variant"]]
    document["errors"][0]["limit"] = 0.0
    one = cell(job="training")
    document["bits"] = [{**one._asdict(), "variant": "formula", "run": True, "threads_kept": False, "rows_kept": True}]
    document["choice"] = compiles.choice(document)
    times = compiles_shown.times(document)
    assert "| y | LayerNorm | 6 x 16 | float32 | 10 | 2.00 | 1.50 | 3.00 |" in times
    assert "On cpu a compiled call is therefore **the operator**" in times
    assert "in 0 of 2 cells, 6 of its 6 errors are within the contract, and it keeps its bits in 0 of 1 cells." in times
    contract = compiles_shown.contract(document)
    assert contract.count("(over)") == 1
    assert "| float32 | formula | the same | others | the same |" in contract


def test_an_interrupted_run_goes_on_with_the_cells_that_are_missing(uncompiled, monkeypatch, tmp_path):
    whole, measured = compiles.measure, []

    def measure(one, rounds):
        if len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(one)
        return whole(one, rounds=rounds)

    chosen = [cell(), cell("rms")]
    monkeypatch.setattr(compiles, "measure", measure)
    first = compiles.run(chosen, rounds=2)
    assert not first["complete"]
    path = bench.write(first, tmp_path / "compile.json")
    assert path.name == "compile.partial.json"
    monkeypatch.setattr(compiles, "measure", whole)
    second = compiles.run(chosen, rounds=2, before=bench.read(path))
    assert second["complete"]
    assert second["rows"][:4] == bench.read(path)["rows"]
    assert list(compiles.by_cell(second["rows"])) == chosen
    assert second["choice"] == compiles.choice(second)
    other = compiles.run(chosen[:1], rounds=3, before=bench.read(path))  # another protocol: from the start
    assert other["rows"] != second["rows"][:4]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_the_table_in_the_code_follows_from_the_committed_results(path):
    document = json.loads(path.read_text())
    assert document["complete"]
    assert not document["dirty"]
    assert set(compiles.by_cell(document["rows"])) == set(
        compiles.cells(document["device"], threads=document["threads"])
    )
    assert document["choice"] == compiles.choice(document)
    assert document["summary"] == json.loads(json.dumps(compiles.summarize(document["rows"])))
    assert compile_mode.DEFAULT_MODES[document["device"]] == document["choice"]["form"]


def test_the_script_measures_prints_and_writes(uncompiled, monkeypatch, tmp_path, capsys):
    script = load("benchmarks/bench_compile.py")
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    monkeypatch.setattr(compiles, "cells", lambda device, threads: [cell(), cell(rows=7), cell(job="stream")])
    monkeypatch.setattr(sys, "argv", ["bench_compile.py", "--rounds", "2", "--threads", "1", "--quick"])
    assert script.main() == 0
    assert list(tmp_path.iterdir()) == []
    assert "layer, y, 7 x 16 float32, us:   op " in capsys.readouterr().out
    sys.argv.remove("--quick")
    assert script.main() == 0
    document = json.loads((tmp_path / "compile.json").read_text())
    assert (len(document["rows"]), document["choice"]["form"], document["device"]) == (12, "op", "cpu")


def test_the_script_tells_its_options():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "bench_compile.py"), "--help"], capture_output=True, text=True, check=True
    )  # fmt: skip
    assert "--device" in done.stdout
