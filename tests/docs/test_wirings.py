"""Tests of docs/wirings.md: its text on each wiring is what docs/_build/wirings.py generates."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from addnorm import wirings
from addnorm.wirings.catalog import CONSTRUCTORS, NOT_OFFERED
from support.loading import load

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture
def script():
    return load("docs/_build/wirings.py")


@pytest.fixture
def page(script, tmp_path, monkeypatch):
    """Return a copy of the page, which tests may change."""
    copy = tmp_path / "wirings.md"
    copy.write_text((DOCS / "wirings.md").read_text())
    monkeypatch.setattr(script, "PAGE", copy)
    return copy


def test_the_page_is_what_the_wirings_say(script):
    assert script.main(["--check"]) == 0, "run docs/_build/wirings.py"


def test_a_stale_page_is_found_and_made_anew(script, page, capsys):
    good = page.read_text()
    page.write_text(good.replace("x' = N(α x + f(x))", "x' = N(x + α f(x))"))
    stale = page.read_text()
    assert stale != good
    assert script.main(["--check"]) == 1
    assert capsys.readouterr().out == "wirings.md is not what the wirings say: run docs/_build/wirings.py\n"
    assert page.read_text() == stale
    assert script.main([]) == 0
    assert page.read_text() == good


def test_the_prose_around_is_left_alone(script, page):
    prose = page.read_text().replace("## Your own", "## My own")
    page.write_text(prose)
    assert script.main([]) == 0
    assert page.read_text() == prose


def test_a_page_without_a_place_is_an_error(script, page):
    page.write_text(page.read_text().replace("<!-- /wirings:each -->", ""))
    with pytest.raises(SystemExit, match=r"wirings\.md needs one <!-- wirings:each --> and one <!-- /wirings:each -->"):
        script.main([])


def test_the_page_has_every_wiring_and_what_is_missing():
    text = (DOCS / "wirings.md").read_text()
    assert re.findall(r"^### (\w+)$", text, re.M) == [*CONSTRUCTORS]
    for wiring in wirings.list_all():
        assert f"```\n{wiring.equation()}\n\n{wiring.draw()}\n```" in text
        assert f"| [{wiring.name}](#{wiring.name}) |" in text
    for name, why in NOT_OFFERED.items():
        assert f"- **{name}**: {why}." in text


def test_the_comments_beside_the_prints_are_what_is_printed():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "wirings.md").read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    told = re.findall(r"^print\(.*\)  # (.*)$", "\n".join(blocks), re.M)
    printed = StringIO()
    with redirect_stdout(printed):
        exec("\n".join(blocks), namespace)
    assert len(told) >= 5
    assert [line for line in told if line not in printed.getvalue().splitlines()] == []
