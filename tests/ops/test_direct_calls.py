"""Tests of calls without the dispatcher: plain ones, and the dispatcher wherever more than a kernel takes part."""

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

import addnorm
from addnorm.ops import autograd, dispatch, out
from ops.test_cpu_options import operators
from support.operator_calls import Recorder

DIRECT, DIRECT_OUT = autograd.direct, autograd.direct_out
pytestmark = pytest.mark.skipif(DIRECT is None, reason="the second library is not built, or without Python's headers")


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


def tensors(*, requires_grad=False):
    torch.manual_seed(11)
    return [torch.randn(*rows, 24).requires_grad_(requires_grad) for rows in ((3, 5), (3, 5), (), ())]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_plain_calls_need_no_dispatcher(answered, requires_grad):
    """Tests of the functions compare their results and gradients with float64."""
    x, branch, weight, bias = tensors(requires_grad=requires_grad)
    addnorm.add_layer_norm(x, branch, weight, bias)
    addnorm.add_layer_norm(x, branch, bias=bias, return_residual=True)
    addnorm.add_rms_norm(x, branch, weight)
    addnorm.layer_norm(x, weight, bias)
    addnorm.rms_norm(x.bfloat16())
    assert answered == [True] * 5


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


class Marked(torch.Tensor):
    """A subclass that does nothing of its own."""


@pytest.mark.parametrize("mode", [Recorder, BaseTorchFunctionMode])
def test_modes_see_the_operator(answered, mode):
    x, *others = tensors()
    with mode():
        addnorm.add_layer_norm(x, *others)
        addnorm.add_layer_norm(x, *others, out=torch.empty_like(x))
        addnorm.add_layer_norm(*tensors(requires_grad=True))
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

    def call():
        addnorm.add_layer_norm(x, *others).sum().backward()
        with torch.no_grad():
            addnorm.add_layer_norm(x, *others)
            addnorm.add_layer_norm_(x, *others)

    assert {"add_norm_forward", "add_norm_backward", "add_norm", "add_norm_out"} <= operators(call)
