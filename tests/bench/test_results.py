"""Tests of every benchmark's committed results: the full matrix, a clean checkout, a summary and pages that follow from them."""

import json
import subprocess
import sys

import pytest

from addnorm._util import jsonio
from addnorm.bench import environment, gpu, operation, whole
from addnorm.bench.cases import FIELDS
from addnorm.bench.harness import by_case
from support.browser import chromium
from support.loading import ROOT, load

RESULTS = ROOT / "benchmarks/results"


def read(name):
    document = json.loads((RESULTS / f"{name}.json").read_text())
    assert document.get("complete", True)
    assert document["dirty"] is False
    return document


@pytest.mark.parametrize("name", ["stack", "stream", "fuse", "lab", "compile", "memory", "limit"])
def test_results_are_of_the_whole_matrix(name):
    benchmark = load(f"benchmarks/bench_{name}.py").BENCHMARK
    document = read(name)
    parts = {part: document[part] for part in benchmark.parts}
    assert {*by_case(document["rows"], benchmark.fields)} == {*benchmark.cases(benchmark.threads)}
    assert [*document][-1] == "rows"
    assert document["summary"] == json.loads(json.dumps(benchmark.summarize(parts)))
    assert {key: document[key] for key in benchmark.extra(parts)} == benchmark.extra(parts)


def test_functional_results_are_of_the_whole_matrix():
    document = read("functional")
    assert {*by_case(document["rows"], FIELDS)} == {*whole(threads=2)}
    cache = environment.last_level_cache(document["machine"]["caches"])
    assert document["summary"][:-1] == operation.summarize(document["rows"], cache)
    assert all(fact["met"] for fact in document["facts"])


def test_gpu_results_are_of_a_gpu():
    if not (RESULTS / "gpu.json").exists():
        pytest.skip("nothing was measured on a GPU yet")
    document = read("gpu")
    assert document["device"]["type"] == "cuda"
    summary = gpu.summarize(document["rows"], document["failures"], judged=True)
    assert document["summary"] == json.loads(json.dumps(summary))


def test_explorer_targets_follow_from_the_results():
    script, document = load("benchmarks/bench_explorer.py"), read("explorer")
    assert document["schema"] == script.SCHEMA
    assert document["stack"] == {"S": 48, "d": 64, "T": 16}
    assert document["flip"]["total"]["count"] >= 100
    for name, most in script.TARGETS.items():
        cells = [document["flip"]["total"]] if name == "flip" else document["trace"].values()
        worst = max(cell["p95"] for cell in cells)
        assert document["targets"][name] == {"p95": worst, "target": most, "met": worst < most}
    spread = script.spread([*range(1, 101)])
    assert spread["median"] == 50.5
    assert 95 <= spread["p95"] <= 96
    assert (spread["most"], spread["count"]) == (100, 100)


@pytest.mark.slow
def test_explorer_script_measures_and_writes(tmp_path):
    chromium()
    out, script = tmp_path / "explorer.json", ROOT / "benchmarks/bench_explorer.py"
    command = [sys.executable, script, "--rounds", "1", "--typed", "5", "--out", out, "--force"]
    subprocess.run(command, check=True, capture_output=True)
    document = json.loads(out.read_text())
    assert document["flip"]["total"]["count"] == 5
    total = document["flip"]["total"]
    assert total["median"] > document["flip"]["compute"]["median"] > 0
    assert total["q1"] <= total["median"] <= total["q3"] <= total["p95"]
    assert document["load_after"] >= 0
    assert document["stale"]["last is right"]
    assert document["stale"]["drawn"] <= document["stale"]["asked"]


def test_results_have_one_row_a_line():
    for path in RESULTS.glob("*.json"):
        assert path.read_text() == jsonio.dumps(json.loads(path.read_text())), path.name


def test_pages_match_the_results():
    assert load("benchmarks/table.py").main(["--check"]) == 0
