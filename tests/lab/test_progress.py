"""addnorm.lab.progress: on a terminal one line that fits and is gone at the end; elsewhere a line for each run."""

import io
import re
import time

import pytest
from rich.console import Console

from addnorm.lab import progress
from addnorm.lab.progress import Live, outcome
from addnorm.lab.result_store import Journal, tell_step
from support.lab_runs import planted

NAMES = {key: f"run {key}, 12 layers, lr 0.001, no warm-up, seed 0" for key in ("post_ln", "pre_ln", "deepnorm")}


def looked(live):
    """Waits until the open runs were looked at and are shown; a look that has begun may have missed something, so for two."""
    until = live.looks + 2
    end = time.monotonic() + 30
    while live.looks < until:
        assert time.monotonic() < end, "nobody looks"
        time.sleep(0.01)
    live._bar.refresh()  # or rich draws by a clock of its own


class Counted(Live):
    """Says how often it has looked."""

    looks = 0

    def standing(self):
        self.looks += 1
        return super().standing()


def watched(tmp_path, width, terminal=True):
    """What is written while two runs are open, and one of them ends."""
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=terminal, color_system=None)
    journal = Journal(tmp_path)
    tell_step(journal.open / "post_ln.json", 50, 2.5)
    with Counted(journal, dict.fromkeys(NAMES, 100), NAMES, console) as live:
        wait = looked if terminal else lambda _: time.sleep(0.1)  # elsewhere nobody looks, and nothing may be written
        wait(live)
        tell_step(journal.open / "pre_ln.json", 25, float("nan"))
        wait(live)
        live.done({**planted("post_ln"), "key": "post_ln"})
        wait(live)
    return written.getvalue()


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.05)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_on_a_terminal_it_is_one_line_that_fits_with_the_time_that_is_left(tmp_path, width):
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", watched(tmp_path, width)).replace("\r", "\n").splitlines()
    bars = [line for line in lines if line.startswith("compare")]
    assert len(bars) > 2
    assert max(map(len, bars)) <= width
    assert all(" left" in line and "…" not in line for line in bars), bars
    assert any("25 %" in line for line in bars), "50 and 25 of 300 steps"
    assert any("42 %" in line for line in bars), "100 and 25"
    assert any("post_ln 50/100 2.50" in line for line in bars) == (width >= 80)
    assert any("post_ln 50/100 2.50  pre_ln 25/100 nan" in line for line in bars) == (width >= 160)
    assert sum("1/3  post_ln, 12 layers" in line for line in lines) == 1


def test_nothing_of_the_line_is_left_at_the_end(tmp_path):
    text = watched(tmp_path, 80)
    assert text.endswith("\x1b[2K")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor is back"


def test_elsewhere_it_is_a_line_for_each_run_however_wide(tmp_path):
    assert watched(tmp_path, 20, terminal=False) == (
        "1/3  post_ln, 12 layers, lr 0.001, no warm-up, seed 0: 1.000 nats a character, 1 s\n"
    )


def test_without_a_console_nothing_is_shown(tmp_path):
    with Live(Journal(tmp_path), {"post_ln": 1}, NAMES, None) as live:
        live.done({**planted("post_ln"), "key": "post_ln"})
        assert live.finished == {"post_ln"}


def test_an_outcome_is_told_in_a_few_words():
    assert outcome(planted("a", 1.2345)) == "1.234 nats a character, 1 s"
    assert outcome({**planted("a", 1.2345), "resumed": 2}) == "1.234 nats a character, 1 s, continued"
    assert outcome(planted("a", diverged=True)) == "diverged, 1 s"
