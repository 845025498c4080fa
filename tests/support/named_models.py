"""What the tests of models behind names share: no network, a model's run, the sentence of a refusal, a directory."""

import socket

import pytest
import torch

from addnorm.stream.models.load import Refused, load, quiet


def run(loaded):
    with torch.no_grad(), quiet():
        return loaded.model(*loaded.args, **loaded.kwargs)


def sentence(*arguments, **options):
    """The one sentence with which `load` refuses."""
    with pytest.raises(Refused) as caught:
        load(*map(str, arguments), **options)
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
    assert len(text) < 700
    return text


def no_network(monkeypatch):
    """A test that tries to connect fails."""

    def refuse(*arguments, **options):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def saved_in(folder):
    """The folder, as `save_pretrained` writes it: a small BERT."""
    with quiet():
        load("bert").model.save_pretrained(folder)
    return folder
