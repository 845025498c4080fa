"""docs/comparing.md and README.md: what they say of the comparison and of the limits is what the results say."""

import json
import re

import pytest

from support.loading import ROOT, load

RESULTS = ROOT / "benchmarks/results/compare.json"


@pytest.fixture(params=["comparing", "readme"])
def script(request, tmp_path, monkeypatch):
    """A script, with a copy of its page that may be changed."""
    module = load(f"docs/_build/{request.param}.py")
    copy = tmp_path / module.PAGE.name
    copy.write_text(module.PAGE.read_text())
    monkeypatch.setattr(module, "PAGE", copy)
    return module


def test_the_page_is_what_the_results_say(script):
    assert script.main(["--check"]) == 0


def test_a_page_that_is_not_is_told_and_mended(script, capsys):
    good = script.PAGE.read_text()
    script.PAGE.write_text(re.sub(r"(<!-- \w+:(?:verdict|compare) -->\n)- ", r"\1- Not ", good))
    assert script.PAGE.read_text() != good
    assert script.main(["--check"]) == 1
    assert "run docs/" in capsys.readouterr().out
    assert script.main([]) == 0
    assert script.PAGE.read_text() == good


def test_other_results_make_another_page(tmp_path, monkeypatch):
    """Nothing on the page is written by hand: numbers that are changed appear."""
    module = load("docs/_build/comparing.py")
    document = json.loads(RESULTS.read_text())
    document["rows"][0]["test"] = 1.2345
    document["comparison"]["verdict"][1]["sentence"] = "Something else was found."
    (tmp_path / "compare.json").write_text(json.dumps(document))
    monkeypatch.setattr(module, "RESULTS", tmp_path / "compare.json")
    assert "| 1.234 |" in module.table() or "| 1.235 |" in module.table()
    assert "- Something else was found." in module.verdict()


def test_the_results_are_of_the_default_comparison_of_a_clean_checkout():
    from addnorm import lab
    from addnorm.lab.data import python_docs

    document = json.loads(RESULTS.read_text())
    assert document["comparison"]["protocol"] == lab.ILLUSTRATION.settings()
    assert document["dirty"] is False
    assert document["comparison"]["illustration"] is True
    assert len(document["rows"]) == 4
    assert document["comparison"]["text"]["name"] == python_docs().name


def test_what_the_pictures_caption_says_is_so():
    """The words beside the picture were written by a person, who may not have looked again."""
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
