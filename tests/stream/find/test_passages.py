"""Tests of the passages of a stream: features keep their place, masks are not computed from it, guards that bind are no row."""

import pytest
import torch
from torch.nn import functional as F

import addnorm
from addnorm import inspect
from addnorm.stream.find.passages import MOVED
from support.random_models.changes import GUARDS, MASKS, MOVES, written
from support.stream_steps import D, make_steps, noise

X = 2 * noise(2, 5, D)


def place(between=None, residual=None, write=None, branch=None, end=None):
    """Return a pre-LN forward with a function at one place."""

    def run(m, x):
        for k in range(4):
            f = m.branch(k, x)
            f = write(m.bare(f)) if write else branch(f) if branch else f
            x = (residual(x) if residual and k == 2 else x) + f
            x = between(x) if between and k == 1 else x
        return m.last(end(x) if end else x)

    return make_steps(run)


def check_refused(inspection):
    assert not inspection.closes
    assert not any(stream.wiring for stream in inspection.streams)


# A new stream begins after `unfold`, and the one before it may be named.
UNFOLD = {"unfold": lambda x: x.unfold(-1, 2, 2).transpose(-1, -2).flatten(-2)}


@pytest.mark.parametrize("change", (MOVES | UNFOLD).values(), ids=MOVES | UNFOLD)
def test_inspect_refuses_features_that_change_place(change):
    inspection = inspect(place(between=change), X)
    assert not inspection.closes
    assert inspection.streams[-1].wiring is None


@pytest.mark.parametrize("at", ["residual", "write", "end"])
def test_inspect_refuses_moved_features_at_all_places(at):
    inspection = inspect(place(**{at: MOVES["channel shuffle"]}), X)
    assert (inspection.wiring, inspection.closes) == ("unknown", False)
    assert {unknown.reason for unknown in inspection.unknown} == {MOVED}


# Functions after which each token has the features of one token, or is another token.
TOKENS = {
    "roll": lambda x: x.roll(1, 1),
    "shift": lambda x: F.pad(x, (0, 0, 1, -1)),
    "index": lambda x: x[:, [1, 0, 2]],
    "written": written(lambda y, x: y[:, 1:].copy_(x[:, :-1])),
    "zeroed": written(lambda y, x: y[:, 3:].zero_()),
    "transposed": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "split and joined": lambda x: torch.cat(x.split([2, 3], 1)[::-1], 1),
    "rounded": lambda x: x.bfloat16().float(),
}


@pytest.mark.parametrize("name", TOKENS)
def test_inspect_follows_tokens_that_change_place(name):
    inspection = inspect(place(between=TOKENS[name]), X)
    assert (inspection.wiring, inspection.closes, len(inspection.sites)) == ("pre_ln", True, 4)


@pytest.mark.parametrize("name", MASKS)
def test_inspect_refuses_masks_computed_from_stream(name):
    check_refused(inspect(place(between=MASKS[name]), X))


@pytest.mark.parametrize("mask", [
    lambda x: x * (torch.arange(5) < 3)[:, None], lambda x: x.masked_fill((torch.arange(5) < 2)[:, None], 0.0),
    lambda x: torch.where((torch.arange(5) < 3)[:, None], x, 0.0),
], ids=["product", "masked_fill", "where"])  # fmt: skip
def test_inspect_notes_constant_mask_of_tokens(mask):
    inspection = inspect(place(between=mask), X)
    assert (inspection.wiring, inspection.closes) == ("pre_ln", True)
    assert [site.notes for site in inspection.sites] == [(), ("the stream is masked by token",), (), ()]


def test_inspect_remarks_on_tokens_chosen_by_stream():
    inspection = inspect(place(between=lambda x: x.gather(1, x[..., :1].argsort(1).expand_as(x))), X)
    assert inspection.streams[0].remarks == (
        "its tokens are chosen or ordered by what is computed from the stream itself (gather)",
    )


def test_inspect_counts_mean_of_random_mask():
    torch.manual_seed(0)
    inspection = inspect(place(between=lambda x: x * (torch.rand(D) < 0.5)), X)
    assert [site.row.a for site in inspection.sites] == [1.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("name", GUARDS)
@pytest.mark.parametrize("at", ["between", "residual", "end", "write"])
def test_inspect_remarks_on_guards_that_do_not_bind(name, at):
    guard = GUARDS[name]
    idle = inspect(place(**{at: lambda x: guard(x, 99)}), X)
    assert (idle.wiring, idle.closes) == ("sandwich" if at == "write" else "pre_ln", True)
    places = ", at 4 places," if at == "write" else ""
    text = (
        f"{name.format(c=99)} on the stream{places} did not bind in this run: the equations hold only where it does not"
    )
    assert idle.streams[0].remarks == (text,)
    bound = inspect(place(**{at: lambda x: guard(x, 0.5)}), X)
    assert (bound.wiring, bound.closes) == ("unknown", False)


@pytest.mark.parametrize("bound", [0.1, 99.0])
def test_inspect_takes_guard_of_branch_for_part_of_sublayer(bound):
    inspection = inspect(place(branch=lambda f: f.clamp(-bound, bound)), X)
    assert (inspection.wiring, inspection.closes, inspection.streams[0].remarks) == ("pre_ln", True, ())


@pytest.mark.parametrize("cap", [lambda x: 30 * torch.tanh(x / 30), lambda x: F.relu(x + 0.5) - 0.5])
@pytest.mark.parametrize("at", ["between", "end"])
def test_inspect_refuses_caps_that_bind(cap, at):
    check_refused(inspect(place(**{at: cap}), X))


def test_inspect_follows_features_of_channels_first():
    run = place(between=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2).roll(1, 1))
    assert inspect(run, noise(2, D, D)).wiring == "pre_ln"  # as many tokens as features
    run = place(between=lambda x: x.transpose(1, 2).roll(1, 1).transpose(1, 2))
    assert inspect(run, noise(2, D, D)).wiring == "unknown"


def test_decompose_follows_idle_guards():
    parts = addnorm.decompose(place(between=lambda x: F.hardtanh(x, -99, 99)), X)
    assert parts.closure < 1e-5
