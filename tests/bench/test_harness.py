"""Tests of the benchmark harness: cases, runs, documents, targets, the stopwatch, and the command line of benchmarks/."""

import dataclasses
import json
import math
import sys
import time

import pytest
import torch

from addnorm._util.timing import interleave
from addnorm.bench import environment, harness, timing
from addnorm.bench.harness import Case, Run, Stop, by_case, new_found, partial_path, resumable, run_cases
from addnorm.bench.targets import Goal, Target, ratio
from support.loading import load

CASES = [Case(rows=rows, threads=1) for rows in (1, 2, 3)]


def measure(case, deadline=None):
    return {
        "rows": [case.row(variant=name, median_us=us) for name, us in (("addnorm", 10.0), ("eager", 10.0 * case.rows))]
    }


def stopping(at, error):
    def stop(case, deadline):
        if case == CASES[at]:
            raise error
        return measure(case)

    return stop


# Cases and runs.


def test_case_is_hashable_data():
    case = Case(norm="rms", rows=3)
    assert case == Case(rows=3, norm="rms")
    assert {case: 1}[Case(rows=3, norm="rms")] == 1
    assert case.but(rows=4) == Case(norm="rms", rows=4) != case
    assert Case.of({"norm": "rms", "rows": 3, "variant": "eager"}, ("norm", "rows")) == case
    assert [*case.row(variant="eager")] == ["norm", "rows", "variant"]


def test_run_measures_every_case_and_reports_progress():
    lines, saved = [], []
    run = run_cases(
        CASES, measure, Run(new_found("rows")), progress=lines.append, save=lambda run: saved.append(len(run.done))
    )
    assert (run.ended, run.complete, run.done, run.left) == ("done", True, CASES, [])
    assert [*by_case(run.found["rows"], ("rows", "threads"))] == CASES
    assert saved == [1, 2, 3]
    assert [line.split()[0] for line in lines] == ["1/3", "2/3", "3/3"]


@pytest.mark.parametrize(
    ("error", "ended", "rows"),
    [(KeyboardInterrupt(), "interrupt", 4), (Stop("lost", {"rows": [{"variant": "a"}]}), "lost", 5)],
)
def test_stopped_run_keeps_its_cases_and_continues(error, ended, rows):
    run = run_cases(CASES, stopping(2, error), Run(new_found("rows")))
    assert (run.ended, run.complete, run.done, run.left, len(run.found["rows"])) == (
        ended,
        False,
        CASES[:2],
        CASES[2:],
        rows,
    )
    again = run_cases(CASES, measure, Run({"rows": run.found["rows"][:4]}, run.done))
    assert (again.complete, again.done) == (True, CASES)
    assert again.found["rows"][:4] == run.found["rows"][:4]


def test_error_of_a_case_is_raised():
    with pytest.raises(ZeroDivisionError):
        run_cases(CASES, stopping(0, ZeroDivisionError()), Run(new_found("rows")))


def test_budget_ends_a_run_after_the_first_case():
    run = run_cases(CASES, measure, Run(new_found("rows")), budget=1e-9)
    assert (run.ended, run.complete, run.done, run.left) == ("budget", True, CASES[:1], CASES[1:])


# Documents.


def test_document_is_written_whole_or_as_partial(tmp_path):
    path = tmp_path / "new" / "a.json"
    document = {"complete": True, "protocol": {"a": 1}, "rows": [{"x": 1.5}, {"x": math.inf}]}
    assert harness.write(document, path) == path
    assert (
        path.read_text()
        == '{\n"complete": true,\n"protocol": {"a": 1},\n"rows": [\n{"x": 1.5},\n{"x": "Infinity"}\n]\n}\n'
    )
    assert harness.read(path) == document
    partial = harness.write({**document, "complete": False}, path)
    assert partial == partial_path(path) == tmp_path / "new" / "a.partial.json"
    assert harness.read(path)["complete"]
    harness.write(document, path)
    assert [*path.parent.iterdir()] == [path]


