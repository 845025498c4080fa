"""Fixtures of the tests of modules: one thread, since small matrices need no second one, and an input of stacks."""

import pytest
import torch

from support.stacks import D


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


@pytest.fixture
def x():
    """Return an input of `stack_of`."""
    return torch.randn(3, 4, D)
