"""Names for the examples in docstrings, and bytecode files for all tests."""

import os
import sys

import pytest
import torch

import addnorm

# Without bytecode files every process of a run would compile the package and rewrite all tests again, a third of its start-up.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(autouse=True)
def names(doctest_namespace: dict[str, object]) -> None:
    """Add `torch` and `addnorm`, so that no example imports them."""
    doctest_namespace.update(torch=torch, addnorm=addnorm)
