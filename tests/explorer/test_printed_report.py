"""Tests of reports on paper, in Chromium: A4 between its margins."""

import pytest

from addnorm.report import Page, Section, Table, render

WIDTH = 688  # pixels of 182 mm
WIDE = """width => [...document.querySelectorAll('table, dd')]
  .filter(one => one.scrollWidth > one.clientWidth || one.getBoundingClientRect().right > width).map(one => one.textContent)"""
LINES = "() => [...document.querySelectorAll('.tiles dd')].map(one => one.getClientRects().length && one.offsetHeight)"


@pytest.fixture
def page(context):
    page = context.new_page()
    yield page
    page.close()


def test_tables_and_tiles_fit_the_paper(page):
    columns = ["module", "layer", "kind", "equation", "norm, eps", "validation", "test by seed", "judged"]
    row = [
        "model.encoder.layer.11.attention.output",
        11,
        "feed-forward",
        "x' = N(x + f(N(x)))",
        "LayerNorm 1e-12",
        3.203,
        3.302,
        "yes",
    ]
    sections = [Section("Sublayers", "", [Table(columns, [row] * 3, caption="All settings")])]
    tiles = {"Wiring": "post_ln", "Sublayers": 12, "Width d": 384, "Norm": "LayerNorm", "Largest error": "6.8e-8"}
    page.set_content(render(Page("minilm", "A model.", [], sections, tiles, [])))
    page.set_viewport_size({"width": WIDTH, "height": 1000})
    page.emulate_media(media="print")
    assert page.evaluate(WIDE, WIDTH) == []
    assert len(set(page.evaluate(LINES))) == 1, "no tile is broken inside a word"
