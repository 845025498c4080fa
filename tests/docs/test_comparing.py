"""Tests of docs/comparing.md and README.md: their statements about the comparison and its limits follow from the results."""

import json

from support.loading import ROOT, load

RESULTS = ROOT / "benchmarks/results/compare.json"


def test_other_results_change_the_page(tmp_path, monkeypatch):
    """Change the numbers and find the new ones on the page, where none is written by hand."""
    module = load("docs/_build/comparing.py")
    document = json.loads(RESULTS.read_text())
    document["rows"][0]["test"] = 1.2345
    document["comparison"]["verdict"][1]["sentence"] = "Something else was found."
    (tmp_path / "compare.json").write_text(json.dumps(document))
    monkeypatch.setattr(module, "RESULTS", tmp_path / "compare.json")
    assert "| 1.234 |" in module.table() or "| 1.235 |" in module.table()
    assert "- Something else was found." in module.verdict()


def test_results_are_of_the_default_comparison():
    from addnorm import lab
    from addnorm.lab.data import python_docs

    document = json.loads(RESULTS.read_text())
    assert document["comparison"]["protocol"] == lab.ILLUSTRATION.settings()
    assert document["dirty"] is False
    assert document["comparison"]["illustration"] is True
    assert len(document["rows"]) == 4
    assert document["comparison"]["text"]["name"] == python_docs().name


def test_caption_of_the_picture_is_true():
    """Check the caption against the results, since it is written by hand."""
    runs = {
        (run["settings"]["wiring"], run["settings"]["warm_up"] > 0): run
        for run in json.loads(RESULTS.read_text())["rows"]
    }
    assert runs["pre_ln", False]["test"] < runs["post_ln", True]["test"] < runs["post_ln", False]["test"]
    entropy = runs["post_ln", False]["entropy"]
    assert abs(runs["post_ln", False]["test"] - entropy) < 0.1
    falls = {key: run["after"]["gradient"][0] / run["after"]["gradient"][-1] for key, run in runs.items()}
    assert falls["post_ln", False] < 0.01
    assert all(ratio > 0.1 for key, ratio in falls.items() if key != ("post_ln", False))
