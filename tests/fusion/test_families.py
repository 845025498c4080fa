"""Tests of fusing families of transformers and MiniLM: wherever `inspect` understands them, with the proof."""

import pytest
import torch
from torch.utils import _pytree as pytree

import addnorm
from addnorm.fusion.runs import named_tensors
from addnorm.stream.dataflow.arithmetic import strip_views
from support.equality import assert_same
from support.families import families
from support.fused_model import QUIET, fuse

pytestmark = QUIET
FAMILIES = families()
# Adds that may stay unfused: embeddings that broadcast over the batch, and the second of two norms that read one sum.
UNFUSED = ("its add broadcasts", "its sum is already fused with the norm in ")


def count_sums(inspection):
    """Return the number of the streams' states that a norm reads."""
    return sum(
        len({strip_views(norm.x) for norm in stream.norms()} & {add.out for add in stream.chain.adds})
        for stream in inspection.streams
    )


# By default few families whose norms differ, each in one dtype; `make test-all` runs all in both dtypes. test_pattern.py has
# every spelling of the add and of the norm, and the tests of `addnorm fuse` have llama and BERT.
LOW = {"gemma2"}
HIGH = {"torch Encoder post_ln"}
CASES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype)[6:]}", marks=() if name in chosen else pytest.mark.slow)
    for name in FAMILIES
    for chosen, dtype in ((HIGH, torch.float32), (LOW, torch.bfloat16))
]


def outputs_of(model, args, kwargs):
    with torch.no_grad():
        return named_tensors(model(*args, **kwargs))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_family_is_fused_and_proven(name, dtype):
    model, args, kwargs = FAMILIES[name].build()
    model.to(dtype)
    cast = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
    args, kwargs = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
    expected = count_sums(addnorm.inspect(model, *args, **kwargs))
    before = outputs_of(model, args, kwargs)
    fusion = fuse(model, *args, **kwargs)
    assert len(fusion.fused) >= expected > 0
    assert all(boundary.reason.startswith(UNFUSED) for boundary in fusion.unfused)
    assert fusion.proof.holds
    assert fusion.proof.oracle == "float64"
    assert fusion.proof.gradients
    after = outputs_of(addnorm.unfuse(model), args, kwargs)
    assert_same(after, before)
