"""Tests of `addnorm inspect --report`: the page, and errors."""

import pytest

from addnorm.cli import inspect
from support.commands import assert_one_sentence, run, succeed
from support.report_pages import check_page


def read_page(folder):
    """Check the report and return its text."""
    text = (folder / "a.html").read_text(encoding="utf-8")
    check_page(text)
    return text


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
    result = run("inspect", f"own_models:{name}", "--report", "a.html", "--json")
    assert (result.exit_code, result.stdout[0]) == (0, "{")
    text = read_page(folder)
    assert "none, forward only" in text
    assert "gradient of the loss" not in text


def test_report_of_failed_proof(folder, monkeypatch):
    inspected = inspect.inspect_model

    def broken(*arguments):
        inspection = inspected(*arguments)
        inspection.sites[0].closes, inspection.sites[0].closure = False, 0.5
        return inspection

    monkeypatch.setattr(inspect, "inspect_model", broken)
    result = run("inspect", "own_models:toy", "--report", "a.html")
    assert result.exit_code == 3
    assert "The equations of 1 of 2 sublayers do not close" in result.stderr
    assert "Does not hold: " in read_page(folder)


def test_report_without_stream_is_not_written(folder):
    assert_one_sentence(run("inspect", "own_models:none", "--report", "a.html"), 3, "has no residual stream")
    assert not (folder / "a.html").exists()
