"""Tests of the progress of a comparison: one line that fits a terminal, and elsewhere a line per run."""

import io
import re
import sys
import time

import pytest
from rich.console import Console

from addnorm.lab.compare import Job, describe_outcome, show_progress
from addnorm.lab.result_store import ResultStore, write_progress
from addnorm.lab.run import Run
from support.lab_runs import planted

JOBS = [Job(name, f"run {name}", 100, Run(name, steps=100)) for name in ("post_ln", "pre_ln", "deepnorm")]


def wait_for_updates(written):
    """Wait for two updates of the display: the first may have begun before the change."""
    end = time.monotonic() + 30
    for _ in range(2):
        length = len(written.getvalue())
        while len(written.getvalue()) == length:
            assert time.monotonic() < end, "the display is not updated"
            time.sleep(0.01)


def display_output(tmp_path, width, terminal=True, quiet=False):
    """Return what is written while two runs are open and one of them finishes."""
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=terminal, color_system=None, quiet=quiet)
    store = ResultStore(tmp_path)
    write_progress(store.open / "post_ln.json", 50, 2.5)
    wait = wait_for_updates if terminal and not quiet else lambda _: time.sleep(0.1)
    with show_progress(store, JOBS, console) as finish:
        wait(written)
        write_progress(store.open / "pre_ln.json", 25, float("nan"))
        wait(written)
        finish({**planted("post_ln"), "key": "post_ln"})
        wait(written)
    return written.getvalue()


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(sys.modules["addnorm.lab.compare"], "DISPLAY_INTERVAL", 0.05)


@pytest.mark.parametrize("width", [40, 160])
def test_display_is_one_line_that_fits_the_terminal(tmp_path, width):
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", display_output(tmp_path, width)).replace("\r", "\n").splitlines()
    bars = [line for line in lines if line.startswith("compare")]
    assert len(bars) > 2
    assert max(map(len, bars)) <= width
    assert all(" left" in line and "…" not in line for line in bars), bars
    assert any("25%" in line for line in bars), "50 and 25 of 300 steps"
    assert any("42%" in line for line in bars), "100 and 25"
    assert any("post_ln 50/100 2.50" in line for line in bars) == (width >= 80)
    assert any("post_ln 50/100 2.50  pre_ln 25/100 nan" in line for line in bars) == (width >= 160)
    assert sum("1/3  post_ln, 12 layers" in line for line in lines) == 1


def test_display_erases_its_line_at_the_end(tmp_path):
    text = display_output(tmp_path, 80)
    assert text.endswith("\x1b[2K")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor is visible again"


def test_display_prints_a_line_per_run_without_terminal(tmp_path):
    assert display_output(tmp_path, 20, terminal=False) == (
        "1/3  post_ln, 12 layers, lr 0.001, no warm-up, seed 0: 1.000 nats a character, 1 s\n"
    )


def test_display_on_a_quiet_terminal_writes_nothing(tmp_path):
    assert display_output(tmp_path, 80, quiet=True) == ""


def test_outcome_of_a_diverged_run():
    assert describe_outcome(planted("a", diverged=True)) == "diverged, 1 s"
