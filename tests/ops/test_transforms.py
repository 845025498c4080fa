"""Tests of function transforms and forward-mode derivatives: those of the operation's and of the boundary's formula in float64."""

import functools

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.testing import assert_close

import addnorm
from addnorm.ops.streams.kinds import GATE_KINDS
from support.cases import Call, f64, make
from support.oracle import added, exact, keep_mask
from support.pairwise import rotate
from support.stream_calls import in_float64, make_call

OPERATION = (
    "LayerNorm",
    "LayerNorm without either",
    "RMSNorm with bias",
    "everything, LayerNorm",
    "everything, RMSNorm",
)
ROWS = 7  # no other tensor than those of rows has so many elements


def make_pair(name):
    """Return a call, and its formula in torch's own operators."""
    if name in GATE_KINDS:
        call = in_float64(make_call(2, 5, (ROWS,), name), iterations=2)
        return call, call.formula
    call = make(name, "float64", (ROWS, 5))
    # At the oracle's own z, so that a transform contains nothing of the library.
    return call, lambda tensors: exact(call, tensors, added(call, tensors))


def loss(function):
    return lambda tensors: sum((t * t.sin()).sum() for t in function(tensors).values())


def has_rows(t):
    return t.shape[:1] == (ROWS,)


def batch_axes(call):
    return ({name: 0 if has_rows(t) else None for name, t in call.tensors.items()},)


def tangents_by_batch(call, function, tangents):
    """Several tangents of one call at once, as jacfwd has."""
    several = {name: torch.stack([t, -2.0 * t, t.flip(0)]) for name, t in tangents.items()}
    return vmap(lambda each: jvp(function, (call.tensors,), (each,))[1])(several)


def cotangents_by_batch(call, function, tangents):
    """Several cotangents of one eager call at once, and derivatives of these gradients: the backward runs under vmap."""
    leaves = {name: t.clone().requires_grad_() for name, t in call.tensors.items()}
    outputs = {name: t for name, t in function(leaves).items() if t.requires_grad}
    several = [torch.linspace(-1, 1, 3 * t.numel(), dtype=f64).view(3, *t.shape) for t in outputs.values()]
    inputs = [*leaves.values()]
    found = torch.autograd.grad([*outputs.values()], inputs, several, create_graph=True, is_grads_batched=True)
    loss = sum(g.square().sum() for g in found)
    return found, torch.autograd.grad(loss, inputs, materialize_grads=True)


def dual_numbers(call, function, tangents):
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(t, tangents[name]) for name, t in call.tensors.items()}
        return {name: forward_ad.unpack_dual(t).tangent for name, t in function(duals).items()}


def jacobian_of_one_token(call, function, tangents):
    return jacrev(function)({name: t[0] if has_rows(t) else t for name, t in call.tensors.items()})


def hessian_of_the_first(call, function, tangents):
    name, first = next(iter(call.tensors.items()))
    return hessian(lambda x: loss(function)({**call.tensors, name: x}))(first)


TRANSFORMS = {
    "vmap": lambda call, function, tangents: vmap(function, batch_axes(call))(call.tensors),
    "grad": lambda call, function, tangents: grad(loss(function))(call.tensors),
    "vjp": lambda call, function, tangents: vjp(loss(function), call.tensors)[1](torch.tensor(2.0, dtype=f64)),
    "jvp": lambda call, function, tangents: jvp(function, (call.tensors,), (tangents,))[1],
    "vmap of grad": lambda call, function, tangents: vmap(grad(loss(function)), batch_axes(call))(call.tensors),
    "vmap of jvp": tangents_by_batch,
    "batched gradients": cotangents_by_batch,
    "dual numbers": dual_numbers,
    "jvp of grad": lambda call, function, tangents: jvp(grad(loss(function)), (call.tensors,), (tangents,))[1],
    "jacrev": jacobian_of_one_token,
    "hessian": hessian_of_the_first,
}
BY_TOKEN = ("vmap", "vmap of grad", "jacrev")


def transform_both(transform, name, change=lambda call, tensors: call):
    """Return the results of a call under a transform, and of its formula; `change` makes another function of the call."""
    call, formula = make_pair(name)
    if transform in BY_TOKEN and isinstance(call, Call):
        call.options.pop("dropout_p", None)  # dropout counts elements: every token would have the same mask
    tangents = {key: torch.randn_like(t) for key, t in call.tensors.items()}
    one = {key: t[0] if has_rows(t) and transform in BY_TOKEN else t for key, t in call.tensors.items()}
    return (TRANSFORMS[transform](call, f, tangents) for f in (change(call, one), formula))


@pytest.mark.parametrize("name", [*OPERATION, *GATE_KINDS])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform_has_the_derivatives_of_the_formula(transform, name):
    assert_close(*transform_both(transform, name), rtol=1e-9, atol=1e-9)


def export(call, tensors):
    module = torch.nn.Module()
    module.forward = functools.partial(call.__class__.__call__, call)
    return torch.export.export(module, (tensors,)).module()


EXPORTED = ["grad", "jvp", "vmap", "jvp of grad"]


@pytest.mark.parametrize(("transform", "name"), rotate(EXPORTED, [*OPERATION, *GATE_KINDS], 4))
def test_exported_operator_equals_formula_under_transforms(transform, name):
    """The operator of an exported program sees the transform itself."""
    assert_close(*transform_both(transform, name, export), rtol=1e-9, atol=1e-9)


def test_vmap_randomness_different_drops_per_sample():
    x, ones = torch.zeros(5, 4, 8), torch.ones(5, 4, 8)

    def dropped(x, b):
        return addnorm.add_residual(x, b, dropout_p=0.5)

    for randomness, count in (("different", 5), ("same", 1)):
        samples = vmap(dropped, randomness=randomness)(x, ones)
        assert len({tuple(sample.flatten().tolist()) for sample in samples}) == count


def test_vmap_over_seeds_gives_each_sample_its_own_mask():
    seeds = torch.arange(4)
    z = vmap(lambda s: addnorm.add_residual(torch.zeros(3, 8), torch.ones(3, 8), dropout_p=0.5, seed=s))(seeds)
    assert (z != 0).equal(torch.stack([keep_mask((3, 8), 0.5, seed) for seed in range(4)]))


def test_jvp_raises_for_a_branch_that_broadcasts():
    x = torch.randn(3, 5)
    with pytest.raises(ValueError, match=r"^branch has shape"):
        jvp(lambda x: addnorm.add_layer_norm(x, x[0]), (x,), (x,))
