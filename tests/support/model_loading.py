"""Helpers for tests of `load`: a model's run, the message of an error, a saved directory."""

import pytest
import torch

from addnorm.stream.models.hf import ModelLoadError, quiet
from addnorm.stream.models.load import load


def run(loaded):
    """Return the model's output for its inputs."""
    with torch.no_grad(), quiet():
        return loaded.model(*loaded.args, **loaded.kwargs)


def sentence(*arguments, **options):
    """Return the message of the error that `load` raises: one sentence."""
    with pytest.raises(ModelLoadError) as caught:
        load(*map(str, arguments), **options)
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
    assert len(text) < 700
    return text


def saved_in(folder):
    """Save a small BERT with `save_pretrained` and return the folder."""
    with quiet():
        load("bert").model.save_pretrained(folder)
    return folder
