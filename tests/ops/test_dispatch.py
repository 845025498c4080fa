"""Tests of function transforms and forward-mode derivatives: torch.func and torch.autograd.forward_ad on the public functions."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, vjp, vmap
from torch.testing import assert_close

import addnorm
from support.cases import VARIANTS, cotangents, f64, make
from support.oracle import added, exact, keep_mask

# torch compiles its own forward-mode formulas with its deprecated TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

TRANSFORMED = [
    "LayerNorm",
    "LayerNorm without either",
    "RMSNorm with bias",
    "everything, LayerNorm",
    "everything, RMSNorm",
]


def formula(call, tensors):
    """Compute the oracle at its own z, so that the transform contains nothing of the library."""
    return exact(call, tensors, added(call, tensors))


@pytest.fixture(params=TRANSFORMED)
def call(request):
    return make(request.param, "float64", (3, 5))


def loss(function, call, tensors, grad_outputs):
    outputs = function(tensors)
    return sum((outputs[name] * g).sum() for name, g in grad_outputs.items())


def test_func_grad_is_the_gradient(call):
    grad_outputs = cotangents(call())
    actual = grad(lambda tensors: loss(call, call, tensors, grad_outputs))(call.tensors)
    tensors = {name: t.clone().requires_grad_() for name, t in call.tensors.items()}
    loss(functools.partial(formula, call), call, tensors, grad_outputs).backward()
    assert_close(actual, {name: t.grad for name, t in tensors.items()})


@pytest.mark.parametrize("variant", VARIANTS)
def test_grad_and_value_agrees_with_backward(variant):
    call = make(variant, "float32", (5, 17))
    grad_outputs = cotangents(call())
    grads, value = grad_and_value(lambda tensors: loss(call, call, tensors, grad_outputs))(call.tensors)
    tensors = {name: t.clone().requires_grad_() for name, t in call.tensors.items()}
    expected = loss(call, call, tensors, grad_outputs)
    expected.backward()
    # A bfloat16 z in between may be rounded the other way.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if "bfloat16" in variant else {"rtol": 2e-5, "atol": 2e-5}
    assert_close(value, expected.detach(), **tolerance)
    assert_close(grads, {name: t.grad for name, t in tensors.items()}, **tolerance)


def test_jvp_is_the_directional_derivative(call):
    tangents = {name: torch.randn_like(t) for name, t in call.tensors.items()}
    actual = jvp(call, (call.tensors,), (tangents,))
    expected = jvp(functools.partial(formula, call), (call.tensors,), (tangents,))
    assert_close(actual, expected)


def test_forward_ad_carries_the_tangent(call):
    tangents = {name: torch.randn_like(t) for name, t in call.tensors.items()}
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(t, tangents[name]) for name, t in call.tensors.items()}
        actual = {name: forward_ad.unpack_dual(out).tangent for name, out in call(duals).items()}
        y_alone = forward_ad.unpack_dual(call.y_alone(duals)).tangent
    _, expected = jvp(functools.partial(formula, call), (call.tensors,), (tangents,))
    assert_close(actual, expected)
    assert_close(y_alone, expected["y"])


def test_forward_over_reverse_is_the_hessian_vector_product(call):
    grad_outputs = cotangents(call())
    direction = torch.randn_like(call.tensors["branch"])

    def product(function):
        def first(branch):
            return grad(lambda b: loss(function, call, call.tensors | {"branch": b}, grad_outputs) ** 2)(branch)

        return jvp(first, (call.tensors["branch"],), (direction,))[1]

    assert_close(product(call), product(functools.partial(formula, call)))


def test_vmap_over_the_rows_is_the_batch(call):
    if "row_scale" in call.tensors:  # dropout counts elements: every sample would have the same mask
        call.options["dropout_p"] = 0.0
    batched = {name: 0 if t.dim() == 2 or name == "row_scale" else None for name, t in call.tensors.items()}
    assert_close(vmap(call, in_dims=(batched,))(call.tensors), call())


@pytest.mark.parametrize("function", [addnorm.add_layer_norm, addnorm.add_rms_norm])
def test_vmap_of_grad_gives_the_gradient_of_every_sample(function):
    residual, branch, weight = (
        torch.randn(6, 4, 5, dtype=f64),
        torch.randn(6, 4, 5, dtype=f64),
        torch.randn(5, dtype=f64),
    )
    dy = torch.randn(6, 4, 5, dtype=f64)

    def plain(r, b, w):
        return F.layer_norm(r + b, (5,), w) if function is addnorm.add_layer_norm else F.rms_norm(r + b, (5,), w)

    def per_sample(norm):
        gradient = grad(lambda w, r, b, g: (norm(r, b, w) * g).sum(), argnums=(0, 1))
        return vmap(gradient, in_dims=(None, 0, 0, 0))(weight, residual, branch, dy)

    actual = per_sample(function)
    assert actual[0].shape == (6, 5)
    assert_close(actual, per_sample(plain))


def test_jacrev_and_vjp_agree_with_the_formula():
    x, b = torch.randn(2, 4, dtype=f64), torch.randn(2, 4, dtype=f64)
    assert_close(jacrev(addnorm.add_layer_norm)(x, b), jacrev(lambda x, b: F.layer_norm(x + b, (4,)))(x, b))
    _, pullback = vjp(addnorm.add_layer_norm, x, b)
    _, expected = vjp(lambda x, b: F.layer_norm(x + b, (4,)), x, b)
    assert_close(pullback(b), expected(b))


def test_vmap_randomness_different_drops_per_sample():
    x, ones = torch.zeros(5, 4, 8), torch.ones(5, 4, 8)

    def dropped(x, b):
        return addnorm.add_residual(x, b, dropout_p=0.5)

    different = vmap(dropped, randomness="different")(x, ones)
    assert len({tuple(sample.flatten().tolist()) for sample in different}) == 5
    same = vmap(dropped, randomness="same")(x, ones)
    assert len({tuple(sample.flatten().tolist()) for sample in same}) == 1


def test_vmap_over_seeds_gives_each_sample_its_own_mask():
    seeds = torch.arange(4)
    z = vmap(lambda s: addnorm.add_residual(torch.zeros(3, 8), torch.ones(3, 8), dropout_p=0.5, seed=s))(seeds)
    assert (z != 0).equal(torch.stack([keep_mask((3, 8), 0.5, seed) for seed in range(4)]))


def test_functional_call_of_a_module_reaches_the_parameters():
    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(5, dtype=f64))

        def forward(self, x, b):
            return addnorm.add_layer_norm(x, b, self.weight)

    x, weight = torch.randn(3, 5, dtype=f64), torch.randn(5, dtype=f64)
    actual = grad(lambda w: functional_call(Norm(), {"weight": w}, (x, x)).pow(2).sum())(weight)
    assert_close(actual, grad(lambda w: F.layer_norm(x + x, (5,), w).pow(2).sum())(weight))


@pytest.mark.parametrize("wrong", [torch.randn(3, 4), torch.randn(5), torch.randn(3, 5).long()])
def test_jvp_raises_for_a_wrong_branch(wrong):
    with pytest.raises((TypeError, ValueError), match=r"^branch has"):
        jvp(lambda x: addnorm.add_layer_norm(x, wrong), (torch.randn(3, 5),), (torch.randn(3, 5),))
