"""Tests of the harness: cases, runs, documents, targets, the stopwatch, tables, and the command line of a benchmark."""

import dataclasses
import json
import math
import sys

import pytest
import torch

from addnorm.bench import environment, harness, timing
from addnorm.bench.case import Case, Target, grid, ratio
from addnorm.bench.harness import Benchmark
from support.processes import run_python

CASES = grid(rows=(1, 2, 3), job=("forward",))
COMMIT = {"commit": "a" * 40, "dirty": False}


def measure(case, *, rounds, fast=True):
    times = {"addnorm": 10.0, "eager": 10.0 * case.rows}
    return {"rows": [case.row(variant=name, median_us=time) for name, time in times.items()]}


def stop_at(index, error):
    def stopped(case, *, rounds, fast=True, **_):
        if case.rows == CASES[index].rows:
            raise error
        return measure(case, rounds=rounds)

    return stopped


BENCHMARK = Benchmark(
    "small", CASES, measure, lambda case: f"{case.rows} rows",
    [Target("lowest", ">=", 1.5, ratio("addnorm", "eager"))], options={"fast": True}, sections={"a.md#b": lambda document: "c"},
)  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch, threads):
    """Run in a clean checkout on an idle machine, on two threads."""
    threads(2)
    monkeypatch.setattr(environment, "commit", lambda: dict(COMMIT))
    columns = {"load": 0.0, "load_after": 2.0, "load_of_others": None}
    monkeypatch.setattr(environment, "meter_load", lambda: lambda: dict(columns))
    return columns


# Runs.


def test_run_measures_saves_and_reports_every_case(tmp_path):
    lines, path, seen = [], tmp_path / "small.json", []

    def counted(case, **options):
        seen.append((torch.get_num_threads(), harness.partial_path(path).exists()))
        return measure(case, **options)

    benchmark = dataclasses.replace(
        BENCHMARK, measure=counted, threads=1, finish=lambda results, head: {"count": len(results["rows"]), **results},
        verdicts=lambda document: {"even": document["count"] % 2 == 0},
    )  # fmt: skip
    document = harness.run(benchmark, progress=lines.append, path=path)
    expected = {"complete": True, "ended": "done", "threads": 1, "count": 6, "even": True}
    assert expected.items() <= document.items()
    assert ("left" in document, [*document][-1]) == (False, "rows")
    assert benchmark.judge({**document, "count": 3})["even"] is False
    assert [*dict(benchmark.by_case(document))] == [case.but(threads=1) for case in CASES]
    assert seen == [(1, False), (1, True), (1, True)]  # saved after each case
    assert [line.split()[0] for line in lines] == ["1/3", "2/3", "3/3"]
    assert torch.get_num_threads() == 2
    document = harness.run(BENCHMARK, budget=1e-9)
    assert (document["complete"], document["ended"]) == (True, "budget")
    assert (len(document["cells"]), len(document["left"])) == (1, 2)
    with pytest.raises(ZeroDivisionError):
        harness.run(dataclasses.replace(BENCHMARK, measure=stop_at(0, ZeroDivisionError())))


def test_stopped_run_keeps_its_cases_and_continues():
    document = harness.run(dataclasses.replace(BENCHMARK, measure=stop_at(2, KeyboardInterrupt())))
    assert (document["complete"], document["ended"], len(document["rows"])) == (False, "interrupt", 4)
    assert (len(document["cells"]), document["left"]) == (2, [vars(CASES[2].but(threads=2))])
    again = harness.run(BENCHMARK, earlier=json.loads(json.dumps({**document, "load": 2.5})))
    assert again["complete"]
    assert again["rows"][:4] == document["rows"]
    assert len(again["rows"]) == 6
    assert (again["load"], again["seconds"] > document["seconds"]) == (2.5, True)  # the larger load
    assert harness.run(BENCHMARK, earlier=again)["rows"] == again["rows"]  # nothing is left
    case = Case(norms=("layer", "rms"))
    assert Case(**json.loads(json.dumps(vars(case)))) == case


# Documents.


