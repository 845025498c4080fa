"""Tests of calls without the dispatcher: the bits of the dispatcher's way, and the dispatcher wherever more than a kernel takes part."""

import functools

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

import addnorm
from addnorm.ops import autograd, dispatch, out
from support.cases import DTYPES
from support.operator_calls import Recorder
from support.pairwise import rotate

DIRECT, DIRECT_OUT = autograd.direct, autograd.direct_out
pytestmark = pytest.mark.skipif(DIRECT is None, reason="the second library is not built, or without Python's headers")
EPS = 1e-5


@pytest.fixture
def answered(monkeypatch):
    """Return a list of whether each call was computed without the dispatcher."""
    calls = []

    def note(call):
        def direct(*arguments):
            results = call(*arguments)
            calls.append(results is not None)
            return results

        return direct

    monkeypatch.setattr(dispatch, "direct", note(DIRECT))
    monkeypatch.setattr(out, "direct_out", note(DIRECT_OUT))
    return calls


def tensors(dtype=torch.float32, *, requires_grad=False):
    torch.manual_seed(11)
    rows = [torch.randn(3, 5, 24, dtype=dtype) for _ in range(2)]
    return [t.requires_grad_(requires_grad) for t in (*rows, *(torch.randn(24, dtype=dtype) for _ in range(2)))]


@pytest.mark.parametrize("without", [(), ("branch",), ("weight", "bias"), ("bias",)], ids=str)
@pytest.mark.parametrize(
    ("rms", "dtype"), [(False, torch.float32), (True, torch.bfloat16), (False, torch.float16), (True, torch.float64)]
)
def test_results_and_gradients_have_the_bits_of_the_dispatcher(monkeypatch, answered, rms, dtype, without):
    names = ("residual", "branch", "weight", "bias")

    def compute():
        given = dict(zip(names, tensors(dtype, requires_grad=True), strict=True))
        call = functools.partial(
            dispatch.fast_path, *(None if name in without else given[name] for name in names), EPS, rms
        )
        with torch.no_grad():
            alone = call(False)
        results = (call(False),) if "branch" in without else call(True)  # there is no sum without a branch
        inputs = [t for name, t in given.items() if name not in without]
        dy = [torch.linspace(-1, 2, t.numel()).view_as(t).to(t) for t in results]
        first = torch.autograd.grad(results, inputs, dy, create_graph=True)
        penalty = sum(g.double().square().sum() for g in first)
        second = torch.autograd.grad(penalty, inputs, retain_graph=True, materialize_grads=True)
        of_one = torch.autograd.grad(results[:1], inputs[:1], dy[:1], retain_graph=True)
        return [alone, *results, *first, *second, *of_one, *torch.autograd.grad(results, inputs, dy)]

    ours = compute()
    assert answered == [True, True]
    monkeypatch.setattr(dispatch, "direct", None)
    assert all(map(torch.equal, ours, compute()))


# Calls that write existing tensors: of residual, branch, weight, bias, and two tensors.
WRITING = {
    "y in place": lambda x, s, w, b, y, z: (addnorm.add_layer_norm_(x, s, w, b), x, s),
    "rms in place": lambda x, s, w, b, y, z: (addnorm.add_rms_norm_(x, s, w), x, s),
    "z in place": lambda x, s, w, b, y, z: (addnorm.add_residual_(x, s), x, s),
    "y": lambda x, s, w, b, y, z: (addnorm.add_layer_norm(x, s, w, b, out=y), x, s),
    "y and z": lambda x, s, w, b, y, z: (*addnorm.add_layer_norm(x, s, w, b, return_residual=True, out=(y, z)), x, s),
    "the norm alone": lambda x, s, w, b, y, z: (addnorm.rms_norm(x, w, out=y), x),
}


@pytest.mark.parametrize(("call", "dtypes"), rotate([*WRITING], list(DTYPES), 3))
def test_writes_have_the_bits_of_the_dispatcher(monkeypatch, answered, call, dtypes):
    def compute():
        of_residual, of_branch, of_weight = DTYPES[dtypes]
        x, branch, *weights = tensors()
        rows = [x.to(of_residual), branch.to(of_branch)]
        weights = [t.to(of_weight) for t in weights]
        written = [torch.full_like(t, float("nan")) for t in reversed(rows)]
        versions = [t._version for t in (*rows, *written)]
        results = [t.clone() for t in WRITING[call](*rows, *weights, *written)]
        return results, [t._version - v for t, v in zip((*rows, *written), versions, strict=True)]

    (ours, counted) = compute()
    assert answered == [True]
    monkeypatch.setattr(out, "direct_out", None)
    (theirs, expected) = compute()
    assert counted == expected != [0, 0, 0, 0]
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


class SeenFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    """A subclass that does nothing of its own."""


@pytest.mark.parametrize("mode", [Recorder, SeenFunctions])
def test_modes_see_the_operator(answered, mode):
    x, *others = tensors()
    for arguments, target in (
        ([x, *others], None),
        ([x, *others], torch.empty_like(x)),
        (tensors(requires_grad=True), None),
    ):
        with mode() as seen:
            addnorm.add_layer_norm(*arguments, out=target)
        assert any("add_norm" in str(call) for call in seen.calls)
    assert not any(answered)


def test_other_tensors_take_the_dispatcher(answered):
    """Transforms, autocast, strided and saved tensors have tests of their own, which fail with a direct call."""
    x, *others = tensors()
    marked = addnorm.add_layer_norm(x.as_subclass(Marked), *others)
    meta = addnorm.add_layer_norm(*(t.to("meta") for t in (x, *others)))
    assert not any(answered)
    assert marked.as_subclass(torch.Tensor).equal(addnorm.add_layer_norm(x, *others))
    assert meta.device.type == "meta"


def test_profiler_names_the_operators():
    x, *others = tensors(requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        addnorm.add_layer_norm(x, *others).sum().backward()
        with torch.no_grad():
            addnorm.add_layer_norm(x, *others)
            addnorm.add_layer_norm_(x, *others)
    names = {event.key for event in profiled.key_averages()}
    assert {
        "addnorm::add_norm_forward",
        "addnorm::add_norm_backward",
        "addnorm::add_norm",
        "addnorm::add_norm_out",
    } <= names
