"""Every family of transformers of families.py is fused at every boundary that `inspect` understands, and differs by no more than
twice what eager is off from float64: outputs and the gradient of every parameter, in float32 and in bfloat16.
"""

import pytest
import torch

import addnorm
from addnorm.stream.find.ops import up
from families import families

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
FAMILIES = families()
# What may be left: embeddings that broadcast over the batch, and the second of two norms that read one sum.
LEFT = ("its add broadcasts", "its sum is fused with the norm in ")


def cast(given, dtype):
    """The floating-point tensors of the inputs in a dtype."""
    return {
        name: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for name, t in given.items()
    }


def sums(found):
    """The states of the streams that a norm reads."""
    return sum(len({up(norm.x) for norm in one.norms()} & {add.out for add in one.found.adds}) for one in found.streams)


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()  # what a family left is not kept for the next


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_fused_wherever_it_is_understood_and_proven(name, dtype):
    model, args, kwargs = FAMILIES[name].build()
    model = model.to(dtype)
    args = tuple(cast(dict(enumerate(args)), dtype).values())
    kwargs = cast(kwargs, dtype)
    expected = sums(addnorm.inspect(model, *args, **kwargs))
    done = addnorm.fuse(model, *args, timed=False, **kwargs)
    assert len(done.fused) >= expected > 0
    assert all(one.reason.startswith(LEFT) for one in done.left)
    assert done.proof.holds
    assert done.proof.oracle == "float64"
    assert done.proof.gradients
    with torch.no_grad():
        model(*args, **kwargs)
    addnorm.unfuse(model)
