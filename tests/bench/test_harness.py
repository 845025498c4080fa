"""Tests of the benchmark harness: cases, runs, documents, targets, the stopwatch, and the command line of benchmarks/."""

import dataclasses
import json
import math
import subprocess
import sys
import time

import pytest
import torch

from addnorm._util.timing import interleave
from addnorm.bench import environment, harness, timing
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


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets the load before a run, the cores that others use meanwhile, and whether the checkout has changes.

    At first the machine is idle and the checkout clean.
    """

    def use(load=0.0, others=None, dirty=False):
        columns = {"load": load, "load_after": 2.0, "load_of_others": others}
        monkeypatch.setattr(environment.LoadMeter, "columns", lambda meter: columns)
        monkeypatch.setattr(environment, "commit", lambda: {"commit": "0" * 40, "dirty": dirty})

    use()
    return use


def test_script_is_interrupted_continues_and_prints(
    machine, scripts, benchmark, monkeypatch, tmp_path, capsys, threads
):
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


@pytest.mark.parametrize(
    ("load", "others", "reason"),
    [(1.4, 0.0, "the load was 1.4 before the run, expected at most 1"),
     (0.2, 0.7, "other processes used 0.7 cores during the run, expected at most 0.5"), (1.0, 0.5, None), (0.9, None, None)],
)  # fmt: skip
def test_busy_machine_is_not_published(
    load, others, reason, machine, scripts, benchmark, monkeypatch, tmp_path, capsys
):
    machine(load, others)
    monkeypatch.setattr(sys, "argv", ["bench_small.py", "--rounds", "2", "--threads", "1"])
    assert scripts.main(benchmark) == (0 if reason is None else 1)
    assert [path.name for path in tmp_path.iterdir()] == ["small.json" if reason is None else "small.busy.json"]
    busy = f"Not published, {reason}: written to {tmp_path / 'small.busy.json'}; measure again, or pass --force."
    assert (busy in capsys.readouterr().out) == (reason is not None)


def test_changed_checkout_is_not_published(machine, scripts, benchmark, monkeypatch, tmp_path, capsys):
    machine(dirty=True)
    monkeypatch.setattr(sys, "argv", ["bench_small.py", "--rounds", "2", "--threads", "1"])
    assert scripts.main(benchmark) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["small.busy.json"]
    assert "Not published, the checkout has changes, expected the code of its commit" in capsys.readouterr().out


def test_force_publishes_and_marks(machine, scripts, benchmark, monkeypatch, tmp_path):
    machine(3.0)
    monkeypatch.setattr(sys, "argv", ["bench_small.py", "--rounds", "2", "--threads", "1", "--force"])
    assert scripts.main(benchmark) == 0
    document = json.loads((tmp_path / "small.json").read_text())
    assert (document["forced"], document["load"], document["load_after"]) == (True, 3.0, 2.0)


def test_load_of_others_excludes_the_run(monkeypatch):
    for name, values in (("_busy_seconds", [100.0, 104.0]), ("_own_seconds", [10.0, 13.0]), ("load", [0.3, 1.9])):
        monkeypatch.setattr(environment, name, iter(values).__next__)
    monkeypatch.setattr(environment.time, "monotonic", iter([50.0, 52.0]).__next__)
    assert environment.LoadMeter().columns() == {"load": 0.3, "load_after": 1.9, "load_of_others": 0.5}


def test_own_work_counts_as_work_of_the_machine():
    busy, own = environment._busy_seconds(), environment._own_seconds()
    if busy is None:
        pytest.skip("this system does not say how long its cores have worked")
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    assert environment._own_seconds() - own >= 0.28
    assert environment._busy_seconds() - busy >= 0.2  # in steps of a hundredth


def test_continued_run_keeps_the_larger_load(machine, scripts):
    machine(0.1)
    meter = environment.LoadMeter()
    assert scripts.load_columns(meter, {"load": 2.5})["load"] == 2.5
    machine(0.1)
    assert scripts.load_columns(meter, {"load": 0.0})["load"] == 0.1


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


FAULTS = """
import json, os, torch
from addnorm.bench import timing
torch.set_num_threads(1)
x = torch.randn(4 * 2**20)
calls = {"add": lambda: x + 1.0, "in place": lambda: x.add_(1.0)}
faults = {}
for state in ("fresh", "kept"):
    assert timing.settle_allocator(state)
    rows = timing.interleaved(calls, (), 5)
    faults[state] = {name: row["faults"] / (x.nbytes / os.sysconf("SC_PAGE_SIZE")) for name, row in rows.items()}
print(json.dumps(faults))
"""


@pytest.mark.skipif(not timing.settle_allocator("default"), reason="the allocator is not glibc's")
def test_allocator_states_differ_in_page_faults():
    process = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    faults = json.loads(process.stdout)  # as a share of the tensor's pages
    assert faults["fresh"]["add"] > 0.9
    assert faults["kept"]["add"] < 0.1
    assert max(faults[state]["in place"] for state in faults) < 0.1
