"""Tests of docs/explorer.md: its times equal those of the results."""

import json

import pytest

from support.loading import ROOT, load

RESULTS = ROOT / "benchmarks/results/explorer.json"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return the script with a copy of its page, which tests may change."""
    module = load("docs/_build/explorer.py")
    copy = tmp_path / module.PAGE.name
    copy.write_text(module.PAGE.read_text())
    monkeypatch.setattr(module, "PAGE", copy)
    return module


def test_other_results_change_the_page(script, monkeypatch, tmp_path):
    document = json.loads(RESULTS.read_text())
    document["flip"]["total"]["p95"] = 987.6
    document["stale"]["last is right"] = False
    monkeypatch.setattr(script.add_norm, "document", lambda name: document)
    found = script.speed()
    assert "987.6" in found
    assert "150 (missed)" in found
    assert "the last drawn is not the last asked for" in found
    assert script.main(["--check"]) == 1
