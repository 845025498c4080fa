"""Tests of the names of a model's outputs; the proofs of test_proof.py depend on the same gradients in each call."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from addnorm.fusion.runs import named_tensors

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
CYCLE = {"x": X}
CYCLE["self"] = CYCLE


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (X, ["output"]),
        ([X, (X, None, X)], ["[0]", "[1].0", "[1].2"]),
        ({"logits": X, "states": (X, X)}, ["logits", "states.0", "states.1"]),
        ({"cache": SimpleNamespace(layers=[SimpleNamespace(keys=X)])}, ["cache.layers.0.keys"]),
        ((None, 3, "word", nn.Linear(2, 2)), []),
        (CYCLE, ["x"]),
    ],
)
def test_named_tensors_names_the_place(result, names):
    assert [*named_tensors(result)] == names
