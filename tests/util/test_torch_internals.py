"""Tests of each undocumented part of torch that the package uses: a newer torch that changes one fails here first."""

import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from addnorm._util import torch_internals as internals


def test_any_requires_grad_ignores_other_values():
    leaf = torch.ones(2, requires_grad=True)
    assert internals.any_requires_grad(None, 1.0, torch.ones(2), leaf)
    assert not internals.any_requires_grad(None, 1.0, torch.ones(2), torch.float32)


def test_increment_version_counts_a_write():
    t = torch.ones(2)
    internals.increment_version([t])
    assert t._version == 1


def test_below_autograd_records_no_gradient():
    leaf = torch.ones(2, requires_grad=True)
    with internals.BelowAutograd():
        assert (leaf * 2).grad_fn is None
    t = torch.ones(2)
    with internals.BelowAutogradInPlace():
        t.add_(1)
    assert t._version == 0


def test_in_transform_sees_transforms_and_dual_numbers():
    seen = [internals.in_transform()]
    torch.func.vmap(lambda t: seen.append(internals.in_transform()) or t)(torch.ones(2))
    with forward_ad.dual_level():
        seen.append(internals.in_transform())
    assert seen == [False, True, True]


def test_modes_and_traces_are_seen():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **kwargs or {})

    def state():
        return internals.is_recording(), internals.has_dispatch_mode(), internals.is_tracing()

    seen = [state()]
    with Mode():
        seen.append(state())
    make_fx(lambda t: seen.append(state()) or t + 1)(torch.ones(2))
    assert seen == [(False, False, False), (True, True, False), (True, True, True)]


def test_schemas_of_defined_operators_are_found():
    schema = internals.parse_schema("addnorm::add_norm.kernel(Tensor x) -> Tensor")
    assert schema.overload_name == "kernel"
    assert "kernel" in {other.overload_name for other in internals.find_schemas(schema.name)}
    assert internals.find_schemas("addnorm::unknown") == []


def test_without_autocast_keeps_the_dtype():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with internals.without_autocast("AutocastCPU"):
            assert (x @ x).dtype == torch.float32


def test_constant_functions_are_marked_as_torch_does():
    theirs = torch.compiler.assume_constant_result(lambda: 1)
    mine = internals.mark_as_constant(lambda: 1)
    assert vars(mine) == {name: value for name, value in vars(theirs).items() if name.startswith("_dynamo")}


def test_excluded_function_is_not_captured():
    seen = []

    def inner(t):
        seen.append(torch.compiler.is_compiling())
        return t + 1

    internals.exclude_from_capture(inner)
    torch._dynamo.reset()
    torch.compile(lambda t: inner(t * 2), backend="eager")(torch.ones(2))
    torch.compile(inner, backend="eager")(torch.ones(2))
    assert False in seen
