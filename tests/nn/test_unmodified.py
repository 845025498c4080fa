"""Tests that a module is computed without a call only if nothing else than its class decides what it computes.

Each case changes what one module of a stack computes, and compares the stack with one in which that module is always called.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from addnorm import ResidualStack, Row, Wiring, wirings
from addnorm.nn import SelfAttention, attention, plain_steps, step
from addnorm.wirings import coefficients
from support.equality import assert_same
from support.stream_stacks import D, branches, perturb

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


def stack_of(wiring, norm="layer"):
    """Return a stack of a wiring, or the stack that a function returns."""
    if callable(wiring):
        return wiring()
    name = wiring if isinstance(wiring, str) else wiring.name
    stack = ResidualStack(branches(name, 4), D, wiring, norm=norm)
    perturb(stack)
    return stack


def stack_of_attentions():
    wiring = wirings.attention_residuals(reads=3)
    stack = ResidualStack([SelfAttention(D, 2) for _ in range(2)], D, wiring, sublayers_per_layer=1)
    perturb(stack)
    return stack


# The path of a module, and the arguments of `stack_of`.
PLACES = {
    "norm_in": ("layers.0.connections.1.norm_in", "pre_ln"),
    "norm_in of torch": ("layers.0.connections.1.norm_in", lambda: with_norms_of_torch(stack_of("pre_ln", "rms"))),
    "norm_branch": ("layers.0.connections.1.norm_branch", "sandwich", "rms"),
    "norm_out": ("layers.0.connections.1.norm_out", "post_ln"),
    "norm_in with options": ("layers.1.connections.0.norm_in", Wiring("c", Row(norm_in=True, b=0.5, c=2.0))),
    "norm_embedding": ("norm_embedding", "peri_ln", "rms"),
    "norm_final": ("norm_final", "pre_ln", "rms"),
    "norm_in of n streams": ("layers.0.connections.1.norm_in", wirings.mhc(3)),
    "norm_final of n streams": ("norm_final", wirings.mhc(3), "rms"),
    "norm of one stream": ("layers.0.connections.1.norm_streams.1", "siamese_norm"),
    "norm_out of one stream": ("layers.0.connections.1.norm_outs.0", "resi_dual", "rms"),
    "ManifoldConnection": ("layers.0.connections.1.coefficients", wirings.mhc(3)),
    "HyperConnection": ("layers.0.connections.1.coefficients", wirings.hyper_connections(3)),
    "IndependentConnection": ("layers.1.connections.0.coefficients", wirings.independent_hc(3)),
    "SigmoidRead": ("head.coefficients", wirings.mhc(3)),
    "GatedRead": ("layers.0.connections.1.coefficients", wirings.gated_residual(3, rank=4)),
    "in_proj of three reads": ("layers.0.connections.0.sublayer.in_proj", stack_of_attentions),
    "SourceAttention": ("layers.0.connections.1.coefficients", wirings.attention_residuals()),
    "SourceAttention of three reads": ("layers.1.connections.0.coefficients", stack_of_attentions),
}  # fmt: skip


def with_norms_of_torch(stack):
    for connection in stack.connections:
        norm = nn.RMSNorm(D)
        norm.load_state_dict(connection.norm_in.state_dict())
        connection.norm_in = norm
    return stack


def scale(output, by=1.0):
    """Return another output: a tensor, coefficients, or gradients."""
    if isinstance(output, torch.Tensor):
        factor = torch.linspace(1.2 * by, 1.6 * by, output.shape[-1])  # a norm would remove one number
        return output * factor.to(output.dtype)
    changed = [None if t is None else scale(t, by + 0.5 * k) for k, t in enumerate(output)]
    return type(output)(*changed) if hasattr(output, "_fields") else tuple(changed)


def shift(x):
    if isinstance(x, tuple):  # of streams
        return tuple(map(shift, x))
    return x + torch.linspace(0, 1, x.shape[-1]).to(x.dtype)


class Tilted(nn.Module):
    def forward(self, weight):
        return shift(weight)


def scaled(method):
    return lambda *args: scale(method(*args))


def subclass(method):
    def change(module, patch):
        kind = type(module)
        module.__class__ = type("Mine", (kind,), {method: lambda self, x: scale(getattr(kind, method)(self, x))})

    return change


def on_instance(method):
    return lambda module, patch: patch.setattr(module, method, scaled(getattr(module, method)), raising=False)


def on_class(method):
    return lambda module, patch: patch.setattr(type(module), method, scaled(getattr(type(module), method)))


def on_all(register, hook):
    """Register a hook of all modules that acts on one."""

    def change(module, patch):
        def act(other, *args):
            return hook(other, *args) if other is module else None

        return getattr(nn.modules.module, f"register_module_{register}")(act)

    return change


def parametrize(module, patch):
    nn.utils.parametrize.register_parametrization(module, first_parameter(module), Tilted())


def shard(module, patch):
    """Keep a parameter only while the module is called, as FSDP does."""
    name = first_parameter(module)
    whole, empty = module._parameters[name], nn.Parameter(torch.empty(0))
    module._parameters[name] = empty
    patch.setattr(torch, "_whole", whole, raising=False)  # kept alive
    module.register_forward_pre_hook(lambda module, args: module._parameters.update({name: whole}))
    module.register_forward_hook(lambda module, args, output: module._parameters.update({name: empty}))


def as_attribute(name):
    def change(module, patch):
        value = shift(getattr(module, name).detach())
        delattr(module, name)
        setattr(module, name, value)

    return change


def first_parameter(module):
    return next(iter(module._parameters))


def pre_hook(module, args):
    return tuple(shift(t) for t in args)


CHANGES = {
    "subclass": subclass("forward"),
    "forward of the instance": on_instance("forward"),
    "_call_impl of the instance": on_instance("_call_impl"),
    "forward of the class": on_class("forward"),
    "forward hook": lambda module, patch: module.register_forward_hook(lambda m, args, output: scale(output)),
    "pre-hook": lambda module, patch: module.register_forward_pre_hook(pre_hook),
    "pre-hook with kwargs": lambda module, patch: module.register_forward_pre_hook(
        lambda m, args, kwargs: (pre_hook(m, args), kwargs), with_kwargs=True
    ),
    "backward hook": lambda module, patch: module.register_full_backward_hook(lambda m, given, got: scale(given)),
    "backward pre-hook": lambda module, patch: module.register_full_backward_pre_hook(lambda m, got: scale(got)),
    "forward hook of all": on_all("forward_hook", lambda m, args, output: scale(output)),
    "pre-hook of all": on_all("forward_pre_hook", pre_hook),
    "backward hook of all": on_all("full_backward_hook", lambda m, given, got: scale(given)),
    "backward pre-hook of all": on_all("full_backward_pre_hook", lambda m, got: scale(got)),
    "parametrization": parametrize,
    "sharding": shard,
    "call of the class": on_class("__call__"),
    "_call_impl of the class": on_class("_call_impl"),
}
OF_COEFFICIENTS = {
    "subclass's compute": subclass("compute"),
    "compute of the instance": on_instance("compute"),
    "compute of the class": on_class("compute"),
}
OF_NORMS = {"weight that is no parameter": as_attribute("weight"), "bias that is no parameter": as_attribute("bias")}
NEUTRAL = "sharding"  # the same function, which is computed only in a call
IN_FULL = ("norm_in", "ManifoldConnection", "SourceAttention", "in_proj of three reads")
COMMON = (
    "subclass",
    "forward of the instance",
    "forward hook",
    "backward pre-hook of all",
    "parametrization",
    "sharding",
    "compute of the instance",
)
MODES = ("create_graph", "autocast", "no_grad")


def run(stack, x, mode):
    """Return the output, and gradients where there are any."""
    context = torch.no_grad() if mode == "no_grad" else contextlib.nullcontext()
    with context, sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        y = stack(x)
    if mode == "no_grad":
        return [y]
    first = torch.autograd.grad(y.float().sin().sum(), x, create_graph=mode == "create_graph")
    second = torch.autograd.grad(first[0].square().sum(), x) if mode == "create_graph" else ()
    return [t.detach() for t in (y, *first, *second)]


def changes_of(place):
    """Return all changes for one module of each kind, and the commonest for the others."""
    changes = CHANGES | (OF_NORMS if "norm" in place else {} if "in_proj" in place else OF_COEFFICIENTS)
    return changes if place in IN_FULL else {name: changes[name] for name in COMMON if name in changes}


@pytest.mark.parametrize(("place", "name"), [(place, name) for place in PLACES for name in changes_of(place)])
def test_changed_module_is_called(place, name, monkeypatch):
    path, *arguments = PLACES[place]
    stack, x = stack_of(*arguments), torch.randn(2, 3, D, requires_grad=True)
    module, mode = (
        stack.get_submodule(path),
        MODES[(list(PLACES).index(place) + list(changes_of(place)).index(name)) % 3],
    )
    modes = ["", *([mode] if mode != "no_grad" or "backward" not in name else [])]
    before = [run(stack, x, mode) for mode in modes]
    handle = changes_of(place)[name](module, monkeypatch)
    try:
        changed = [run(stack, x, mode) for mode in modes]
        original = step.is_unmodified
        for file in (step, attention):
            monkeypatch.setattr(file, "is_unmodified", lambda m, methods: m is not module and original(m, methods))
        called = [run(stack, x, mode) for mode in modes]
    finally:
        if "of all" in name:
            handle.remove()
    for ours, theirs, old in zip(changed, called, before, strict=True):
        assert_same(ours, theirs)
        if "SourceAttention" in place and "backward" in name:
            continue  # its coefficients are tuples, which these hooks do not see
        if name == NEUTRAL:
            assert_close(ours[0], old[0], rtol=0.02, atol=0.02)  # under autocast a call rounds once more
        else:
            assert any(not torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(ours, old, strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_unchanged_module_is_computed_as_its_call(place, monkeypatch):
    path, *arguments = PLACES[place]
    stack, x = stack_of(*arguments).double(), torch.randn(2, 3, D, requires_grad=True, dtype=torch.float64)
    module, asked = stack.get_submodule(path), []
    expected = run(stack, x, "create_graph")
    original = step.is_unmodified

    def is_unmodified(m, methods):
        asked.append(m is module and original(m, methods))
        return m is not module and original(m, methods)

    for file in (step, attention):
        monkeypatch.setattr(file, "is_unmodified", is_unmodified)
    monkeypatch.setattr(plain_steps, "examine", lambda methods: lambda m: is_unmodified(m, methods))
    assert_close(run(stack, x, "create_graph"), expected, rtol=1e-11, atol=1e-11)
    assert any(asked) == (place != "GatedRead")  # which has no formula besides its own


def test_class_of_a_coefficient_module_may_compute_more():
    """A bias that only the call returns, and constants that depend on the streams."""

    class Biased(coefficients.HyperConnection):
        def compute(self, streams):
            found = super().compute(streams)
            size = streams.square().mean((-1, -2))[..., None]
            return found._replace(inject=found.inject * size, bias=tuple(torch.full((D,), float(k)) for k in range(3)))

    stack, x = stack_of(wirings.hyper_connections(3, dynamic=False)), torch.randn(2, 3, D)
    changed = [stack.layers[i].connections[k] for i, k in ((0, 1), (1, 0))]
    for connection in changed:
        connection.coefficients.__class__ = Biased
    stack.unroll(x)  # compares the streams with the sum of what is added
    y = stack(x)
    for connection in changed:  # a norm with a hook is called, and all else of the step as well
        connection.norm_in.register_forward_hook(lambda *_: None)
    stack.norm_final.register_forward_hook(lambda *_: None)
    assert_close(stack(x), y)
