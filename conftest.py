"""Names for the examples in docstrings."""

import pytest
import torch

import addnorm
import addnorm.lab  # before pytest imports its files one by one: `addnorm.lab.compare` is a function, and a file


@pytest.fixture(autouse=True)
def names(doctest_namespace: dict[str, object]) -> None:
    """Add `torch` and `addnorm`, so that no example imports them."""
    doctest_namespace.update(torch=torch, addnorm=addnorm)
