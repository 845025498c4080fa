"""Tests of every benchmark's committed results: the full matrix, a clean checkout, a summary and pages that follow from them."""

import json
import subprocess
import sys

import pytest

from addnorm._util import jsonio
from addnorm.bench import harness
from addnorm.bench.case import Case
from support.browser import chromium
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
        pytest.skip("nothing was measured on a GPU yet")
    document = read(benchmark.name)
    if name not in ("claims", "norms", "compare", "explorer"):  # whose rows are not by case
        cases = [case for case in benchmark.plan() if {*benchmark.fields} <= vars(case).keys()]
        assert {*benchmark.by_case(document)} == {Case.of(vars(case), benchmark.fields) for case in cases}
    judged = jsonio.loads(jsonio.dumps(benchmark.judge(document)))
    assert {key: document.get(key, []) for key in judged} == judged
    assert all(fact["met"] for fact in document.get("facts", []))


def test_spread_of_the_explorer_has_quartiles_and_the_95th_percentile():
    spread = load("benchmarks/bench_explorer.py").spread([*range(1, 101)])
    assert (spread["median"], spread["most"], spread["count"]) == (50.5, 100, 100)
    assert 95 <= spread["p95"] <= 96


@pytest.mark.slow
def test_explorer_script_measures_and_writes(tmp_path):
    chromium()
    out, script = tmp_path / "explorer.json", ROOT / "benchmarks/bench_explorer.py"
    command = [sys.executable, script, "--rounds", "1", "--typed", "5", "--json", out, "--force"]
    subprocess.run(command, check=True, capture_output=True)
    document = json.loads(out.read_text())
    rows = {row["variant"]: row for row in document["rows"]}
    assert rows["total"]["count"] == 5
    assert rows["total"]["median"] > rows["compute"]["median"] > 0
    assert rows["total"]["q1"] <= rows["total"]["median"] <= rows["total"]["q3"] <= rows["total"]["p95"]
    assert document["load_after"] >= 0
    (stale,) = document["stale"]
    assert stale["last is right"]
    assert stale["drawn"] <= stale["asked"]


def test_results_have_one_row_a_line():
    for path in RESULTS.glob("*.json"):
        assert path.read_text() == jsonio.dumps(json.loads(path.read_text())), path.name


def test_pages_match_the_results():
    assert load("benchmarks/table.py").main(["--check"]) == 0
