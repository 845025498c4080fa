"""Tests of `addnorm inspect --report`: the page, and errors."""

import pytest

from support.commands import assert_one_sentence, run, succeed
from support.report_pages import check_page


def test_report_is_written(folder):
    result = succeed("inspect", "own_models:toy", "--seed", 3, "--float64", "--train", "--report", "new/a.html")
    assert result.stderr == "Written: new/a.html\n"
    assert "x' = x + f(x)" in result.stdout
    page = check_page((folder / "new" / "a.html").read_text(encoding="utf-8"))
    assert [element["text"] for element in page.all("h1")] == ["own_models:toy"]
    assert len(page.all("figure")) == 5
    facts = [element["text"] for element in page.all("dd")]
    assert "addnorm inspect own_models:toy --float64 --report new/a.html --seed 3 --train" in facts
    assert any("which needs no labels" in fact for fact in facts)


@pytest.mark.parametrize("name", ["frozen", "detached"])
def test_report_without_gradients(folder, name):
    assert succeed("inspect", f"own_models:{name}", "--report", "a.html", "--json").stdout[0] == "{"
    text = check_page((folder / "a.html").read_text(encoding="utf-8")).text
    assert "none, forward only" in text
    assert "gradient of the loss" not in text


def test_report_without_stream_is_not_written(folder):
    assert_one_sentence(run("inspect", "own_models:none", "--report", "a.html"), 3, "has no residual stream")
    assert not (folder / "a.html").exists()
