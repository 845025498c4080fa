"""addnorm.lab.init_probe: a stack at init, its norm in six places, measured by depth."""

import contextlib
import math
import statistics

import pytest
import torch

import addnorm
from addnorm import wirings
from addnorm.lab import Flip
from addnorm.lab.init_probe import PLACEMENTS
from addnorm.lab.toy_model import likeness, streams
from addnorm.wirings.catalog import deepnorm_constants

CHANGED = [
    {}, {"norm": "rms"}, {"alpha": 1.5}, {"residual": False}, {"final_norm": True}, {"final_norm": False}, {"gain": 0.3},
    {"tokens": 1}, {"d_model": 12, "tokens": 5},
]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


def as_a_model(flip):
    """The stack as a plain model, its x_0 and its loss."""
    stack, x, v = flip.build()
    return torch.nn.Sequential(stack), x, lambda y: (y * v).sum()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("change", [{}, {"norm": "rms"}, {"alpha": 1.5}], ids=str)
def test_the_numbers_are_those_that_the_recorder_hears(placement, change):
    flip = Flip(placement, sublayers=6, d_model=16, tokens=5, **change)
    found = flip.measure()
    model, x, loss = as_a_model(flip)
    with addnorm.record(model) as rec:
        loss(model(x.requires_grad_())).backward()
    heard = {"ratio": ("write", "ratio"), "cosine": ("write", "cosine"), "similarity": ("out", "similarity"), "gradient": ("grad", "l2"),
             "parameters": ("params", "grad_l2")}  # fmt: skip
    for name, (role, statistic) in heard.items():
        values = {site.id: value for site, value in rec.series(role, statistic) if site.kind not in ("start", "final")}
        assert list(values.values()) == pytest.approx(found[name][1:], rel=2e-5, abs=1e-6), name
    lengths = [value / 4 for site, value in rec.series("out", "l2") if site.kind not in ("start", "final")]
    assert lengths == pytest.approx(found["stream"][1:], rel=2e-5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_map_is_that_of_decompose(placement):
    flip = Flip(placement, sublayers=6, d_model=16, tokens=5)
    found = flip.measure()
    model, x, _ = as_a_model(flip)
    parts = addnorm.decompose(model, x)
    for depth in range(7):
        of = {name: float(share.mean()) for name, share in parts.shares(depth).items()}
        assert [*of.values()][: depth + 1] == pytest.approx([row[depth] for row in found["map"][: depth + 1]], abs=1e-5)
        assert all(row[depth] is None for row in found["map"][depth + 1 :])
    assert found["closure"] < 1e-5


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("change", CHANGED, ids=str)
def test_shares_sum_to_one_and_every_list_has_a_number_for_each_place(placement, change):
    flip = Flip(placement, **{"sublayers": 8, "d_model": 16, "tokens": 5} | change)
    found = flip.measure()
    for name in (
        "labels",
        "kinds",
        "stream",
        "low",
        "high",
        "gradient",
        "parameters",
        "ratio",
        "cosine",
        "similarity",
        "map",
    ):
        assert len(found[name]) == 9, name
    for depth in range(9):
        assert math.fsum(row[depth] for row in found["map"][: depth + 1]) == pytest.approx(1, abs=1e-4)
    for low, mean, high in zip(found["low"], found["stream"], found["high"], strict=True):
        assert low <= mean * (1 + 1e-9)
        assert mean <= high * (1 + 1e-9)
    assert (found["similarity"][0] is None) == (flip.tokens == 1)


def test_only_the_placement_changes_between_placements_and_a_shallow_stack_is_the_start_of_a_deep_one():
    weights = {name: [p.clone() for p in Flip(name, sublayers=4).build()[0].parameters()] for name in PLACEMENTS}
    for name in ("pre", "sandwich", "reordered", "none"):
        assert all(torch.equal(a, b) for a, b in zip(weights["post"], weights[name], strict=True)), name
    deep = [*Flip("post", sublayers=8).build()[0].parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights["post"], deep[: len(weights["post"])], strict=True))
    beta = deepnorm_constants("encoder-only", 2)[1]
    stack, plain = Flip("deepnorm", sublayers=4).build()[0], Flip("post", sublayers=4).build()[0]
    for one, other in zip(stack.connections, plain.connections, strict=True):
        for (role, a), (_, b) in zip(one.sublayer.weight_roles(), other.sublayer.weight_roles(), strict=True):
            torch.testing.assert_close(a, b * (1.0 if role in ("query", "key") else beta))