def test_document_is_written_whole_or_as_partial(tmp_path):
    path = tmp_path / "new" / "a.json"
    document = {"complete": True, "protocol": {"a": 1}, "rows": [{"x": 1.5}, {"x": math.inf}]}
    assert harness.write(document, path) == path
    text = '{\n"complete": true,\n"protocol": {"a": 1},\n"rows": [\n{"x": 1.5},\n{"x": "Infinity"}\n]\n}\n'
    assert path.read_text() == text
    assert harness.read(path) == document
    partial = tmp_path / "new/a.partial.json"
    assert harness.write({**document, "complete": False}, path) == harness.partial_path(path) == partial
    assert path.read_text() == text
    harness.write(document, path)
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("text", ["", '{"caches": [{"name": "L1d", "one-size": null}]}'])
def test_caches_of_unknown_size_are_left_out(text, monkeypatch):
    assert all(size > 0 for size in environment.caches().values())
    monkeypatch.setattr(environment, "run", lambda command: (0, text, ""))
    assert environment.caches() == {}


def test_run_of_another_environment_is_not_continued(tmp_path):
    here, path = environment.describe(), tmp_path / "small.json"
    assert harness.find_earlier(path, here) is None
    for change, error in (
        ({"protocol": {"rounds": 4}}, None), ({"commit": "other"}, "small.partial.json has commit other, expected a+: measure again"),
        ({"device": {"name": "Some GPU"}}, "has device {'name': 'Some GPU'}, expected"), ({"versions": {}}, "has versions {}, expected"),
    ):  # fmt: skip
        harness.write({**here, "complete": False, **change}, path)
        if error is None:
            assert harness.find_earlier(path, here)["protocol"] == change["protocol"]
            continue
        with pytest.raises(ValueError, match=error):
            harness.find_earlier(path, here)


# The stopwatch.


@pytest.mark.parametrize(
    ("seconds", "rounds", "measured"), [(0.01, 21, 21), (0.1, 21, 13), (0.3, 21, 12), (9.0, 21, 12), (9.0, 3, 3)]
)
def test_rounds_fit_into_the_time_of_a_case(monkeypatch, seconds, rounds, measured):
    order = []
    monkeypatch.setattr(timing, "_calibrate", lambda call: (2, seconds))
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    a, b, c = timing.measure(CASES[0], calls, rounds, peer="a")
    assert [row["rounds"] for row in (a, b, c)] == [measured] * 3
    assert "".join(order[:18]) == "aaabbbccc" + "bbbcccaaa"  # each loop begins with an untimed call
    assert (a["paired_low"], a["paired_high"]) == ((1.0, 1.0) if measured >= 6 else (-math.inf, math.inf))
    assert b["paired_low"] <= b["paired_ratio"] <= b["paired_high"]


def test_variant_that_fails_when_made_or_called_is_left_out():
    makers = {"right": lambda: int, "unmade": lambda: 1 / 0, "uncalled": lambda: lambda: 1 / 0}
    calls, failures = timing.attempt(CASES[0], makers, ("unmade", "uncalled"))
    assert calls == {"right": int}
    assert failures == [
        CASES[0].row(variant=name, error="ZeroDivisionError: division by zero") for name in ("unmade", "uncalled")
    ]
    with pytest.raises(ZeroDivisionError):
        timing.attempt(CASES[0], makers, ("unmade",))


FAULTS = """
import json, os, torch
from addnorm.bench import timing
from addnorm.bench.case import Case
torch.set_num_threads(1)
x = torch.randn(4 * 2**20)
calls = {"add": lambda: x + 1.0, "in place": lambda: x.add_(1.0)}
faults = {}
for state in ("fresh", "kept"):
    assert timing.settle_allocator(state)
    rows = timing.measure(Case(), calls, 5)
    faults[state] = {row["variant"]: row["faults"] / (x.nbytes / os.sysconf("SC_PAGE_SIZE")) for row in rows}
print(json.dumps(faults))
"""


def test_verdicts_alone_have_no_summary():
    """Claims have verdicts in place of numbers beside targets: judging them again adds no key."""
    claims = dataclasses.replace(BENCHMARK, targets=(), verdicts=lambda document: {"claims": [1]})
    assert claims.judge({"rows": []}) == {"claims": [1]}
    assert claims.judge({"rows": [], "summary": []}) == {"summary": [], "claims": [1]}


