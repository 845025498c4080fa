"""Tests of the generated sections of docs/: page.py writes them, they are up to date, and they follow from the results."""

import json
import re

import pytest
import torch

import addnorm
from addnorm import lab
from addnorm.lab.data import python_docs
from addnorm.trace import PRESETS
from support.loading import ROOT, load

RESULTS = ROOT / "benchmarks/results"

OLD = "# Title\n<!-- a:one -->\nold\n<!-- /a:one -->\nprose\n<!-- a:two -->\n<!-- /a:two -->\n"
NEW = "# Title\n<!-- a:one -->\n1\n<!-- /a:one -->\nprose\n<!-- a:two -->\n2\n<!-- /a:two -->\n"
SECTIONS = {"a:one": lambda: "1", "a:two": lambda: "2"}


@pytest.fixture(scope="module")
def script():
    return load("docs/_build/page.py")


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "some.md"
    path.write_text(OLD)
    return path


def test_pages_are_up_to_date(script, capsys):
    assert script.main(["--check"]) == 0, capsys.readouterr().out


def test_sections_are_replaced_and_prose_is_kept(script, page, capsys):
    assert script.update(page, SECTIONS, "some.py", check=True)
    assert capsys.readouterr().out == "some.md is out of date: run some.py\n"
    assert page.read_text() == OLD
    assert not script.update(page, SECTIONS, "some.py", check=False)
    assert page.read_text() == NEW
    assert not script.update(page, SECTIONS, "some.py", check=True)


def test_failing_section_leaves_the_page(script, page):
    with pytest.raises(ZeroDivisionError):
        script.update(page, {**SECTIONS, "a:two": lambda: str(1 / 0)}, "some.py", check=False)
    assert page.read_text() == OLD


@pytest.mark.parametrize(
    "text",
    [OLD.replace("<!-- a:two -->", ""), OLD.replace("<!-- /a:two -->", ""), OLD + "<!-- a:two -->"],
    ids=["no begin", "no end", "two begins"],
)
def test_section_without_its_comments_is_refused(script, page, text):
    page.write_text(text)
    with pytest.raises(SystemExit, match=r"some\.md needs one <!-- a:two --> and one <!-- /a:two -->"):
        script.update(page, SECTIONS, "some.py", check=False)
    assert page.read_text() == text


# Single pages.


def test_comparing_page_shows_the_default_comparison_and_its_caption_is_true():
    document = json.loads((RESULTS / "compare.json").read_text())
    assert document["comparison"]["protocol"] == lab.ILLUSTRATION.settings()
    assert (document["dirty"], document["comparison"]["illustration"]) == (False, True)
    assert document["comparison"]["text"]["name"] == python_docs().name
    assert len(document["rows"]) == 4
    runs = {(run["settings"]["wiring"], run["settings"]["warm_up"] > 0): run for run in document["rows"]}
    assert runs["pre_ln", False]["test"] < runs["post_ln", True]["test"] < runs["post_ln", False]["test"]
    assert abs(runs["post_ln", False]["test"] - runs["post_ln", False]["entropy"]) < 0.1
    ratios = {key: run["after"]["gradient"][0] / run["after"]["gradient"][-1] for key, run in runs.items()}
    assert ratios.pop(("post_ln", False)) < 0.01
    assert min(ratios.values()) > 0.1


def test_targets_page_has_every_target_of_the_results():
    module = load("docs/_build/targets.py")
    text = (ROOT / "docs/targets.md").read_text()
    all_names = []
    for path in RESULTS.glob("*.json"):
        document = json.loads(path.read_text())
        parts = ("summary", "facts") if isinstance(document, dict) else ()
        names = [one["name"] for part in parts for one in document.get(part, []) if one.get("target") is not None]
        assert not names or path.stem in module.TITLES
        all_names += names
    assert len(all_names) > 50
    assert [name for name in all_names if name not in text] == []


PAGE = ROOT / "docs/add_norm.md"


def test_refuted_advantage_is_called_refuted(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/_build")
    assert load("docs/_build/arguments.py").verdict_words("refuted", "refuted") == "refuted"


def test_shape_rule_is_the_sentence_of_the_library():
    sentence = re.search(r"^> (branch has .*)$", PAGE.read_text(), re.M)[1]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        addnorm.add_layer_norm(torch.zeros(2, 4), torch.zeros(2, 5))


def test_second_example_has_the_numbers_of_the_trace():
    t, page = PRESETS["lesson-001"].trace(), PAGE.read_text()
    for name, places in (("z", 2), ("centred", 2), ("squares", 4), ("normalized", 4)):
        assert f"[{', '.join(f'{value:.{places}f}' for value in t[name].value)}]" in page, name
    assert f"= {t['mean'].value:.2f} |" in page
    assert f"= {t['variance'].value:.4f} |" in page
    assert f"| {t['root'].value:.4f} |" in page
    rounded = [f"{value / 1.04:.4f}" for value in t["centred"].value]
    assert f"dividing by 1.04 gives [{', '.join(rounded)}]" in page
