"""Settings for the tests of the command line."""

import importlib

import pytest

LONG = 1e4  # seconds


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Announce no steps: on a busy machine any step may take so long that a command says what it does."""
    for module, name in (("cli._output", "PATIENCE"), ("lab.compare", "FIRST_LINE")):
        monkeypatch.setattr(importlib.import_module(f"addnorm.{module}"), name, LONG)
    monkeypatch.setattr("addnorm_cli.command.PATIENCE", LONG)
