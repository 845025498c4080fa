"""Tests of the passages of a stream: features keep their place, masks are not computed from it, guards that bind are no row."""

import pytest
import torch
from torch.nn import functional as F

import addnorm
from addnorm import inspect
from addnorm.stream.find.passages import MOVED
from addnorm.stream.find.reasons import SCALED_TOKENS, SECOND, SHIFTED
from addnorm.stream.find.remarks import SCALED_END
from addnorm.stream.find.unexplained import CHANGED
from support.stream_steps import D, inspect_steps, list_reasons, make_steps, noise

X = 2 * noise(2, 5, D)


def place(between=None, residual=None, write=None, branch=None, end=None, read=None):
    """Return a pre-LN forward with a function at one place."""

    def run(m, x):
        for k in range(4):
            f = m.branch(k, read(x) if read else x)
            f = write(m.bare(f)) if write else branch(f) if branch else f
            x = (residual(x) if residual and k == 2 else x) + f
            x = between(x) if between and k == 1 else x
        return m.last(end(x) if end else x)

    return make_steps(run)


def inspect_place(x=X, **functions):
    return inspect(place(**functions), x)


def check_refused(inspection):
    assert not inspection.closes
    assert not any(stream.wiring for stream in inspection.streams)


def written(change):
    """Return a function that changes a copy of the stream in place."""

    def run(x):
        y = x.clone()
        change(y, x)
        return y

    return run


def turned(x):
    """Return the numbers of the features in the opposite order."""
    return torch.arange(x.shape[-1]).flip(0)


# Functions that give a feature the numbers of another one, or none.
MOVES = {
    "roll": lambda x: x.roll(1, -1),
    "index": lambda x: x[..., turned(x)],
    "index_select": lambda x: x.index_select(-1, turned(x)),
    "gather": lambda x: x.gather(-1, turned(x).expand_as(x)),
    "channel shuffle": lambda x: x.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2),
    "halves swapped by cat": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "some features of the token before": written(lambda y, x: y[:, 1:, :3].copy_(x[:, :-1, :3])),
    "gather of a token by feature": lambda x: x.gather(1, (turned(x) % x.shape[1]).expand_as(x)),
    "scatter": lambda x: torch.zeros_like(x).scatter(-1, turned(x).expand_as(x), x),
    "some features zeroed": written(lambda y, x: y[..., 3:].zero_()),
    "some features masked": lambda x: x.masked_fill(turned(x) < 3, 0.0),
    "features cut and padded": lambda x: F.pad(x[..., :-3], (0, 3)),
    "numbers in one row": lambda x: x.flatten(1).roll(1, 1).view(x.shape),
    "sorted": lambda x: x.sort(-1).values,
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.reshape(-1, 1, 2, x.shape[-1] // 2), 2).reshape(x.shape),
    "some features negated": lambda x: torch.cat((x[..., :3], -x[..., 3:]), -1),
    "tokens in the place of features": lambda x: x.flatten(1).unflatten(1, (x.shape[2], -1)).transpose(1, 2),
}

