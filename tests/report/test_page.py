"""Tests of `addnorm.report.page`: self-contained HTML, escaping, atomic writing."""

import math
import sys

import pytest

from addnorm.report import Facts, Figure, Finding, Findings, Formula, Page, Section, Table, check_path, render, write
from support.report_pages import check_page, tables

SVG = '<svg class="chart" viewBox="0 0 1 1" role="img" aria-label="x"></svg>'
EVIL = "<script>alert('&\"')</script>"


def page(text="text", rows=(("a", 1.5), ("b", math.nan))):
    table = Table(["site", text], rows, caption=text)
    blocks = [
        Figure(text, text, SVG, table, SVG), table, Table(["a"], [[text]], caption=text, collapsed=True),
        Findings([Finding(text), Finding(text, "proved"), Finding(text, "refuted")]), Formula([text, "b"], text),
        Facts({text: text}),
    ]  # fmt: skip
    return Page(
        text,
        text,
        [Finding(text, "proved")],
        [Section(text, text, blocks), Section("Two", "", [])],
        {text: text},
        [text],
    )


def test_page_is_self_contained_html():
    document = check_page(render(page()))
    assert [element["text"] for element in document.all("h2")] == ["text", "Two"]
    assert [element["href"] for element in document.all("a")] == ["#section-1", "#section-2"]
    assert len(document.all("details")) == 2
    assert tables(document)[0] == [["site", "text"], ["a", 1.5], ["b", pytest.approx(math.nan, nan_ok=True)]]


def test_render_escapes_all_texts():
    text = render(page(EVIL))
    document = check_page(text)
    assert "alert" in text
    assert "<script" not in text
    assert {element["text"] for element in document.all("h3")} == {EVIL}
    assert EVIL in [element["text"] for element in document.all("dd")]
    assert document.all("title")[0]["text"] == EVIL


def test_proofs_do_not_depend_on_colour():
    text = render(page())
    for words in ("✓", "✗", "Holds: ", "Does not hold: "):
        assert words in text


def test_page_without_verdict_tiles_and_footer():
    document = check_page(render(Page("t", "s", [], [])))
    assert not document.all("footer")


def test_number_columns_keep_all_digits():
    document = check_page(
        render(Page("t", "s", [], [Section("a", "", [Table(["n", "x", "y"], [["a", 1 / 3, 2], ["b", None, 3]])])]))
    )
    cells = [element for element in document.elements if element["tag"] in ("th", "td")]
    assert [cell.get("class") for cell in cells] == [None, "number", "number"] * 3
    (value,) = document.all("data")
    assert (value["value"], value["text"]) == (repr(1 / 3), "0.3333")


# Writing.


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("a.txt", ValueError, "expected a file that ends in .html"),
        ("folder.html", OSError, "a directory, expected the file"),
    ],
)
def test_write_refuses_bad_paths(tmp_path, name, error, words):
    (tmp_path / "folder.html").mkdir()
    for refuse in (check_path, lambda path: write(page(), path)):
        with pytest.raises(error, match=words) as refused:
            refuse(tmp_path / name)
        assert str(refused.value).startswith("path is ")


def test_write_refuses_other_objects(tmp_path):
    with pytest.raises(TypeError, match="page is str, expected a Page, as build_model_page"):
        write("text", tmp_path / "a.html")
    assert not list(tmp_path.iterdir())


def test_missing_jinja2_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(
        ImportError, match=r"jinja2 is not installed, and is needed to write a report: pip install 'addnorm\[plot\]'"
    ):
        render(page())
