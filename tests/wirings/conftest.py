"""One thread for the tests of wirings: small matrices need no second one."""

import pytest


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)
