"""Tests of calls without the dispatcher: the bits of the dispatcher's way, and the dispatcher wherever more than a kernel takes part."""

import functools

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

import addnorm
from addnorm.ops import autograd, dispatch, out
from support.operator_calls import Recorder

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
    ("norm", "dtype"), [(0, torch.float32), (1, torch.bfloat16), (0, torch.float16), (1, torch.float64)]
)
def test_results_and_gradients_have_the_bits_of_the_dispatcher(monkeypatch, answered, norm, dtype, without):
    names = ("residual", "branch", "weight", "bias")

    def compute():
        given = dict(zip(names, tensors(dtype, requires_grad=True), strict=True))
        call = functools.partial(
            dispatch.fast_path, *(None if name in without else given[name] for name in names), EPS, norm
        )
        with torch.no_grad():
            alone = call(False)
        results = (call(False),) if "branch" in without else call(True)  # there is no sum without a branch
        inputs = [t for name, t in given.items() if name not in without]
        dy = [torch.linspace(-1, 2, t.numel()).view_as(t).to(t) for t in results]
        of_one = torch.autograd.grad(results[:1], inputs[:1], dy[:1], retain_graph=True)
        return [alone, *results, *of_one, *torch.autograd.grad(results, inputs, dy)]

    ours = compute()
    assert answered == [True, True]
    monkeypatch.setattr(dispatch, "direct", None)
    assert all(map(torch.equal, ours, compute()))


def test_any_true_value_returns_the_residual(answered):
    for value in (1, torch.tensor(True), "yes", 0, "", None):
        results = addnorm.add_layer_norm(*tensors(), return_residual=value)
        assert isinstance(results, tuple) == bool(value)
    assert answered == [True] * 6
    with pytest.raises(RuntimeError, match="Boolean value of Tensor"):
        addnorm.add_layer_norm(*tensors(), return_residual=torch.ones(2))


def test_plain_writes_need_no_dispatcher(answered):
    """Tests of out= and in-place calls compare their bits with those of new tensors, and the version counters."""
    x, branch, weight, bias = tensors()
    addnorm.add_layer_norm_(x, branch, weight, bias)
    addnorm.add_rms_norm_(x, branch.bfloat16(), weight)
    addnorm.add_residual_(x, branch)
    addnorm.add_layer_norm(x, branch, weight, return_residual=True, out=(x, branch))
    addnorm.rms_norm(x, weight, out=branch)
    assert answered == [True] * 5


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
