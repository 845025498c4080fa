"""Fixture that resets the compiler's state after each test."""

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