def test_resumable_refuses_another_run(tmp_path):
    path = tmp_path / "a.json"

    def find(commit):
        return resumable(
            [partial_path(path), path], {"commit": commit}, lambda document: {"commit": document["commit"]}
        )

    assert find("one") is None
    harness.write({"complete": True, "commit": "one"}, path)
    assert find("one")["complete"]
    harness.write({"complete": False, "commit": "two"}, path)
    with pytest.raises(ValueError, match=r"a\.partial\.json has commit two, this run has one: delete it"):
        find("one")


def test_environment_describes_the_machine():
    where = environment.describe()
    assert where["machine"]["cpu"]
    assert where["machine"]["cores"] >= 1
    assert [backend["name"] for backend in where["backends"]][:2] == ["reference", "cpu"]
    assert where["versions"]["torch"] == torch.__version__
    assert where["commit"] is None or len(where["commit"]) == 40
    assert environment.last_level_cache({}) == environment.ASSUMED_CACHE


# Targets.


@pytest.mark.parametrize(
    ("compare", "bound", "value", "met"),
    [(">=", 0.95, 0.95, True), (">=", 0.95, 0.94, False), ("<", 1.0, 1.0, False), ("<=", 1.0, 1.0, True), ("==", 2, 2, True),
     ("<", 1.0, math.nan, False), (">=", None, 1.0, None), (">=", 1.0, None, None)],
)  # fmt: skip
def test_target_is_met(compare, bound, value, met):
    row = Target("x", compare, bound).row(value, "rms", cells=1)
    assert [*row.values()] == ["x", "rms", 1, value, compare, bound, met] or math.isnan(value)
    assert Target("x", compare, bound).met(value) is met


def test_goal_takes_the_cases_that_count_and_have_the_numbers():
    cases = by_case([row for case in CASES for row in measure(case)["rows"]], ("rows", "threads"))
    del cases[CASES[2]]["eager"]
    goal = Goal(Target("x", ">=", 1.0), ratio("addnorm", "eager"), min, lambda case: case.rows > 1)
    assert goal.numbers(cases) == {CASES[1]: 2.0}


# The stopwatch.


def test_interleave_rotates_and_leaves_out_what_fails():
    order, failed = [], []

    def sampler(name):
        def sample():
            if name == "b" and order.count("b") == 1:
                raise RuntimeError("no memory")
            order.append(name)
            return len(order)

        return sample

    samplers = {name: sampler(name) for name in "abc"}
    found = interleave(samplers, 3, failed=lambda name, error: failed.append((name, str(error))))
    assert "".join(order) == "abc" + "ca" + "ac"
    assert failed == [("b", "no memory")]
    assert {name: len(samples) for name, samples in found.items()} == {"a": 3, "c": 3}
    with pytest.raises(ZeroDivisionError):
        interleave({"a": lambda: 1 / 0}, 1)


@pytest.mark.parametrize(
    ("seconds", "rounds", "measured"), [(0.01, 21, 21), (0.1, 21, 13), (0.3, 21, 5), (9.0, 21, 5), (9.0, 3, 3)]
)
def test_rounds_fit_into_the_time_of_a_case(monkeypatch, seconds, rounds, measured):
    monkeypatch.setattr(timing, "_calibrate", lambda call, args: (1, seconds))
    found = timing.interleaved(dict.fromkeys("abc", lambda: None), (), rounds)
    assert [row["rounds"] for row in found.values()] == [measured] * 3


def test_each_loop_begins_with_an_untimed_call(monkeypatch):
    called = []
    monkeypatch.setattr(timing, "_calibrate", lambda call, args: (2, 1e-3))
    timing.interleaved({name: lambda name=name: called.append(name) for name in "ab"}, (), 2)
    assert "".join(called) == "aaabbb" + "bbbaaa"