def test_a_seed_is_a_stack_and_nobody_elses_random_numbers_are_drawn():
    before = torch.random.get_rng_state()
    one, again, other = (Flip("pre", sublayers=4, seed=seed).measure()["stream"] for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert one == again != other


@pytest.mark.parametrize("around", [
    torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu"), lambda: torch.device("meta"), lambda: default_dtype(torch.float64),
], ids=["no_grad", "inference_mode", "autocast", "device", "default_dtype"])  # fmt: skip
def test_the_numbers_are_the_same_whatever_is_set_around_it(around):
    flip = Flip("pre", sublayers=4, d_model=8)
    alone = flip.measure()
    with around():
        assert flip.measure() == alone


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_the_likeness_of_all_places_is_that_of_each():
    flip = Flip("none", sublayers=6, d_model=8, tokens=3)
    stack, x, _ = flip.build()
    assert flip.measure()["similarity"] == pytest.approx(
        [likeness(one.detach().double()) for one in streams(stack, x)], rel=1e-12
    )


def test_the_wiring_is_the_papers_until_something_of_it_is_changed():
    assert Flip("pre").wiring == wirings.pre_ln()
    assert Flip("deepnorm").wiring == wirings.deepnorm()
    assert str(Flip("pre", final_norm=False).wiring.equation()) == "x' = x + f(N(x))"
    assert str(Flip("post", residual=False).wiring.equation()) == "x' = N(f(x))"
    assert str(Flip("none", alpha=2.0).wiring.equation()) == "x' = 2 x + f(x)"
    assert Flip("deepnorm", sublayers=8).wiring.row(0, 0, 4).a == pytest.approx(8**0.25)


def ratio(placement, sublayers, name, first, last):
    """Over four seeds: what a value at one place is of that at another."""
    found = [Flip(placement, sublayers, d_model=32, seed=seed).measure()[name] for seed in range(4)]
    return statistics.geometric_mean(one[first] / one[last] for one in found)


def test_the_lesson_is_there():
    """Lesson 002: post-LN re-scales the stream and its gradient at every sublayer, pre-LN leaves both alone."""
    assert ratio("post", 24, "stream", -1, 0) == pytest.approx(1, abs=0.1)
    assert ratio("pre", 24, "stream", -1, 0) > 2.5
    last = {
        name: statistics.fmean(Flip(name, 24, d_model=32, seed=seed).measure()["ratio"][-1] for seed in range(4))
        for name in ("post", "pre")
    }
    assert last["pre"] < 0.5 * last["post"], "in pre-LN the last write moves the stream less: it has grown"
    assert ratio("pre", 24, "gradient", 0, -1) > 1.5
    assert ratio("none", 24, "stream", -1, 0) > 30
    assert ratio("deepnorm", 24, "gradient", 0, -1) == pytest.approx(1, abs=0.1)
    lasts = {name: [statistics.fmean(Flip(name, n, d_model=32, seed=seed).measure()["parameters"][-1] for seed in range(4)) for n in (6, 48)]
             for name in ("post", "pre")}  # fmt: skip
    assert lasts["post"][1] > 0.75 * lasts["post"][0], (
        "the last gradient does not fall with depth: why there is warm-up"
    )
    assert lasts["pre"][1] < 0.65 * lasts["pre"][0]


def test_what_overflows_is_told_as_it_is():
    found = Flip("none", sublayers=96, gain=3.0).measure()
    assert not math.isfinite(found["stream"][-1])
    assert not math.isfinite(found["closure"])


@pytest.mark.parametrize(("given", "sentence"), [
    ({"placement": "front"}, "placement is 'front', expected"),
    ({"sublayers": 5}, "sublayers is 5, expected an even number"),
    ({"sublayers": 0}, "sublayers is 0"),
    ({"norm": "batch"}, "norm is 'batch'"),
    ({"gain": "much"}, "gain is 'much'"),
    ({"gain": -0.5}, "gain is -0.5, expected a number from 0"),
    ({"alpha": math.nan}, "alpha is nan, expected a finite number, or None"),
    ({"seed": 2**63}, "expected a whole number below 2"),
    ({"residual": 1}, "residual is 1"),
    ({"final_norm": 1}, "final_norm is 1"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(given, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence.replace("(", "\\(")):
        Flip(**given)
