"""Tests of `StreamsProbe`: its numbers against the equations, and the noise of the coefficients."""

import pytest
import torch

from addnorm.lab import StreamsProbe
from addnorm.lab.streams_probe import MIXED, PROBED, perturb
from addnorm.lab.toy_model import ToyModel
from addnorm.wirings import get
from lab.test_streams import compute_streams
from support.equality import assert_same
from support.refusals import make_test

SMALL = {"sublayers": 4, "d_model": 8, "tokens": 3, "n": 3}


def coefficients_of(stack):
    """Return the parameters outside the sublayers, by their names."""
    return {name: p.detach().clone() for name, p in stack.named_parameters() if ".sublayer." not in name}


@pytest.mark.parametrize("wiring", PROBED)
def test_probe_measures_every_wiring(wiring):
    result = StreamsProbe(wiring, **SMALL, seed=3).measure()
    assert result["labels"] == ["x_0", "attention 1", "feed-forward 1", "attention 2", "feed-forward 2"]
    assert (result["gains"] is not None) == (wiring in MIXED)
    assert (result["difference"] == 0.0) == (wiring == "pre_ln")


def test_pre_ln_writes_have_the_stream_gradient():
    """x_{l+1} = x_l + w_l: the gradient at a write is that at the state after it, and the direct path is 1."""
    result = StreamsProbe("pre_ln", **SMALL).measure()
    expected = [gradient / result["gradient"][-1] for gradient in result["gradient"]]
    assert result["write_gradients"] == pytest.approx(expected, rel=1e-5)
    assert result["coefficients"]["direct_path"] == [1.0] * 5


def test_write_gradients_are_those_of_the_loss():
    """The last write of mHC reaches the loss through b and the head alone; by hand."""
    probe = StreamsProbe("mhc", **SMALL, perturbation=0.7)
    model = probe.build()
    states = []
    model.stack.head.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    model()
    state = states[0]
    write = state.pending.branch.detach().requires_grad_()
    with torch.enable_grad():
        streams = state.pending.mix @ state.x + state.pending.inject.unsqueeze(-1) * write.unsqueeze(-2)
        c = model.stack.head.coefficients(streams).collapse
        read = (c.unsqueeze(-1) * streams).sum(-2)
        at_write, at_read = torch.autograd.grad(model.loss(model.stack.norm_final(read)), [write, read])
    expected = float(at_write.double().norm() / at_read.double().norm())
    assert probe.measure()["write_gradients"][-1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("wiring", ["mhc", "muddformer", "gated_residual"])
def test_wirings_share_sublayers_and_data(wiring):
    own, other = (StreamsProbe(name, **SMALL).build() for name in (wiring, "pre_ln"))
    for name in ("x", "targets"):
        assert torch.equal(getattr(own, name), getattr(other, name))
    sublayers = [[c.sublayer.state_dict() for c in model.stack.connections] for model in (own, other)]
    assert_same(*sublayers)


@pytest.mark.parametrize("wiring", ["hyper_connections", "mhc", "attention_residuals", "denseformer"])
def test_noise_is_proportional_to_perturbation(wiring):
    start, half, whole = (StreamsProbe(wiring, **SMALL, perturbation=p).build().stack for p in (0.0, 0.5, 1.0))
    initial = coefficients_of(start)
    fresh = coefficients_of(StreamsProbe(wiring, **SMALL, perturbation=0.0, seed=1).build().stack)
    moved, twice = coefficients_of(half), coefficients_of(whole)
    assert initial
    for name, value in initial.items():
        assert torch.equal(value, fresh[name]), "these initial values are constants"
        assert not torch.equal(moved[name], value), name
        torch.testing.assert_close(twice[name] - value, 2 * (moved[name] - value), rtol=1e-5, atol=1e-6)


def test_noise_moves_logits_by_its_scale():
    """φ R(vec X) and q · R(x) have the standard deviation of the noise, whatever the width."""
    for wiring, name, fan_in in (("mhc", "project", 4 * 64), ("attention_residuals", "query", 64)):
        stack = ToyModel(20, get(wiring), 0, d_model=64).stack
        before = coefficients_of(stack)
        perturb(stack, 0.3, seed=5)
        after = coefficients_of(stack)
        noise = torch.cat([(after[key] - before[key]).flatten() for key in after if key.endswith(name)])
        assert float(noise.std() * fan_in**0.5) == pytest.approx(0.3, rel=0.05)


def test_equal_streams_are_reported():
    copies, moved = (StreamsProbe("hyper_connections", **SMALL, perturbation=p) for p in (0.0, 0.5))
    assert copies.measure()["distance"] < 1e-6
    model = moved.build().requires_grad_(False)
    streams, *_ = compute_streams(model.stack, model.x.unsqueeze(-2).expand(*model.x.shape[:-1], 3, 8))
    expected = max(float((x - x.mean(-2, keepdim=True)).norm() / x.norm()) for x in streams)
    assert moved.measure()["distance"] == pytest.approx(expected, rel=1e-5)
    assert StreamsProbe("attention_residuals", **SMALL).measure()["distance"] is None


def test_gains_compare_both_wirings():
    """The lesson of mHC: the product of its A amplifies by 1 at any depth, that of hyper-connections grows."""
    own = {name: StreamsProbe(name, sublayers=12, d_model=8, perturbation=0.8).measure() for name in MIXED}
    assert own["mhc"]["gains"] == own["hyper_connections"]["gains"]
    for name, result in own.items():
        assert result["gains"][name] == result["coefficients"]["gains"]
    gains = own["mhc"]["gains"]
    assert gains["mhc"]["forward"] == pytest.approx([1.0] * 12, abs=1e-4)
    assert gains["hyper_connections"]["forward"][-1] > 100 * gains["mhc"]["forward"][-1]


REFUSED = {
    "wiring is 'post_ln', expected ": lambda: StreamsProbe("post_ln"),
    "sublayers is 5, expected an even number: attention": lambda: StreamsProbe(sublayers=5),
    "perturbation is -0.5, expected a number that is not negative": lambda: StreamsProbe(perturbation=-0.5),
}


test_wrong_settings_are_refused = make_test(REFUSED)
