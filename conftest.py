"""The names that the examples in the docstrings use."""

import pytest
import torch

import addnorm


@pytest.fixture(autouse=True)
def names(doctest_namespace: dict[str, object]) -> None:
    """`torch` and `addnorm`, without an import in every example."""
    doctest_namespace.update(torch=torch, addnorm=addnorm)
