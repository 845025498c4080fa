"""Tests of README and docs: Python examples run, links resolve, and public names are documented."""

import re
from pathlib import Path

import pytest

import addnorm

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *ROOT.glob("*/README.md")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_of_a_page_runs(path):
    namespace: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        exec(compile(block, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files(path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}, which is not there"


def test_paths_of_the_architecture_page_exist():
    tree = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    folders: list[str] = []
    for line in tree.splitlines()[1:]:
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        path = "/".join([*folders[:depth], name.rstrip("/")])
        assert (ROOT / path).exists(), f"docs/architecture.md names {path}, which is not there"
        folders = [*folders[:depth], name.rstrip("/")]


def test_public_names_have_docstrings_and_changelog_entries():
    told = (ROOT / "CHANGELOG.md").read_text() + (ROOT / "README.md").read_text()
    for name in addnorm.__all__:
        assert getattr(addnorm, name).__doc__, name
        assert name in told or name == "Backend", name
