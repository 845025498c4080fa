"""Tests of README and docs: Python examples run, and links resolve."""

import gc
import json
import re

import pytest

from addnorm.fusion import benchmark
from support.commands import succeed
from support.loading import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SKILL.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(path for path in ROOT.glob("*/README.md") if path.parent.name not in ("docs", "hub")),
]


IDS = [str(path.relative_to(ROOT)) for path in PAGES]
PRINTED = ("add_norm", "wirings")  # pages whose comments beside print() are the output


@pytest.fixture
def short_measurements(monkeypatch, one_thread):
    """Measure on one thread, a single call, without a garbage collection before it."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    monkeypatch.setattr(benchmark, "MAX_SECONDS", 0.0)
    monkeypatch.setattr(benchmark, "SHARE_SECONDS", 0.0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_examples_of_a_page_run(path, short_measurements, capsys):
    """Run the examples; compare what they print with their comments."""
    namespace = {}
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    for block in blocks:
        if path == ROOT / "README.md":  # each of its blocks runs when it is pasted alone
            namespace = {}
        exec(compile(block, str(path), "exec"), namespace)
    if path.stem in PRINTED:
        comments = re.findall(r"^print\(.*\)  # (.*)$", "\n".join(blocks), re.M)
        assert len(comments) >= 5
        assert {*comments} <= {*capsys.readouterr().out.splitlines()}


def test_every_benchmark_is_in_the_list_of_benchmarks():
    text = (ROOT / "benchmarks/README.md").read_text()
    assert [path.name for path in ROOT.glob("benchmarks/bench_*.py") if f"| `{path.name}`" not in text] == []


def test_every_page_is_in_the_list_of_pages():
    text = (ROOT / "docs/README.md").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "README.md" or f"]({path.name})" in text, path.name


def list_anchors(path):
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links_of_a_page_lead_to_files_and_headings(path):
    for target, anchor in re.findall(r"(?:\]\(|src=\"|srcset=\")(?!https?:)([^)#\"]*)#?([\w-]*)", path.read_text()):
        place = path.parent / target if target else path
        assert place.exists(), f"{path.name} links to {target}, which is not there"
        assert not anchor or anchor in list_anchors(place), (
            f"{path.name} links to {target}#{anchor}, which is not there"
        )
    assert all(len(words) > 60 for words in re.findall(r"!\[([^\]]*)\]\(figures", path.read_text())), (
        "for those who do not see it"
    )
    assert re.findall(r"\[([\w/]+\.md)\]\(", path.read_text()) == [], "a link's text is the title of its page"


def test_paths_of_the_architecture_page_exist():
    tree = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    folders = []
    for line in tree.splitlines()[1:]:
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        path = "/".join([*folders[:depth], name.rstrip("/")])
        assert (ROOT / path).exists(), f"docs/architecture.md names {path}, which is not there"
        folders = [*folders[:depth], name.rstrip("/")]


COMMANDS = re.findall(r"^addnorm (.+)$", (ROOT / "SKILL.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_skill_succeed(command, short_measurements):
    result = succeed(*command.split())
    if command.endswith("--json"):
        assert json.loads(result.stdout).keys() >= {"wiring", "closes", "unknown"}
