"""Tests of function transforms of the boundary of n streams: each has the derivatives of the formula in float64."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from addnorm.ops.streams.kinds import KINDS
from support.pairwise import rotate
from support.stream_calls import BY_TOKEN, f64, in_float64, make_call

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's forward-mode formulas


def loss(function):
    return lambda tensors: sum((t * t.sin()).sum() for t in function(tensors).values())


def batch_axes(call):
    return ({name: 0 if name in BY_TOKEN else None for name in call.tensors},)


def by_token(call, function, tangents):
    return vmap(function, batch_axes(call))(call.tensors)


def gradients_by_token(call, function, tangents):
    return vmap(grad(loss(function)), batch_axes(call))(call.tensors)


def tangents_by_batch(call, function, tangents):
    """Several tangents of one call at once, as jacfwd has."""
    several = {name: torch.stack([t, -2.0 * t, t.flip(0)]) for name, t in tangents.items()}
    return vmap(lambda each: jvp(function, (call.tensors,), (each,))[1])(several)


def cotangents_by_batch(call, function, tangents):
    """Several cotangents of one eager call at once: the backward runs under vmap."""
    leaves = call.leaves()
    outputs = {name: t for name, t in function(leaves).items() if t.requires_grad}
    cotangents = [torch.linspace(-1, 1, 3 * t.numel(), dtype=f64).view(3, *t.shape) for t in outputs.values()]
    found = torch.autograd.grad([*outputs.values()], [*leaves.values()], cotangents, is_grads_batched=True)
    return dict(zip(leaves, found, strict=True))


def dual_numbers(call, function, tangents):
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(t, tangents[name]) for name, t in call.tensors.items()}
        return {name: forward_ad.unpack_dual(t).tangent for name, t in function(duals).items()}


def forward_over_reverse(call, function, tangents):
    return jvp(grad(loss(function)), (call.tensors,), (tangents,))[1]


def jacobian_of_one_token(call, function, tangents):
    one = {name: t[0] if name in BY_TOKEN else t for name, t in call.tensors.items()}
    return jacrev(function)(one)


def hessian_of_streams(call, function, tangents):
    return hessian(lambda x: loss(function)({**call.tensors, "streams": x}))(call.tensors["streams"])


def functional_module(call, function, tangents):
    """Parameters and buffers of a module that are replaced for one call."""
    module = torch.nn.Module()
    module.tensors = torch.nn.ParameterDict({name: torch.zeros_like(t) for name, t in call.tensors.items()})
    module.forward = lambda: function(dict(module.tensors))
    return functional_call(module, {f"tensors.{name}": t for name, t in call.tensors.items()}, ())


TRANSFORMS = {
    "vmap": by_token,
    "grad": lambda call, function, tangents: grad(loss(function))(call.tensors),
    "vjp": lambda call, function, tangents: vjp(loss(function), call.tensors)[1](torch.tensor(2.0, dtype=f64)),
    "jvp": lambda call, function, tangents: jvp(function, (call.tensors,), (tangents,))[1],
    "vmap of grad": gradients_by_token,
    "vmap of jvp": tangents_by_batch,
    "batched gradients": cotangents_by_batch,
    "dual numbers": dual_numbers,
    "jvp of grad": forward_over_reverse,
    "jacrev": jacobian_of_one_token,
    "hessian": hessian_of_streams,
    "functional_call": functional_module,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform_has_the_derivatives_of_the_formula(transform, kind):
    call = in_float64(make_call(2, 5, (3,), kind), iterations=2)
    tangents = {name: torch.randn_like(t) for name, t in call.tensors.items()}
    actual, expected = (TRANSFORMS[transform](call, f, tangents) for f in (call, call.formula))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("transform", "kind"), rotate(["grad", "jvp", "vmap", "jvp of grad"], [*KINDS], 2))
def test_exported_operator_equals_formula_under_transforms(transform, kind):
    """The operator of an exported program sees the transform itself."""
    call = in_float64(make_call(2, 5, (3,), kind), iterations=2)
    tangents = {name: torch.randn_like(t) for name, t in call.tensors.items()}
    module = torch.nn.Module()
    module.forward = call.__call__  # of a dataclass, which is not a function
    one = {name: t[0] if name in BY_TOKEN and transform == "vmap" else t for name, t in call.tensors.items()}
    program = torch.export.export(module, (one,)).module()
    actual, expected = (TRANSFORMS[transform](call, f, tangents) for f in (program, call.formula))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
