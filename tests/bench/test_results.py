"""Tests of every benchmark's committed results: the full matrix, a clean checkout, a summary and pages that follow from them."""

import pytest

from addnorm._util import jsonio
from addnorm.bench import harness
from addnorm.bench.case import Case
from support.loading import ROOT, load

RESULTS = ROOT / "benchmarks/results"


def read(name):
    document = harness.read(RESULTS / f"{name}.json")
    assert document.get("complete", True)
    assert document["dirty"] is False
    return document


@pytest.mark.parametrize("name", [path.stem.removeprefix("bench_") for path in ROOT.glob("benchmarks/bench_*.py")])
def test_results_are_of_the_whole_plan_and_judged(name):
    benchmark = load(f"benchmarks/bench_{name}.py").BENCHMARK
    if name == "gpu" and not (RESULTS / "gpu.json").exists():
        pytest.skip("no times of a GPU are published yet")
    document = read(benchmark.name)
    if name not in ("claims", "norms", "compare"):  # whose rows are not by case
        cases = [case for case in benchmark.plan() if {*benchmark.fields} <= vars(case).keys()]
        assert {*dict(benchmark.by_case(document))} == {Case.of(vars(case), benchmark.fields) for case in cases}
    judged = jsonio.loads(jsonio.dumps(benchmark.judge(document)))
    assert {key: document.get(key, []) for key in judged} == judged
    assert all(fact["met"] for fact in document.get("facts", []))


def test_pages_have_the_tables_of_the_results(capsys):
    assert load("benchmarks/table.py").main(["--check"]) == 0, capsys.readouterr().out
