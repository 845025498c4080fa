"""Tests of `locate` on several streams: states, single streams, reads and writes, in other layouts and dtypes."""

import pytest
import torch

import addnorm
from support.several_streams import D, HandMhc


@pytest.fixture(scope="module", params=["first", "tuple"])
def run(request):
    torch.manual_seed(1)
    model, x = HandMhc(request.param).eval(), torch.randn(2, 5, D)
    return addnorm.inspect(model, x), model, x


def test_whole_state_is_named_in_every_layout(run):
    found, model, x = run
    states = []
    model.layers[1][0].norm.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    kept = model.write
    model.write = lambda *args: states.append(out := kept(*args)) or out
    with torch.no_grad():
        model(x)
    del model.write
    written = [model.stack(state) for state in states if not torch.is_tensor(state) or state.dim() == 4]
    for state in (written[1], written[1].movedim(-2, 0), written[1].bfloat16()):
        location = addnorm.locate(found, state)
        assert location.found
        assert location.name == f"the 4 streams after {found.program.sites[1].id}, not collapsed"
    location = addnorm.locate(found, written[1][..., 2, :].transpose(0, 1))
    assert location.name == f"stream 3 of 4 after {found.program.sites[1].id}"
    assert "in another order" in location.tokens
    (read,) = [state for state in states if torch.is_tensor(state) and state.shape == x.shape]
    assert addnorm.locate(found, read).name == f"what {found.program.sites[2].id} reads, before its norm"


def test_streams_in_one_dimension_are_named():
    torch.manual_seed(1)
    model, states = HandMhc("flat").eval(), []
    write = model.write
    model.write = lambda *args: states.append(out := write(*args)) or out
    found = addnorm.inspect(model, x := torch.randn(2, 5, D))
    states.clear()
    model(x)
    location = addnorm.locate(found, states[1].transpose(0, 1).detach())
    assert location.name == f"the 4 streams after {found.program.sites[1].id}, not collapsed"


def test_random_tensors_have_no_name(run):
    found, _, x = run
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        other = torch.randn(x.shape, generator=generator)
        assert not addnorm.locate(found, other).found
