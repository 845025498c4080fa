"""Fixture of the tests of loading models: no test may use the network."""

import socket

import pytest


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Make every connection fail the test."""

    def refuse(*arguments, **options):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