def test_slow_call_is_calibrated_by_two_calls(monkeypatch):
    called = []
    monkeypatch.setattr(timing, "SEGMENT_MS", 1.0)
    repeats, seconds = timing._calibrate(lambda: (called.append(1), time.sleep(0.002)), ())
    assert (len(called), repeats) == (2, 1)
    assert seconds > 0.004


def test_variant_that_may_fail_is_left_out():
    def broken():
        raise RuntimeError("no compiler here")

    errors = {}
    calls = {"compile": broken, "eager": lambda: None}
    assert [*timing.interleaved(calls, (), 1, may_fail=["compile"], errors=errors)] == ["eager"]
    assert str(errors["compile"]) == "no compiler here"
    with pytest.raises(RuntimeError, match="no compiler here"):
        timing.interleaved(calls, (), 1, errors={})
    assert timing.interleaved({"compile": broken}, (), 1, may_fail=["compile"], errors={}) == {}


# The command line of benchmarks/.


@pytest.fixture
def scripts(monkeypatch, tmp_path):
    module = load("benchmarks/harness.py")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module.environment, "commit", lambda: {"commit": "a" * 40, "dirty": False})
    return module


@pytest.fixture
def benchmark(scripts):
    def summarize(found):
        values = [ratio("addnorm", "eager")(rows) for rows in by_case(found["rows"], ("rows", "threads")).values()]
        return [Target("lowest", ">=", 1.5).row(min(values, default=None))]

    return scripts.Benchmark(
        "small", "A small one", ("rows", "threads"), lambda threads: [case.but(threads=threads) for case in CASES],
        lambda case, rounds, fast=False: measure(case), summarize, lambda case: f"{case.rows} rows", protocol={"fast": None},
    )  # fmt: skip


def test_script_measures_prints_writes_and_continues(scripts, benchmark, monkeypatch, tmp_path, capsys, threads):
    threads(2)
    monkeypatch.setattr(sys, "argv", ["bench_small.py", "--rounds", "2", "--threads", "1"])
    interrupted = dataclasses.replace(
        benchmark, measure=lambda case, rounds: stopping(1, KeyboardInterrupt())(case, None)
    )
    assert scripts.main(interrupted) == 130
    partial = json.loads((tmp_path / "small.partial.json").read_text())
    assert (partial["complete"], len(partial["rows"])) == (False, 2)
    measured = []
    continued = dataclasses.replace(benchmark, measure=lambda case, rounds: measured.append(case) or measure(case))
    assert scripts.main(continued) == 0
    assert measured == CASES[1:]
    document = json.loads((tmp_path / "small.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["small.json"]
    assert document["rows"][:2] == partial["rows"]
    assert document["protocol"] == {**timing.protocol(2), "fast": None}
    assert [*document][-2:] == ["summary", "rows"]
    out = capsys.readouterr().out
    assert "2 rows:   addnorm 10.0 µs   eager 20.0 µs" in out
    assert "1.00  lowest  MISSED" in out
    assert torch.get_num_threads() == 2


def test_script_with_another_protocol_begins_anew(scripts, benchmark, monkeypatch, tmp_path):
    document = scripts.run(benchmark, CASES[:1], rounds=3)
    harness.write({**document, "complete": False}, tmp_path / "small.json")
    here = scripts.unfinished(benchmark, tmp_path / "small.json", 3, {})
    assert here["rows"] == document["rows"]
    assert scripts.unfinished(benchmark, tmp_path / "small.json", 4, {}) is None
    monkeypatch.setattr(scripts.environment, "commit", lambda: {"commit": "b" * 40, "dirty": False})
    assert scripts.unfinished(benchmark, tmp_path / "small.json", 3, {}) is None


def test_quick_run_writes_nothing(scripts, benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_small.py", "--quick"])
    assert scripts.main(benchmark) == 0
    assert [*tmp_path.iterdir()] == []
    assert "Written" not in capsys.readouterr().out
