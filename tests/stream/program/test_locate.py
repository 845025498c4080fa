"""Tests of `locate` on several streams: states, single streams, reads and writes, in other layouts and dtypes."""

import pytest

import addnorm
from support.expansion import record_mhc


@pytest.fixture(scope="module", params=["first", "tuple", "flat"])
def run(request):
    run = record_mhc(request.param)
    return addnorm.inspect(run.model, run.x), run


def test_whole_state_is_named_in_every_layout(run):
    found, run = run
    state, (_, before, after, _) = run.states[2], found.program.sites
    flat = [state.flatten(-2).transpose(0, 1)] if run.model.form == "flat" else []
    for same in (state, state.movedim(-2, 0), state.bfloat16(), *flat):
        location = addnorm.locate(found, same)
        assert location.found
        assert location.name == f"the 4 streams after {before.id}, not collapsed"
    location = addnorm.locate(found, state[..., 2, :].transpose(0, 1))
    assert location.name == f"stream 3 of 4 after {before.id}"
    assert "in another order" in location.tokens
    read = (run.sites[2].c[..., None] * state).sum(-2)
    assert addnorm.locate(found, read).name == f"what {after.id} reads, before its norm"