@pytest.mark.skipif(not timing.settle_allocator("default"), reason="the allocator is not glibc's")
def test_allocator_states_differ_in_page_faults():
    faults = json.loads(run_python("-c", FAULTS).stdout)  # as a share of the tensor's pages
    assert faults["fresh"]["add"] > 0.9
    assert faults["kept"]["add"] < 0.1
    assert max(faults[state]["in place"] for state in faults) < 0.1


# The load.


def test_load_of_others_excludes_the_run(monkeypatch):
    monkeypatch.undo()
    for name, values in (("_busy_seconds", [100.0, 104.0]), ("_own_seconds", [10.0, 13.0]), ("load", [0.3, 1.9])):
        monkeypatch.setattr(environment, name, iter(values).__next__)
    monkeypatch.setattr(environment.time, "monotonic", iter([50.0, 52.0]).__next__)
    assert environment.meter_load()() == {"load": 0.3, "load_after": 1.9, "load_of_others": 0.5}


# The command line.


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Return a function that calls the script of a benchmark: its exit code and both outputs; results go beside it."""
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bench_small.py")])

    def run(*words, **changes):
        try:
            code = harness.main(dataclasses.replace(BENCHMARK, **changes), words)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def names(folder):
    return sorted(path.name for path in (folder / "results").iterdir())


def test_script_is_interrupted_continues_and_prints(call, tmp_path):
    words, measured = ("--rounds", "2", "--threads", "1"), []
    code, _, err = call(*words, measure=stop_at(1, KeyboardInterrupt()))
    assert code == 130
    assert "Cut short (interrupt)" in err
    partial = json.loads((tmp_path / "results/small.partial.json").read_text())

    def counted(case, **options):
        measured.append(case.rows)
        return measure(case, **options)

    code, out, _ = call(
        *words, "--resume", measure=counted, finish=lambda results, head: {"facts": [{"met": False}], **results}
    )
    assert (code, measured, names(tmp_path)) == (3, [2, 3], ["small.json"])
    document = json.loads((tmp_path / "results/small.json").read_text())
    assert document["rows"][:2] == partial["rows"]
    assert document["protocol"] == {**timing.protocol(2), "fast": True}
    assert "2 rows:   addnorm 10.0 µs   eager 20.0 µs" in out
    assert "| lowest | 1.00 | >= 1.5 | no, 2 of 3 |" in out
    call(*words)  # without --resume everything is measured again
    call("--judge", targets=[Target("highest", "<=", 2.0, ratio("addnorm", "eager"), max)])
    (row,) = json.loads((tmp_path / "results/small.json").read_text())["summary"]
    assert (row["name"], row["value"], row["met"], row["worst"]) == ("highest", 3.0, False, "3 rows")


@pytest.mark.parametrize(
    ("load", "others", "dirty", "reason"),
    [(1.4, 0.0, False, "the load was 1.4 before the run, expected at most 1"),
     (0.2, 0.7, False, "other processes used 0.7 cores during the run, expected at most 0.5"),
     (0.0, 0.0, True, "the checkout has changes, expected the code of its commit"), (1.0, 0.5, False, None), (0.9, None, False, None)],
)  # fmt: skip
def test_busy_machine_or_changed_checkout_is_not_published(
    call, clean, monkeypatch, tmp_path, load, others, dirty, reason
):
    clean.update(load=load, load_of_others=others)
    monkeypatch.setattr(environment, "commit", lambda: {**COMMIT, "dirty": dirty})
    code, out, _ = call()
    assert (code, names(tmp_path)) == ((0, ["small.json"]) if reason is None else (1, ["small.busy.json"]))
    assert (f"Not published, {reason}: written to" in out) == (reason is not None)


def test_script_selects_lists_and_writes_parts_elsewhere(call, tmp_path):
    assert call("--list", "--rows", "3", "1")[1] == "1 rows\n3 rows\n"
    assert call("--rows", "7") == (2, "", "bench_small.py: no case of the plan has rows 7\n")
    for wrong in (("--job", "backward"), ("--rounds", "0"), ("--rows", "-1")):
        assert call(*wrong)[0] == 2
    seen = []
    code, _, _ = call(
        "--rows", "2", "--no-fast", "--json", str(tmp_path / "results/part.json"),
        measure=lambda case, *, rounds, fast: seen.append((case.rows, fast)) or measure(case, rounds=rounds),
    )  # fmt: skip
    assert (code, seen, names(tmp_path)) == (0, [(2, False)], ["part.json"])
