"""Tests of the benchmark harness: cases, runs, documents, targets, the stopwatch, and the command line of benchmarks/."""

import dataclasses
import json
import math
import sys

import pytest
import torch

from addnorm._util.timing import interleave
from addnorm.bench import harness, timing
from addnorm.bench.harness import Case, Run, Stop, by_case, new_results, partial_path, run_cases
from addnorm.bench.targets import Target, ratio
from support.loading import load

FIELDS = ("rows", "threads")
CASES = [Case(rows=rows, threads=1) for rows in (1, 2, 3)]


def measure(case, deadline=None):
    times = {"addnorm": 10.0, "eager": 10.0 * case.rows}
    return {"rows": [case.row(variant=name, median_us=time) for name, time in times.items()]}


def stop_at(index, error):
    def stopped(case, deadline):
        if case == CASES[index]:
            raise error
        return measure(case)

    return stopped


# Cases and runs.


def test_run_measures_saves_and_reports_every_case():
    lines, saved = [], []
    run = run_cases(
        CASES, measure, Run(new_results("rows")), progress=lines.append, save=lambda run: saved.append(len(run.done))
    )
    assert (run.ended, run.complete, run.done, run.left) == ("done", True, CASES, [])
    assert [*by_case(run.results["rows"], FIELDS)] == CASES
    assert saved == [1, 2, 3]
    assert [line.split()[0] for line in lines] == ["1/3", "2/3", "3/3"]
    run = run_cases(CASES, measure, Run(new_results("rows")), budget=1e-9)
    assert (run.ended, run.complete, run.done, run.left) == ("budget", True, CASES[:1], CASES[1:])
    with pytest.raises(ZeroDivisionError):
        run_cases(CASES, stop_at(0, ZeroDivisionError()), Run(new_results("rows")))


@pytest.mark.parametrize(
    ("error", "ended", "rows"),
    [(KeyboardInterrupt(), "interrupt", 4), (Stop("lost", {"rows": [{"variant": "a"}]}), "lost", 5)],
)
def test_stopped_run_keeps_its_cases_and_continues(error, ended, rows):
    run = run_cases(CASES, stop_at(2, error), Run(new_results("rows")))
    assert (run.ended, run.complete, run.done, run.left) == (ended, False, CASES[:2], CASES[2:])
    assert len(run.results["rows"]) == rows
    again = run_cases(CASES, measure, Run({"rows": run.results["rows"][:4]}, run.done))
    assert (again.complete, again.done) == (True, CASES)
    assert again.results["rows"][:4] == run.results["rows"][:4]


# Documents.


def test_document_is_written_whole_or_as_partial(tmp_path):
    path = tmp_path / "new" / "a.json"
    document = {"complete": True, "protocol": {"a": 1}, "rows": [{"x": 1.5}, {"x": math.inf}]}
    assert harness.write(document, path) == path
    text = '{\n"complete": true,\n"protocol": {"a": 1},\n"rows": [\n{"x": 1.5},\n{"x": "Infinity"}\n]\n}\n'
    assert path.read_text() == text
    assert harness.read(path) == document
    assert harness.write({**document, "complete": False}, path) == partial_path(path) == tmp_path / "new/a.partial.json"
    assert path.read_text() == text
    harness.write(document, path)
    assert [*path.parent.iterdir()] == [path]


# Targets.


@pytest.mark.parametrize(
    ("compare", "bound", "value", "met"),
    [(">=", 0.95, 0.95, True), (">=", 0.95, 0.94, False), ("<", 1.0, 1.0, False), ("<=", 1.0, 1.0, True), ("==", 2, 2, True),
     ("<", 1.0, math.nan, False), (">=", None, 1.0, None), (">=", 1.0, None, None)],
)  # fmt: skip
def test_target_is_met(compare, bound, value, met):
    row = Target("x", compare, bound).row(value, "rms", cells=1)
    assert [*row.values()] == ["x", "rms", 1, value, compare, bound, met] or math.isnan(value)
    assert row["met"] is met


# The stopwatch.


