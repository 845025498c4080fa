"""Tests of README and docs: Python examples run, links resolve, and public names are documented."""

import json
import re

import pytest

import addnorm
from addnorm.fusion import benchmark
from support.commands import run
from support.loading import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SKILL.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(path for path in ROOT.glob("*/README.md") if path.parent.name not in ("docs", "hub")),
]


IDS = [str(path.relative_to(ROOT)) for path in PAGES]


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_examples_of_a_page_run(path, monkeypatch, threads):
    """Run the examples on one thread, with short measurements and without drawings, which have tests of their own."""
    threads(1)
    monkeypatch.setattr(benchmark, "SECONDS", 0.0)
    monkeypatch.setattr(benchmark, "SHARE_SECONDS", 0.0)
    namespace: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        if path == ROOT / "README.md":  # each of its blocks runs when it is pasted alone
            namespace = {}
        exec(compile(block, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_examples_train_on_a_loss_that_learns(path):
    """The mean square of a norm's output is constant: below that norm its gradient is round-off."""
    assert "(x).square().mean()" not in path.read_text()


def test_every_benchmark_is_in_the_list_of_benchmarks():
    text = (ROOT / "benchmarks/README.md").read_text()
    assert [path.name for path in ROOT.glob("benchmarks/bench_*.py") if f"| `{path.name}`" not in text] == []


def test_every_page_is_in_the_list_of_pages():
    text = (ROOT / "docs/README.md").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "README.md" or f"]({path.name})" in text, path.name


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links_of_a_page_lead_to_files(path):
    for target in re.findall(r"(?:\]\(|src=\"|srcset=\")(?!https?:)([^)#\"]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}, which is not there"
    assert re.findall(r"\[([\w/]+\.md)\]\(", path.read_text()) == [], "a link's text is the title of its page"


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
    text = (ROOT / "CHANGELOG.md").read_text() + (ROOT / "README.md").read_text()
    for name in addnorm.__all__:
        assert getattr(addnorm, name).__doc__, name
        assert name in text or name == "Backend", name


COMMANDS = re.findall(r"^addnorm (.+)$", (ROOT / "SKILL.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_skill_succeed(command, threads):
    threads(1)
    result = run(*command.split())
    assert result.exit_code == 0, result.stderr
    if command.endswith("--json"):
        assert json.loads(result.stdout).keys() >= {"wiring", "closes", "unknown"}
