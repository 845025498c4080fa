"""Tests of `addnorm inspect --report`: the page, and errors before the model runs."""

import errno
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from addnorm.cli import inspect, main
from addnorm.report import Figure
from support.report_pages import check_page

SVG = '<svg viewBox="0 0 1 1" role="img" aria-label="x"></svg>'

FACTORIES = """
import torch
from torch import nn

class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x

def toy():
    return Toy(), (torch.randn(2, 3, 8),)

def frozen():
    return Toy().requires_grad_(False), (torch.randn(2, 3, 8),)

class Detached(Toy):
    def forward(self, x):
        return super().forward(x).detach()

def detached():
    return Detached(), (torch.randn(2, 3, 8),)

def none():
    return nn.Linear(8, 8), (torch.randn(2, 3, 8),)
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch, threads):
    threads(1)
    (tmp_path / "report_models.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("report_models", None)


@pytest.fixture
def quick(monkeypatch):
    """Replace the drawings, which other tests check, by nothing."""

    def drawn(name, draw, *, title, caption, table, height):
        return Figure(title, caption, SVG, table, SVG)

    monkeypatch.setattr("addnorm.report.model_figures.draw_figure", drawn)


def run(*arguments):
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)], env={"COLUMNS": "100"}, catch_exceptions=False)


def test_report_is_written(place):
    done = run("report_models:toy", "--seed", 3, "--report", "new/a.html")
    assert (done.exit_code, done.stderr) == (0, "Written: new/a.html\n")
    assert "x' = x + f(x)" in done.stdout
    page = check_page((place / "new" / "a.html").read_text(encoding="utf-8"))
    assert [one["text"] for one in page.all("h1")] == ["report_models:toy"]
    assert len(page.all("figure")) == 5
    facts = [one["text"] for one in page.all("dd")]
    assert "addnorm inspect report_models:toy --seed 3 --report new/a.html" in facts
    assert any("The loss needs no labels" in fact for fact in facts)


@pytest.mark.parametrize("name", ["frozen", "detached"])
def test_report_without_gradients(place, name, quick):
    done = run(f"report_models:{name}", "--report", "a.html", "--json")
    assert done.exit_code == 0
    assert done.stdout.startswith("{")
    text = (place / "a.html").read_text(encoding="utf-8")
    check_page(text)
    assert "none: forward only" in text
    assert "gradient of the loss" not in text


def test_report_float64_and_train(place, quick):
    done = run("report_models:toy", "--float64", "--train", "--report", "a.html")
    assert done.exit_code == 0
    text = (place / "a.html").read_text(encoding="utf-8")
    assert "--train --float64 --report a.html" in text
    assert "training" in text


def test_report_of_failed_proof(place, monkeypatch, quick):
    inspected = inspect.inspect_model

    def broken(*arguments):
        found = inspected(*arguments)
        found.sites[0].closes, found.sites[0].closure = False, 0.5
        return found

    monkeypatch.setattr("addnorm.cli.inspect.inspect_model", broken)
    done = run("report_models:toy", "--report", "a.html")
    assert done.exit_code == 3
    assert "1 of 3 sublayers do not close" in done.stderr
    assert "Does not hold: " in (place / "a.html").read_text(encoding="utf-8")


def test_report_without_stream(place):
    done = run("report_models:none", "--report", "a.html")
    assert done.exit_code == 3
    assert "has no residual stream" in done.stderr
    assert not (place / "a.html").exists()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a.txt", "--report is 'a.txt', expected a file that ends in .html"),
        ("report_models.py/a.html", "--report is 'report_models.py/a.html', which cannot be written ("),
        ("folder.html", "--report is 'folder.html', a directory"),
    ],
)
def test_report_rejects_bad_path(place, monkeypatch, path, words):
    (place / "folder.html").mkdir()
    monkeypatch.setattr("addnorm.cli.inspect.load_model", lambda *_: pytest.fail("it ran"))
    done = run("report_models:toy", "--report", path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: {words}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_report_names_missing_extra(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("addnorm.cli.inspect.load_model", lambda *_: pytest.fail("it ran"))
    done = run("report_models:toy", "--report", "a.html")
    assert done.exit_code == 2
    assert f"{package} is not installed" in done.stderr
    assert "pip install 'addnorm[plot]'" in done.stderr


def test_report_full_disk(place, monkeypatch, quick):
    def full(self, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    done = run("report_models:toy", "--report", "new/a.html")
    assert done.exit_code == 2
    assert (
        "--report is 'new/a.html', which cannot be written (No space left on device): choose another path."
        in done.stderr
    )
    assert [*(place / "new").iterdir()] == []
