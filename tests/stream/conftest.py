"""Fixtures of the inputs of the models that the tests of `record` and `ablate` share."""

import pytest

from support.instrumented_model import token_ids
from support.scaled_model import make_stream


@pytest.fixture
def ids():
    return token_ids()


@pytest.fixture
def x():
    return make_stream()
