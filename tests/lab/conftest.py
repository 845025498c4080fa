"""Fixtures of the lab's tests: one thread, as the lab trains."""

import pytest


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)
