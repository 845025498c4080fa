"""docs/streams.md: what it says of the statistics is what docs/_build/streams.py makes of their table."""

from pathlib import Path

import pytest

from addnorm.stream.record.schema import ROLES, STATISTICS
from support.loading import load

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script, with a copy of the page that may be changed."""
    module = load("docs/_build/streams.py")
    copy = tmp_path / "streams.md"
    copy.write_text((DOCS / "streams.md").read_text())
    monkeypatch.setattr(module, "PAGE", copy)
    return module


def test_the_page_is_what_the_table_says(script):
    assert script.main(["--check"]) == 0


def test_a_page_that_is_not_is_told_and_mended(script, capsys):
    script.PAGE.write_text(script.PAGE.read_text().replace("root mean square", "sum"))
    assert script.main(["--check"]) == 1
    assert "run docs/_build/streams.py" in capsys.readouterr().out
    assert script.main([]) == 0
    assert script.PAGE.read_text() == (DOCS / "streams.md").read_text()


def test_a_page_without_the_comments_is_refused(script):
    script.PAGE.write_text("nothing")
    with pytest.raises(SystemExit, match="needs one"):
        script.main([])


def test_every_role_and_statistic_is_told():
    page = (DOCS / "streams.md").read_text()
    for name in (*ROLES, *(one.name for one in STATISTICS)):
        assert f"`{name}`" in page
