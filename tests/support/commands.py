"""Helpers for tests of the command line: a command's run, its JSON, its error, and a user's module with models."""

import json
import re
import signal

import pytest
from click.testing import CliRunner

from addnorm_cli.group import addnorm as main

TEXTS = "Norms keep the scale.\n\nThe stream carries everything, and every sublayer adds a little.\nShort.\n"

# Factories of models, as in a user's module.
FACTORIES = """
import warnings
from types import SimpleNamespace
import addnorm
import torch
from torch import nn

class Toy(nn.Module):
    def __init__(self, own_loss=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.own_loss = own_loss

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return SimpleNamespace(loss=x.square().mean(), logits=x) if self.own_loss else x

class Detached(Toy):
    def forward(self, x):
        return super().forward(x).detach()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        warnings.warn("a model that warns")
        return self.norm(x + self.linear(x))

class Liar(Block):
    def forward(self, x):
        y = super().forward(x)
        return 2 * y if torch.compiler.is_compiling() else y

class Broadcasting(Block):
    def forward(self, x):
        return self.norm(x + self.linear(x)[:1])

def factory(make):
    return lambda: (make(), (torch.randn(2, 3, 8),))

toy, detached, block, liar, broadcasting = map(factory, (Toy, Detached, Block, Liar, Broadcasting))
with_loss, none = factory(lambda: Toy(own_loss=True)), factory(lambda: nn.Linear(8, 8))
several = factory(lambda: addnorm.nn.Encoder(2, 8, nhead=2, wiring="mhc").eval())
frozen = factory(lambda: Toy().requires_grad_(False))
"""

each_end = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)


def run(*arguments, **env):
    """Return the result of a command; without a width in the environment its terminal has 100 columns."""
    return CliRunner().invoke(main, [*map(str, arguments)], env={"COLUMNS": "100", **env}, catch_exceptions=False)


def succeed(*arguments, **env):
    """Return the result of a command, which ends with 0."""
    result = run(*arguments, **env)
    assert result.exit_code == 0, result.output
    return result


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def document(*arguments, code=0):
    """Return the JSON that a command prints."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout, parse_constant=refuse)


def without_announcements(stderr):
    """Return what a process printed on stderr, without what it says of a slow import: a busy machine needs seconds for one."""
    return stderr.replace("Importing torch ...\n", "")


def assert_words(text, *words):
    """Check that a text has these words, wherever its lines break."""
    flowing = " ".join(text.split())
    for word in words:
        assert word in flowing


def assert_one_sentence(result, code, *words):
    """Check that a command ended with this exit code and one sentence on stderr that has these words."""
    assert result.exit_code == code, result.output
    assert re.fullmatch(r"Error: .+\.\n", result.stderr), result.stderr
    for word in words:
        assert word in result.stderr
