"""Tests of benchmarks/bench_explorer.py: its run, and its committed results."""

import json
import subprocess
import sys

import pytest

from support.browser import chromium
from support.loading import ROOT, load

SCRIPT = "benchmarks/bench_explorer.py"


def test_targets_follow_from_the_results():
    found = json.loads((ROOT / "benchmarks/results/explorer.json").read_text())
    script = load(SCRIPT)
    assert found["schema"] == script.SCHEMA
    assert found["stack"] == {"S": 48, "d": 64, "T": 16}
    assert found["flip"]["total"]["count"] >= 100
    for name, most in script.TARGETS.items():
        cells = [found["flip"]["total"]] if name == "flip" else found["trace"].values()
        worst = max(cell["p95"] for cell in cells)
        assert found["targets"][name] == {"p95": worst, "target": most, "met": worst < most}


def test_spread_has_median_percentile_and_maximum():
    found = load(SCRIPT).spread([*range(1, 101)])
    assert found["median"] == 50.5
    assert 95 <= found["p95"] <= 96
    assert (found["most"], found["count"]) == (100, 100)


@pytest.mark.slow
def test_script_measures_and_writes(tmp_path):
    chromium()
    out = tmp_path / "explorer.json"
    subprocess.run(
        [sys.executable, ROOT / SCRIPT, "--rounds", "1", "--typed", "5", "--out", out], check=True, capture_output=True
    )
    found = json.loads(out.read_text())
    assert found["flip"]["total"]["count"] == 5
    assert found["flip"]["total"]["median"] > found["flip"]["compute"]["median"] > 0
    assert found["stale"]["last is right"]
    assert found["stale"]["drawn"] <= found["stale"]["asked"]
