"""Helpers for tests of the commands that take a model: a folder with factories, a command's run, its JSON, its error."""

import json
import re
import sys
from contextlib import contextmanager

from click.testing import CliRunner

from addnorm_cli.group import addnorm as main

TEXTS = "Norms keep the scale.\n\nThe stream carries everything, and every sublayer adds a little.\nShort.\n"

# Factories of models, as in a user's module.
FACTORIES = """
from types import SimpleNamespace
import torch
from torch import nn

class Toy(nn.Module):
    def __init__(self, bad=False, own_loss=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.bad, self.own_loss = bad, own_loss

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return SimpleNamespace(loss=x.square().mean(), logits=x) if self.own_loss else x

def toy():
    return Toy(), (torch.randn(2, 3, 8),)

def with_loss():
    return Toy(own_loss=True), (torch.randn(2, 3, 8),)

def frozen():
    model, args = toy()
    return model.requires_grad_(False), args

def none():
    return nn.Linear(8, 8), (torch.randn(2, 3, 8),)

def wrong():
    return Toy(), (torch.randn(2, 3, 9),)

"""


@contextmanager
def user_folder(folder, monkeypatch):
    """Change into a folder with factories of models and a text file."""
    (folder / "own_models.py").write_text(FACTORIES)
    (folder / "texts.txt").write_text(TEXTS)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("own_models", None)


def run(*arguments, **env):
    return CliRunner().invoke(main, [*map(str, arguments)], env={"COLUMNS": "100", **env}, catch_exceptions=False)


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def document(*arguments, code=0):
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout, parse_constant=refuse)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_one_sentence(result, code, *words):
    assert result.exit_code == code, result.output
    assert re.fullmatch(r"Error: .+\.\n", result.stderr), result.stderr
    for word in words:
        assert word in result.stderr
    assert "Usage" not in result.stderr
