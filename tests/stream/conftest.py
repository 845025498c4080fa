"""Fixtures of the models and inputs that the tests of `record` and `ablate` share."""

import pytest

from support.instrumented_model import token_ids
from support.scaled_model import Model


@pytest.fixture
def ids():
    return token_ids()


@pytest.fixture(params=[False, True], ids=["pre-LN", "post-LN"])
def model(request):
    return Model(request.param)
