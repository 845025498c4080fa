"""Fixtures of the tests of the command line."""

import importlib
import sys

import pytest

from support.commands import FACTORIES, TEXTS

LONG = 1e4  # seconds


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Announce no steps: on a busy machine any step may take so long that a command says what it does."""
    for module, name in (("cli._output", "PATIENCE"), ("lab.compare", "FIRST_LINE")):
        monkeypatch.setattr(importlib.import_module(f"addnorm.{module}"), name, LONG)
    monkeypatch.setattr("addnorm_cli.command.PATIENCE", LONG)


@pytest.fixture
def folder(tmp_path, monkeypatch, one_thread):
    """Run in a temporary folder with a user's module of models and a text, on one thread since the models are small."""
    (tmp_path / "own_models.py").write_text(FACTORIES)
    (tmp_path / "texts.txt").write_text(TEXTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("own_models", None)
