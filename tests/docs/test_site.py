"""Tests of docs/_build/site.py: the pages of the site, the links between them, and the explorer in it."""

import re

import pytest

from support.commands import run
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
    pictures = re.findall(r'src(?:set)?="([^"]+)"', pages["index.md"])
    assert len(pictures) == 4
    assert all((tmp_path / "pages" / "extra" / address).is_file() for address in pictures)
    assert len(local) > 100
    assert not [name for name, text in pages.items() if "$$" in text], "the site shows no LaTeX"


def test_site_has_the_explorer_and_links_to_it(site, tmp_path, monkeypatch):
    from addnorm.explorer import export, stack

    monkeypatch.setattr(export, "GRIDS", {"stack": export.Grid(stack, {"sublayers": (2,)}, ())})
    commands = []
    monkeypatch.setattr(site.subprocess, "run", lambda command, check: commands.append(run(*command[3:]).exit_code))
    site.main(tmp_path / "pages")
    site.export_explorer(tmp_path / "pages")
    assert commands == [0, 0]
    settings = {}
    exec((tmp_path / "pages" / "conf.py").read_text(), settings)
    (folder,) = settings["html_extra_path"]
    for page in ("index.md", "explorer.md"):
        (address,) = re.findall(r'<a href="([^"]+)">Move the LayerNorm', (tmp_path / "pages" / page).read_text())
        assert (tmp_path / "pages" / folder / address).is_file()
    assert "minilm.json" in (tmp_path / "pages" / folder / "explore" / "data" / "meta.js").read_text()
