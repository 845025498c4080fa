"""Tests of every benchmark's committed results: the full matrix, a clean checkout, and a summary that follows from the rows."""

import json

import pytest

from addnorm._util import jsonio
from addnorm.bench import environment, gpu, operation, whole
from addnorm.bench.cases import FIELDS
from addnorm.bench.harness import by_case
from addnorm.ops import compile_mode
from support.loading import ROOT, load

RESULTS = ROOT / "benchmarks/results"
SUBJECTS = ("stack", "stream", "fuse", "lab", "compile")


def read(name):
    document = json.loads((RESULTS / f"{name}.json").read_text())
    assert document.get("complete", True)
    assert document["dirty"] is False
    return document


@pytest.mark.parametrize("name", SUBJECTS)
def test_results_are_of_the_whole_matrix(name):
    benchmark = load(f"benchmarks/bench_{name}.py").BENCHMARK
    document = read(name)
    found = {part: document[part] for part in benchmark.parts}
    assert {*by_case(document["rows"], benchmark.fields)} == {*benchmark.cases(benchmark.threads)}
    assert [*document][-1] == "rows"
    assert document["summary"] == json.loads(json.dumps(benchmark.summarize(found)))
    assert {key: document[key] for key in benchmark.extra(found)} == benchmark.extra(found)


def test_functional_results_are_of_the_whole_matrix():
    document = read("functional")
    assert {*by_case(document["rows"], FIELDS)} == {*whole(threads=2)}
    cache = environment.last_level_cache(document["machine"]["caches"])
    assert document["summary"][:-1] == operation.summarize(document["rows"], cache)
    assert all(fact["met"] for fact in document["facts"])


def test_compile_mode_follows_from_the_results():
    document = read("compile")
    assert compile_mode.DEFAULT_MODES[document["device"]] == document["choice"]["form"]


def test_gpu_results_are_of_a_gpu():
    if not (RESULTS / "gpu.json").exists():
        pytest.skip("nothing was measured on a GPU yet")
    document = read("gpu")
    assert document["device"]["type"] == "cuda"
    summary = gpu.summarize(document["rows"], document["failures"], judged=True)
    assert document["summary"] == json.loads(json.dumps(summary))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_have_one_row_a_line(path):
    assert path.read_text() == jsonio.dumps(json.loads(path.read_text()))
