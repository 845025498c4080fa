"""docs/_build/page.py: sections are put between their comments, whole or not at all."""

import pytest

from support.loading import load

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


def test_sections_are_replaced_and_the_prose_is_left_alone(script, page):
    assert script.main([], page, SECTIONS, "the sections say") == 0
    assert page.read_text() == NEW
    assert script.main(["--check"], page, SECTIONS, "the sections say") == 0


def test_a_check_changes_nothing_and_tells_what_to_run(script, page, capsys):
    assert script.main(["--check"], page, SECTIONS, "the sections say") == 1
    assert capsys.readouterr().out == "some.md is not what the sections say: run docs/_build/some.py\n"
    assert page.read_text() == OLD


def test_another_word_is_refused_and_not_taken_for_an_order_to_write(script, page):
    with pytest.raises(SystemExit, match="called with --chek, expected nothing or --check"):
        script.main(["--chek"], page, SECTIONS, "the sections say")
    assert page.read_text() == OLD


def test_a_section_that_cannot_be_made_leaves_the_page_as_it_was(script, page):
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
def test_a_section_without_its_place_is_refused(script, page, text):
    page.write_text(text)
    with pytest.raises(SystemExit, match=r"some\.md needs one <!-- a:two --> and one <!-- /a:two -->"):
        script.main([], page, SECTIONS, "the sections say")
    assert page.read_text() == text


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(script, page):
    with pytest.raises(UnicodeEncodeError):
        script.write(page, "half \ud800")
    assert page.read_text() == OLD
    assert [path.name for path in page.parent.iterdir()] == ["some.md"]


def test_a_bar_in_a_cell_does_not_end_it(script):
    assert script.cell("|x|") == r"\|x\|"
    assert script.table(["a", "b"], [["1", "2"]]) == "| a | b |\n| :-- | :-- |\n| 1 | 2 |"
