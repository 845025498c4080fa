"""Tests of `ablate` and `scale_write`: results and gradients equal those of a rewritten model, without side effects."""

import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import addnorm
from support.scaled_model import D, Model, change_write, edit, run_backward, run_scaled
from support.stream_steps import X, make_steps, noise, repeat, run_layers


def find_site(model, k=0):
    return addnorm.inspect(model, X).sites[k]


def one_add(add):
    """Return the model whose one sublayer f is added by `add(x, f, a vector)`."""
    return make_steps(lambda m, x: m.last(add(x, m.gates[0](m.norms[0](x)), m.gammas[0])))


def assert_scaled(model, k, s, x):
    """Compare outputs and gradients with those of the model with the factor; the inspected inputs had another shape."""
    site = addnorm.inspect(model, x[:, 1:]).sites[k]
    model.scales[k] = s
    expected = run_backward(model, x)
    model.scales[k] = 1.0
    with addnorm.scale_write(site, s):
        actual = run_backward(model, x)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("s", [0.0, 0.5, -2.0, 1.0])
def test_equals_the_model_with_the_factor(model, s):
    """Compare also gradients of a sublayer whose last operator saves its output for the backward."""
    assert_scaled(model, 2, s, X)


def test_blocks_nest_and_multiply(model):
    sites = addnorm.inspect(model, X).sites
    model.scales = [0.0, 1.0, 0.25, 1.0]
    expected = model(X)
    model.scales = [1.0] * 4
    with addnorm.ablate(sites[0]), addnorm.scale_write(sites[2], 0.5), addnorm.scale_write(sites[2], 0.5):
        assert torch.allclose(model(X), expected, atol=1e-6)


class Dual(Model):
    """ResiDual: two streams have the same writes; `scales[k]` multiplies that of sublayer k."""

    def forward(self, x):
        second = x
        for f, norm, scale in zip(self.f, self.norm, self.scales, strict=True):
            write = f(x) * scale
            second, x = second + write, norm(x + write)
        return x + nn.functional.layer_norm(second, (D,))


def test_both_streams_of_resi_dual_lose_half_of_the_write():
    model = Dual()
    assert addnorm.inspect(model, X).wiring == "resi_dual"
    assert_scaled(model, 1, 0.5, X)


ADDS = {
    "x + f": lambda x, f, g: x + f,
    "f + x": lambda x, f, g: f + x,
    "alpha": lambda x, f, g: torch.add(x, f, alpha=0.5),
    "x - f": lambda x, f, g: x - f,
    "addcmul": lambda x, f, g: torch.addcmul(x, g, f),
    "lerp": lambda x, f, g: torch.lerp(x, f, 0.25),
    "difference": lambda x, f, g: x + g * (f - x),
    "in place": lambda x, f, g: x.clone().add_(f),
    "in place, in the write": lambda x, f, g: f.add_(x),
    "in place, through a view": lambda x, f, g: x.clone().view(-1, D).add_(f.view(-1, D)).view(x.shape),
    "addcmul of a parameter": lambda x, f, g: torch.addcmul(x, f, torch.sigmoid(g)),
    "add_layer_norm": lambda x, f, g: addnorm.add_layer_norm(x, f, None, None, branch_bias=g, return_residual=True)[1],
    "add_residual": lambda x, f, g: addnorm.add_residual(x, f),
    "add_residual, scaled": lambda x, f, g: addnorm.add_residual(x, f, layer_scale=g, branch_bias=g),
    "addmm": lambda x, f, g: torch.addmm(x.flatten(0, 1), f.flatten(0, 1), torch.eye(D)).view_as(x),
    "scaled before": lambda x, f, g: x + f * 0.3,
}


def assert_edited(name, scale, change):
    """Compare an edit of one add with what `change` computes from the add, the stream, the output and a vector."""

    model = one_add(ADDS[name])
    with edit(find_site(model), scale):
        actual = run_backward(model, X)
    expected = run_backward(one_add(partial(change, ADDS[name])), X)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ADDS)
def test_every_form_of_the_add(name):
    def halve_write(add, x, f, g):
        kept = x * {"lerp": 0.75, "difference": 1 - g}.get(name, 1.0)
        return kept + 0.5 * (add(x, f, g) - kept)

    assert_edited(name, 0.5, halve_write)


WITH_FACTORS = ("addcmul", "addcmul of a parameter", "add_residual, scaled")


@pytest.mark.parametrize("name", [name for name in ADDS if name not in (*WITH_FACTORS, "addmm")])
def test_mean_has_the_gradients_of_the_mean(name):
    assert_edited(name, "mean", lambda add, x, f, g: add(x, change_write(f, "mean").clone(), g))


@pytest.mark.parametrize("name", WITH_FACTORS)
def test_mean_has_no_gradient_of_a_factor_of_the_add(name):
    model = one_add(ADDS[name])
    with addnorm.ablate(find_site(model), "mean"):
        y = model(X)
        with pytest.raises(RuntimeError, match="expected 'zero' for a gradient of the factor"):
            y.sum().backward()


def test_mean_of_two_forwards_before_one_backward():
    model, longer = one_add(ADDS["x + f"]), torch.cat([X, 2.0 * X], 1)
    with addnorm.ablate(find_site(model), "mean"):
        alone = [run_backward(model, one)[1:] for one in (X, longer)]
        model.zero_grad()
        outputs = [model(one) for one in (X, longer)]
        sum((y * noise(*y.shape, seed=3)).sum() for y in outputs).backward()
    for p, *parts in zip(model.parameters(), *alone, strict=True):
        torch.testing.assert_close(torch.zeros_like(p) if p.grad is None else p.grad, sum(parts))


