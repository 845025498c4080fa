"""Tests of `addnorm inspect --report`: the page, and errors before the model runs."""

import sys

import pytest
from click.testing import CliRunner

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from addnorm.cli import inspect
from addnorm_cli.group import addnorm as main
from support.report_pages import check_page

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
def folder(tmp_path, monkeypatch, threads):
    threads(1)
    (tmp_path / "report_models.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("report_models", None)


def run(*arguments):
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)], env={"COLUMNS": "100"}, catch_exceptions=False)


def test_report_is_written(folder):
    result = run("report_models:toy", "--seed", 3, "--report", "new/a.html")
    assert (result.exit_code, result.stderr) == (0, "Written: new/a.html\n")
    assert "x' = x + f(x)" in result.stdout
    page = check_page((folder / "new" / "a.html").read_text(encoding="utf-8"))
    assert [element["text"] for element in page.all("h1")] == ["report_models:toy"]
    assert len(page.all("figure")) == 5
    facts = [element["text"] for element in page.all("dd")]
    assert "addnorm inspect report_models:toy --report new/a.html --seed 3" in facts
    assert any("The loss needs no labels" in fact for fact in facts)


@pytest.mark.parametrize("name", ["frozen", "detached"])
def test_report_without_gradients(folder, name):
    result = run(f"report_models:{name}", "--report", "a.html", "--json")
    assert result.exit_code == 0
    assert result.stdout.startswith("{")
    text = (folder / "a.html").read_text(encoding="utf-8")
    check_page(text)
    assert "none: forward only" in text
    assert "gradient of the loss" not in text


def test_report_float64_and_train(folder):
    result = run("report_models:toy", "--float64", "--train", "--report", "a.html")
    assert result.exit_code == 0
    text = (folder / "a.html").read_text(encoding="utf-8")
    assert "--float64 --report a.html --train" in text
    assert "training" in text


def test_report_of_failed_proof(folder, monkeypatch):
    inspected = inspect.inspect_model

    def broken(*arguments):
        inspection = inspected(*arguments)
        inspection.sites[0].closes, inspection.sites[0].closure = False, 0.5
        return inspection

    monkeypatch.setattr("addnorm.cli.inspect.inspect_model", broken)
    result = run("report_models:toy", "--report", "a.html")
    assert result.exit_code == 3
    assert "1 of 3 sublayers does not close" in result.stderr
    assert "Does not hold: " in (folder / "a.html").read_text(encoding="utf-8")


def test_report_without_stream(folder):
    result = run("report_models:none", "--report", "a.html")
    assert result.exit_code == 3
    assert "has no residual stream" in result.stderr
    assert not (folder / "a.html").exists()


def test_report_names_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr("addnorm.cli.inspect.load_model", lambda *_: pytest.fail("it ran"))
    result = run("report_models:toy", "--report", "a.html")
    assert result.exit_code == 2
    assert "jinja2 is not installed" in result.stderr
    assert "pip install 'addnorm[plot]'" in result.stderr