# Masks and gates that are computed from the stream.
MASKS = {
    "relu by a product": lambda x: x * (x > 0),
    "token gate, where": lambda x: torch.where(x.mean(-1, keepdim=True) > 0, x, torch.zeros_like(x)),
    "sign of the mean": lambda x: x * torch.sign(x.mean(-1, keepdim=True)),
    "magnitude": lambda x: x.abs(),
    "largest features": lambda x: x * torch.zeros_like(x).scatter(-1, x.abs().topk(x.shape[-1] // 2).indices, 1.0),
}

# Functions that return their input where it is between -c and c.
GUARDS = {
    "clamp(-{c}, {c})": lambda x, c: x.clamp(-c, c),
    "clamp": lambda x, c: x.clamp(torch.full_like(x[0, 0], -c), torch.full_like(x[0, 0], c)),
    "clamp_max({c})": lambda x, c: x.clamp_max(c),
    "hardtanh(-{c}, {c})": lambda x, c: F.hardtanh(x, -c, c),
    "minimum({c})": lambda x, c: torch.minimum(x, torch.tensor(float(c))),
    "maximum(-{c})": lambda x, c: torch.maximum(x, torch.tensor(-float(c))),
    "where": lambda x, c: torch.where(x.abs() < c, x, torch.zeros_like(x)),
    "masked_fill(0)": lambda x, c: x.masked_fill(x.abs() > c, 0.0),
    "threshold(-{c}, 0)": lambda x, c: F.threshold(x, -c, 0.0),
}


@pytest.mark.parametrize("size", [(2, 5), (2, 8)], ids=["", "as many tokens as features"])
@pytest.mark.parametrize("change", MOVES.values(), ids=MOVES)
def test_inspect_refuses_features_that_change_place(change, size):
    inspection = inspect_place(noise(*size, D), between=change)
    assert not inspection.closes
    assert inspection.streams[-1].wiring is None


@pytest.mark.parametrize("spread", [
    lambda x: x.unfold(-1, 2, 2).mT, lambda x: x.contiguous().as_strided((2, 8, 2, 8), (128, 16, 1, 2)),
    lambda x: x[..., torch.arange(16).view(8, 2).T], lambda x: torch.stack((x[..., ::2], x[..., 1::2]), -2),
], ids=["unfold", "as_strided", "index", "stack"])  # fmt: skip
def test_inspect_finds_norm_of_features_in_two_dimensions(spread):
    inspection = inspect_place(noise(2, 8, D), between=lambda x: spread(x).flatten(-2))
    assert [site.row.norm_in for site in inspection.sites] == [True] * 4
    assert MOVED in list_reasons(inspection)
    assert not any(stream.wiring for stream in inspection.streams)


@pytest.mark.parametrize("at", ["residual", "write", "read", "end"])
def test_inspect_refuses_moved_features_at_all_places(at):
    inspection = inspect_place(**{at: MOVES["channel shuffle"]})
    assert (inspection.wiring, inspection.closes) == ("unknown", False)
    assert {*list_reasons(inspection)} == {MOVED}


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
    "nan_to_num": torch.nan_to_num,
    "where": lambda x: torch.where(x.isfinite(), x, torch.zeros_like(x)),
    "masked_fill": lambda x: x.masked_fill(x.isnan(), 0.0),
}


@pytest.mark.parametrize("name", TOKENS)
def test_inspect_follows_tokens_that_change_place(name):
    inspection = inspect_place(between=TOKENS[name])
    assert (inspection.wiring, inspection.closes, len(inspection.sites)) == ("pre_ln", True, 4)


def test_inspect_refuses_add_to_another_token():
    inspection = inspect_place(residual=lambda x: x.roll(1, 1))
    assert list_reasons(inspection) == [SHIFTED]


@pytest.mark.parametrize("name", MASKS)
def test_inspect_refuses_masks_computed_from_stream(name):
    check_refused(inspect_place(between=MASKS[name]))


def keep_three(x):
    return x * (torch.arange(5) < 3)[:, None]


@pytest.mark.parametrize(("at", "number", "mask"), [
    ("between", 1, keep_three), ("residual", 2, keep_three),
    ("between", 1, lambda x: x.masked_fill((torch.arange(5) < 2)[:, None], 0.0)),
    ("between", 1, lambda x: torch.where((torch.arange(5) < 3)[:, None], x, 0.0)),
], ids=["product", "product of the residual", "masked_fill", "where"])  # fmt: skip
def test_inspect_notes_constant_mask_of_tokens(at, number, mask):
    inspection = inspect_place(**{at: mask})
    assert (inspection.wiring, inspection.closes) == ("pre_ln", True)
    notes = {k: site.notes for k, site in enumerate(inspection.sites) if site.notes}
    assert notes == {number: (f"the {'stream' if at == 'between' else at} is masked by token",)}


@pytest.mark.parametrize("at", ["between", "residual", "end"])
def test_inspect_refuses_numbers_of_tokens_on_the_stream(at):
    inspection = inspect_place(**{at: lambda x: x * torch.linspace(0.1, 1, 5)[:, None]})
    if at == "end":
        assert inspection.streams[0].remarks == (SCALED_END,)
    else:
        assert list_reasons(inspection) == [SCALED_TOKENS]


def test_inspect_remarks_on_tokens_chosen_by_stream():
    inspection = inspect_place(between=lambda x: x.gather(1, x[..., :1].argsort(1).expand_as(x)))
    assert inspection.streams[0].remarks == (
        "its tokens are chosen or ordered by what is computed from the stream itself (gather)",
    )


def test_inspect_counts_mean_of_random_mask():
    inspection = inspect_place(between=lambda x: x * (torch.rand(D) < 0.5))
    assert [site.row.a for site in inspection.sites] == [1.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("name", GUARDS)
@pytest.mark.parametrize("at", ["between", "residual", "end", "write"])
def test_inspect_remarks_on_guards_that_do_not_bind(name, at):
    guard = GUARDS[name]
    idle = inspect_place(**{at: lambda x: guard(x, 99)})
    assert (idle.wiring, idle.closes) == ("sandwich" if at == "write" else "pre_ln", True)
    places = ", at 4 places," if at == "write" else ""
    text = (
        f"{name.format(c=99)} on the stream{places} did not bind in this run: the equations hold only where it does not"
    )
    assert idle.streams[0].remarks == (text,)
    bound = inspect_place(**{at: lambda x: guard(x, 0.5)})
    assert (bound.wiring, bound.closes) == ("unknown", False)


@pytest.mark.parametrize("bound", [0.1, 99.0])
def test_inspect_takes_guard_of_branch_for_part_of_sublayer(bound):
    inspection = inspect_place(branch=lambda f: f.clamp(-bound, bound))
    assert (inspection.wiring, inspection.closes, inspection.streams[0].remarks) == ("pre_ln", True, ())


@pytest.mark.parametrize("cap", [lambda x: 30 * torch.tanh(x / 30), lambda x: F.relu(x + 0.5) - 0.5])
@pytest.mark.parametrize("at", ["between", "end"])
def test_inspect_refuses_caps_that_bind(cap, at):
    inspection = inspect_place(**{at: cap})
    check_refused(inspection)
    assert at == "between" or CHANGED in list_reasons(inspection)


def test_inspect_follows_features_of_channels_first():
    run = place(between=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2).roll(1, 1))
    assert inspect(run, noise(2, D, D)).wiring == "pre_ln"  # as many tokens as features
    for change in (
        lambda x: x.transpose(1, 2).roll(1, 1).transpose(1, 2),
        lambda x: x.contiguous().as_strided(x.shape, (D * D, 1, D)),  # tokens in the place of features
    ):
        assert inspect_place(noise(2, D, D), between=change).wiring == "unknown"


def test_inspect_follows_features_in_two_dimensions():
    def run(m, x):
        x = x.unflatten(-1, (2, -1))
        for k in range(4):
            x = x + m.branch(k, x.flatten(-2)).unflatten(-1, (2, -1))
        return m.last(x.flatten(-2))

    inspection = inspect_steps(run, X)
    assert (inspection.wiring, inspection.closes, len(inspection.sites)) == ("pre_ln", True, 4)
    assert inspection.streams[0].final_norm.path == "last"
    assert addnorm.verify(inspection, wiring="pre_ln")


def test_inspect_refuses_streams_in_halves_of_the_features():
    def run(m, x):
        a, b = x.chunk(2, -1)
        for k in (0, 2):
            a = a + m.branch(k, b)
            b = b + m.branch(k + 1, a)
        return torch.cat((a, b), -1)

    inspection = inspect_steps(run, torch.cat((X, 2 * X), -1))
    assert list_reasons(inspection) == [SECOND]
