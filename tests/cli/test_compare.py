"""Tests of `addnorm compare`: output, files, errors, and resuming after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from addnorm import lab, report
from support import SUPPORT, commands
from support.commands import assert_one_sentence, each_end, refuse, without_announcements
from support.lab_runs import FEW_STACKS, SIZE, TEXT, measured

SMALL = ("--layers", 2, "--d-model", 16, "--heads", 2, "--tokens", 8, "--batch", 4)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, one_thread):
    """Run in a temporary directory with a text and one depth at init; without a report unless the test checks it."""
    (tmp_path / "text").write_text(TEXT.text)
    monkeypatch.chdir(tmp_path)
    for setting in FEW_STACKS:
        monkeypatch.setattr(*setting)
    monkeypatch.setattr(report, "build_comparison_page", lambda output, facts: output)
    monkeypatch.setattr(report, "write", lambda page, path: path)


def run(*arguments, text=True, **env):
    return commands.run("compare", *(("--text", "text") if text else ()), "--jobs", 1, *arguments, **env)


def test_compare_prints_verdict_and_progress():
    result = run("post_ln", "pre_ln", *SMALL, "--steps", 6, "--warm-up", 0)
    assert result.exit_code == 0
    illustration = "This is an illustration, not evidence: 2 runs of 6 steps"
    commands.assert_words(result.stdout, illustration, "At 2 layers", "post_ln", "pre_ln", "test loss")
    lines = result.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "1/2  post_ln, 2 layers, lr 0.001, no warm-up, seed 0", "2/2  pre_ln, 2 layers, lr 0.001, no warm-up, seed 0", "Written"
    ]  # fmt: skip
    assert "\x1b" not in result.output
    assert Path("addnorm-compare/results.jsonl").exists()


def test_compare_json_is_reproducible():
    options = ("--steps", 4, "--rates", "1e-3,1e6", "--seeds", 2, "--warm-up", 0, "--json")
    first, second = (run("mix_ln:k=1", "pre_ln", *SMALL, *options) for _ in range(2))
    assert first.exit_code == second.exit_code == 0
    output = json.loads(first.stdout, parse_constant=refuse)
    assert first.stdout == second.stdout
    assert second.stderr.splitlines() == ["Written: addnorm-compare/report.html"], "nothing is made again"
    assert output["compared"] == ["mix_ln(k=1)", "pre_ln"]
    assert output["protocol"]["seeds"] == [0, 1]
    assert len(output["runs"]) == 8
    assert {"schema", "verdict", "checks", "text"} <= set(output)


def test_compare_init_only_trains_nothing():
    result = run("rezero", "--init-only", "--json", text=False)
    assert json.loads(result.stdout)["runs"] == []
    assert "Only untrained stacks were measured" in result.stdout


def test_compare_limits_warm_up_of_short_runs():
    for steps, warm_ups in ((5, [0, 2]), (1, [0])):
        result = run("pre_ln", *SMALL, "--steps", steps, "--json")
        assert json.loads(result.stdout)["protocol"]["warm_ups"] == warm_ups


def test_compare_reports_failed_run(monkeypatch):
    def fail(*_, **__):
        raise lab.RunError("run pre_ln has failed, MemoryError: too much")

    monkeypatch.setattr(lab, "compare", fail)
    assert_one_sentence(run("pre_ln"), 1, "run pre_ln has failed", "Finished runs are in addnorm-compare")


def test_compare_keeps_results_without_report(monkeypatch):
    def full(page, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write", full)
    result = run("pre_ln", *SMALL, "--steps", 1)
    assert (result.exit_code, "Traceback" in result.output) == (1, False)
    assert "No space left on device" in result.stderr
    assert Path("addnorm-compare/results.jsonl").stat().st_size


def test_compare_interrupted_while_drawing(monkeypatch):
    def interrupt(output, facts):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "build_comparison_page", interrupt)
    result = run("pre_ln", *SMALL, "--steps", 1)
    assert result.exit_code == 130
    assert "Interrupted. Finished runs are in addnorm-compare; the same command continues." in result.stderr


# A process that is killed.

SCRIPT = SUPPORT / "run_compare.py"


def checkpoints():
    return [*Path("out/open").glob("[!.]*.pt")]


def lines():
    return Path("out/results.jsonl").read_bytes().splitlines(keepends=True)


def training(steps, jobs=2):
    """Return a comparison in which a run has begun, and its workers."""
    options = ("--text", "text", "--out", "out", *SMALL, "--warm-up", 0, "--jobs", jobs, "--steps", steps)
    command = [sys.executable, str(SCRIPT), "compare", "post_ln", "pre_ln", *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    end = time.monotonic() + 60
    while not checkpoints():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    return process, psutil.Process(process.pid).children()


STEPS = 250
PROTOCOL = lab.Protocol(**SIZE, warm_ups=0, steps=STEPS)


def settings(line):
    return json.loads(line).get("settings", {}).get("wiring")


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_compare_continues_after_kill(jobs):
    text = lab.read_text("text")
    lab.compare(["post_ln"], PROTOCOL, text=text, out="out", jobs=1, at_init=False)
    finished = lines()
    process, workers = training(STEPS, jobs)
    assert jobs == 1 or len(workers) >= 2
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(workers, 20)[1]
    before = lines()
    assert before[:1] == finished
    assert "pre_ln" not in map(settings, before)
    assert len(checkpoints()) == 1
    again = run("post_ln", "pre_ln", "--out", "out", *SMALL, "--warm-up", 0, "--steps", STEPS)
    assert again.exit_code == 0
    assert again.stderr.startswith("1/1  pre_ln")
    assert ", continued" in again.stderr
    after = lines()
    assert after[: len(before)] == before
    assert checkpoints() == []
    output = {settings(line): json.loads(line) for line in after}
    assert output["pre_ln"]["resumed"] == 1
    undisturbed = lab.compare(["pre_ln"], PROTOCOL, text=text, jobs=1, at_init=False)
    assert measured(output["pre_ln"]) == measured(undisturbed.runs[0])


@pytest.mark.slow
@each_end
def test_compare_interrupted_keeps_results(number, code):
    process, workers = training(10**6)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # to the workers too, as a terminal does
    else:
        process.send_signal(number)
    try:
        stdout, stderr = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # nothing trains on after the test
        raise
    assert process.returncode == code
    lines = [line for line in without_announcements(stderr).splitlines() if "results finished" not in line]
    assert lines == ["Interrupted. Finished runs are in out; the same command continues."]
    assert stdout == ""
    assert not psutil.wait_procs(workers, 20)[1]
    assert checkpoints()