def assert_edits_outputs_only(add, changed, scale, message):
    """Check that an edit of an add gives what another add computes, and refuses gradients."""
    model = one_add(add)
    with edit(find_site(model), scale):
        with pytest.raises(RuntimeError, match=message):
            model(X)
        with torch.no_grad():
            torch.testing.assert_close(model(X), one_add(changed)(X))


def test_mean_of_a_transposed_write_in_place():
    def add(x, f, g, takes_mean=False):
        f = f.transpose(0, 1).contiguous().transpose(0, 1)
        return (change_write(f, "mean").clone() if takes_mean else f).add_(x)

    assert_edits_outputs_only(add, partial(add, takes_mean=True), "mean", "into a part or a view of a tensor")


def test_lerp_with_learned_weight():
    """The gradient of the weight depends on the write, which autograd saves as it was: only outputs can be edited."""
    assert_edits_outputs_only(torch.lerp, lambda x, f, g: (1 - g) * x + 0.5 * g * f, 0.5, "written by lerp")


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpoints(reentrant):
    model = Model()
    model.forward = partial(checkpoint, model.forward, use_reentrant=reentrant)
    assert_scaled(model, 1, 0.5, X.clone().requires_grad_())


def test_auxiliary_loss_keeps_its_gradient():
    """Scale only the gradient of the stream, not that of another loss of the write."""
    model = Model()
    site = find_site(model, 3)
    kept = []
    model.f[3].register_forward_hook(lambda m, a, y: kept.append(y))
    with addnorm.ablate(site):
        (model(X).sum() * 0 + kept[-1].square().sum()).backward()
    grad = model.f[3][0].weight.grad.clone()
    model.zero_grad()
    model(X)
    kept[-1].square().sum().backward()
    assert torch.allclose(grad, model.f[3][0].weight.grad)


def test_added_parameter_has_no_hook_afterwards():
    def run(m, x):
        y = run_layers(m, x) + m.where
        return m.last(y + m.branch(4, y))

    model = make_steps(run)
    model.where = nn.Parameter(torch.randn(5, D).expand(2, 5, D).clone())
    site = next(s for s in addnorm.inspect(model, X).sites if s.role == "injection")
    with addnorm.scale_write(site, 0.5):
        model(X).sum().backward()
    assert not model.where._backward_hooks


def test_interrupted_forward_leaves_no_hooks():
    """Clean up after a KeyboardInterrupt, after which torch calls no hook."""
    model = Model().eval()
    site = find_site(model)
    before = model(X)

    def stop(*_):
        raise KeyboardInterrupt

    handle = model.f[1].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt), addnorm.ablate(site):
        model(X)
    assert not _get_current_dispatch_mode_stack()
    assert not nn.modules.module._global_forward_hooks
    with addnorm.ablate(site):
        with pytest.raises(KeyboardInterrupt):
            model(X)
        handle.remove()
        assert torch.allclose(model(X), run_scaled(model, 0, 0.0), atol=1e-6)  # the next forward is ablated again
    assert torch.equal(model(X), before)


@pytest.mark.parametrize(
    ("tool", "site", "value", "message"),
    [
        (addnorm.ablate, "h.0", "zero", "site is str, expected one of the sites"),
        (addnorm.ablate, None, "resample", "mode is 'resample'"),
        (addnorm.scale_write, None, "half", "s is 'half'"),
    ],
)
def test_wrong_arguments(tool, site, value, message):
    site = site or find_site(Model())
    with pytest.raises((TypeError, ValueError), match=message), tool(site, value):
        pass


@pytest.mark.parametrize("train", [
    lambda m, k, x: 2 * x if k == 1 else x + m.branch(k, x),
    lambda m, k, x: x + m.branch(k, x) * (torch.rand(x.shape[0], 1, 1) + 0.9).floor(),  # the same adds at other addresses
    lambda m, k, x: x + m.branch(k + 1, x),
], ids=["no add", "other adds", "other layers"])  # fmt: skip
def test_forward_that_misses_the_site(train):
    model = make_steps(repeat(lambda m, k, x: train(m, k, x) if m.training else x + m.branch(k, x)))
    site = find_site(model, 1)
    with pytest.raises(RuntimeError, match=r"did not reach site 'mlps\.1'"), addnorm.ablate(site):
        model.train()(X)
    with addnorm.ablate(site):
        model.eval()(X)


class Sum(torch.autograd.Function):
    """Sum of a write and the stream, in the order that torch's node of the add does not have."""

    @staticmethod
    def forward(ctx, write, x):
        return x + write

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


def test_gradient_of_an_add_inside_a_function_is_refused():
    model = make_steps(repeat(lambda m, k, x: Sum.apply(m.branch(k, x), x)))
    plain = make_steps(repeat(lambda m, k, x: x + (0 if k == 1 else 1) * m.branch(k, x)))
    with addnorm.ablate(find_site(model, 1)):
        with pytest.raises(RuntimeError, match=r"'mlps\.1' is written inside a torch\.autograd\.Function"):
            model(X)
        with torch.no_grad():
            torch.testing.assert_close(model(X), plain(X))


def test_deleted_model(frozen_heap):
    site = find_site(Model())
    gc.collect()
    with pytest.raises(RuntimeError, match="was deleted"), addnorm.ablate(site):
        pass


def run_dual(model, x):
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x, x))


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda t: model(t).sum())(x),
    "forward AD": run_dual,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, in forward mode
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_are_refused(model, transform):
    """Autograd's node of an operator is not reached there."""
    site = find_site(model, 1)
    expected = run_scaled(model, 1, 0.5)
    with addnorm.scale_write(site, 0.5):
        with pytest.raises(RuntimeError, match=r"runs inside torch\.func or forward-mode AD, expected neither"):
            transform(model, X)
        torch.testing.assert_close(model(X), expected)
    transform(model, X)
