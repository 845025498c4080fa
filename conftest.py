"""Names for the examples in docstrings."""

import pytest
import torch

import addnorm


@pytest.fixture(autouse=True)
def names(doctest_namespace: dict[str, object]) -> None:
    """Add `torch` and `addnorm`, so that no example imports them."""
    doctest_namespace.update(torch=torch, addnorm=addnorm)
