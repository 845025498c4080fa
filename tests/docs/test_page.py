"""Tests of docs/_build/page.py: sections are written between their comments, and every generated page is up to date."""

import pytest

from addnorm.stream.record.schema import ROLES, STATISTICS
from support.loading import ROOT, load

OLD = "# Title\n<!-- a:one -->\nold\n<!-- /a:one -->\nprose\n<!-- a:two -->\n<!-- /a:two -->\n"
NEW = "# Title\n<!-- a:one -->\n1\n<!-- /a:one -->\nprose\n<!-- a:two -->\n2\n<!-- /a:two -->\n"
SECTIONS = {"a:one": lambda: "1", "a:two": lambda: "2"}


@pytest.fixture
def script():
    return load("docs/_build/page.py")


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "some.md"
    path.write_text(OLD)
    return path


@pytest.mark.parametrize("name", ["add_norm", "api", "comparing", "explorer", "readme", "streams", "wirings"])
def test_page_is_up_to_date(name):
    assert load(f"docs/_build/{name}.py").main(["--check"]) == 0, f"run docs/_build/{name}.py"


def test_sections_are_replaced_and_prose_is_kept(script, page):
    assert script.main([], page, SECTIONS, "the sections say") == 0
    assert page.read_text() == NEW
    assert script.main(["--check"], page, SECTIONS, "the sections say") == 0


def test_check_changes_nothing_and_names_the_script(script, page, capsys):
    assert script.main(["--check"], page, SECTIONS, "the sections say") == 1
    assert capsys.readouterr().out == "some.md is not what the sections say: run docs/_build/some.py\n"
    assert page.read_text() == OLD


def test_unknown_argument_is_refused(script, page):
    with pytest.raises(SystemExit, match="called with --chek, expected nothing or --check"):
        script.main(["--chek"], page, SECTIONS, "the sections say")
    assert page.read_text() == OLD


def test_failing_section_leaves_the_page(script, page):
    with pytest.raises(ZeroDivisionError):
        script.main([], page, {**SECTIONS, "a:two": lambda: str(1 / 0)}, "the sections say")
    assert page.read_text() == OLD


@pytest.mark.parametrize(
    "text",
    [
        OLD.replace("<!-- a:two -->", ""),
        OLD.replace("<!-- /a:two -->", ""),
        OLD + "<!-- a:two -->",
        OLD.replace("<!-- a:two -->\n<!-- /a:two -->", "<!-- /a:two -->\n<!-- a:two -->"),
    ],
    ids=["no begin", "no end", "two begins", "the wrong way round"],
)
def test_section_without_its_comments_is_refused(script, page, text):
    page.write_text(text)
    with pytest.raises(SystemExit, match=r"some\.md needs one <!-- a:two --> and one <!-- /a:two -->"):
        script.main([], page, SECTIONS, "the sections say")
    assert page.read_text() == text


def test_bar_in_a_cell_is_escaped(script):
    assert script.table(["a", "b"], [["|x|", "2"]]) == "| a | b |\n| :-- | :-- |\n| \\|x\\| | 2 |"


def test_streams_names_every_role_and_statistic():
    text = (ROOT / "docs/streams.md").read_text()
    for name in (*ROLES, *(one.name for one in STATISTICS)):
        assert f"`{name}`" in text
