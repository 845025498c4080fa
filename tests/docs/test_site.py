"""Tests of docs/_build/site.py: the pages of the site and the links between them."""

import re

import pytest

from support.loading import ROOT, load


@pytest.fixture(scope="module")
def site():
    return load("docs/_build/site.py")


def test_every_page_is_in_the_menu_once(site):
    listed = [path for group in site.MENU.values() for path in group if path.startswith("docs/")]
    assert sorted(listed) == sorted(
        f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"
    )


def test_links_lead_to_pages_figures_or_nowhere(site, tmp_path):
    site.main(tmp_path / "pages")
    pages = {path.name: path.read_text() for path in (tmp_path / "pages").glob("*.md")}
    links = [(name, *link) for name, text in pages.items() for link in re.findall(r"(!?)\[[^\]]*\]\(([^)#\s]+)", text)]
    local = [(mark, address) for _, mark, address in links if not address.startswith("http")]
    assert {address for mark, address in local if not mark} <= pages.keys()
    assert all((tmp_path / "pages" / address).is_file() for mark, address in local if mark)
    assert len(local) > 100
    assert (
        site.rewrite("[a](../setup.py), [b](claims.md#x)", "docs/zoo.md", {"docs/claims.md": "claims"})
        == "a, [b](claims.md#x)"
    )
    with pytest.raises(SystemExit, match=r"docs/zoo.md has a link to gone.md, which does not exist"):
        site.rewrite("[a](gone.md)", "docs/zoo.md", {})