def test_interleave_rotates_and_leaves_out_failures():
    order, failed = [], []

    def sampler(name):
        def sample():
            if name == "b" and "b" in order:
                raise RuntimeError("no memory")
            order.append(name)
            return len(order)

        return sample

    samples = interleave({name: sampler(name) for name in "abc"}, 3, failed=lambda *failure: failed.append(failure))
    assert "".join(order) == "abc" + "ca" + "ac"
    assert [(name, str(error)) for name, error in failed] == [("b", "no memory")]
    assert {name: len(each) for name, each in samples.items()} == {"a": 3, "c": 3}
    with pytest.raises(ZeroDivisionError):
        interleave({"a": lambda: 1 / 0}, 1)


@pytest.mark.parametrize(
    ("seconds", "rounds", "measured"), [(0.01, 21, 21), (0.1, 21, 13), (0.3, 21, 5), (9.0, 21, 5), (9.0, 3, 3)]
)
def test_rounds_fit_into_the_time_of_a_case(monkeypatch, seconds, rounds, measured):
    order = []
    monkeypatch.setattr(timing, "_calibrate", lambda call, args: (2, seconds))
    rows = timing.interleaved({name: lambda name=name: order.append(name) for name in "abc"}, (), rounds)
    assert [row["rounds"] for row in rows.values()] == [measured] * 3
    assert "".join(order[:18]) == "aaabbbccc" + "bbbcccaaa"  # each loop begins with an untimed call


# The command line of benchmarks/.


@pytest.fixture
def scripts(monkeypatch, tmp_path):
    module = load("benchmarks/harness.py")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module.environment, "commit", lambda: {"commit": "a" * 40, "dirty": False})
    return module


@pytest.fixture
def benchmark(scripts):
    def summarize(parts):
        values = [ratio("addnorm", "eager")(rows) for rows in by_case(parts["rows"], FIELDS).values()]
        return [Target("lowest", ">=", 1.5).row(min(values, default=None))]

    return scripts.Benchmark(
        "small", "A small one", FIELDS, lambda threads: [case.but(threads=threads) for case in CASES],
        lambda case, rounds, fast=False: measure(case), summarize, lambda case: f"{case.rows} rows", protocol={"fast": None},
    )  # fmt: skip


def test_script_is_interrupted_continues_and_prints(scripts, benchmark, monkeypatch, tmp_path, capsys, threads):
    threads(2)
    monkeypatch.setattr(sys, "argv", ["bench_small.py", "--rounds", "2", "--threads", "1"])
    interrupted = dataclasses.replace(
        benchmark, measure=lambda case, rounds: stop_at(1, KeyboardInterrupt())(case, None)
    )
    assert scripts.main(interrupted) == 130
    partial = json.loads((tmp_path / "small.partial.json").read_text())
    assert (partial["complete"], len(partial["rows"])) == (False, 2)
    measured = []
    continued = dataclasses.replace(benchmark, measure=lambda case, rounds: measured.append(case) or measure(case))
    assert scripts.main(continued) == 0
    assert measured == CASES[1:]
    assert [path.name for path in tmp_path.iterdir()] == ["small.json"]
    document = json.loads((tmp_path / "small.json").read_text())
    assert document["rows"][:2] == partial["rows"]
    assert document["protocol"] == {**timing.protocol(2), "fast": None}
    assert [*document][-2:] == ["summary", "rows"]
    out = capsys.readouterr().out
    assert "2 rows:   addnorm 10.0 µs   eager 20.0 µs" in out
    assert "1.00  lowest  MISSED" in out
    assert torch.get_num_threads() == 2


def test_script_of_another_protocol_or_commit_begins_anew(scripts, benchmark, monkeypatch, tmp_path):
    document, path = scripts.run(benchmark, CASES[:1], rounds=3), tmp_path / "small.json"
    harness.write({**document, "complete": False}, path)
    assert scripts.unfinished(benchmark, path, 3, {})["rows"] == document["rows"]
    assert scripts.unfinished(benchmark, path, 4, {}) is None
    monkeypatch.setattr(scripts.environment, "commit", lambda: {"commit": "b" * 40, "dirty": False})
    assert scripts.unfinished(benchmark, path, 3, {}) is None


def test_quick_run_writes_nothing(scripts, benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_small.py", "--quick"])
    assert scripts.main(benchmark) == 0
    assert [*tmp_path.iterdir()] == []
    assert "Written" not in capsys.readouterr().out
