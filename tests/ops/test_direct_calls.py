"""Tests of calls without the dispatcher: the bits of the dispatcher's way, and the dispatcher wherever more than a kernel takes part."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import addnorm
from addnorm.ops import autograd, dispatch, out
from support.cases import DTYPES, gradients, make
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
        arguments = [None if name in without else given[name] for name in names]
        pairs = [False] if "branch" in without else [False, True]  # there is no sum without a branch
        detached = [None if t is None else t.detach() for t in arguments]
        alone = [dispatch.fast_path(*detached, EPS, rms, pair) for pair in pairs]
        results = dispatch.fast_path(*arguments, EPS, rms, pairs[-1])
        used = results if pairs[-1] else (results,)
        inputs = [t for t in arguments if t is not None]
        torch.manual_seed(5)
        dy = [torch.randn_like(t) for t in used]
        first = torch.autograd.grad(used, inputs, dy, create_graph=True)
        second = torch.autograd.grad(
            sum(g.double().square().sum() for g in first), inputs, allow_unused=True, retain_graph=True
        )
        frozen = torch.autograd.grad(used[:1], inputs[:1], dy[:1], retain_graph=True)
        plain = torch.autograd.grad(used, inputs, dy)
        return [alone[0], *(alone[1] if pairs[-1] else ()), *used, *first, *second, *frozen, *plain]

    ours = compute()
    assert answered == [True] * len(answered)
    assert len(answered) in (2, 3)
    monkeypatch.setattr(dispatch, "direct", None)
    theirs = compute()
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or (mine.dtype == other.dtype and torch.equal(mine, other))


@pytest.mark.parametrize(
    ("variant", "dtypes"), rotate(["LayerNorm", "RMSNorm", "LayerNorm without bias"], list(DTYPES), 3)
)
def test_mixed_dtypes_have_the_same_gradients(monkeypatch, variant, dtypes):
    call = make(variant, dtypes, (70, 19))
    ours = gradients(call)
    monkeypatch.setattr(dispatch, "direct", None)
    for name, grad in gradients(call).items():
        assert torch.equal(grad, ours[name]), name


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


def test_write_into_a_saved_tensor_is_detected(answered):
    x, branch, weight, bias = tensors()
    leaf = torch.randn(24, requires_grad=True)
    product = x * leaf
    with torch.no_grad():
        addnorm.add_layer_norm_(x, branch, weight, bias)
    assert answered == [True]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_writes_that_need_more_than_a_kernel_take_the_dispatcher(answered):
    x, branch, weight, bias = tensors()
    expected = addnorm.add_layer_norm(x, branch, weight, bias)
    answered.clear()
    target = torch.empty(3, 24, 5).transpose(1, 2)  # strided
    assert torch.equal(addnorm.add_layer_norm(x, branch, weight, bias, out=target), expected)
    for mode in (Seen(), SeenFunctions()):
        with mode:
            addnorm.add_layer_norm(x, branch, weight, bias, out=torch.empty_like(x))
        assert any("add_norm" in name for name in mode.names)
    torch.func.vmap(lambda a, b: addnorm.add_layer_norm(a, b, weight, bias, out=torch.empty_like(a)))(x, branch)
    with torch.inference_mode():
        inner = torch.empty_like(x)
        addnorm.add_layer_norm(x, branch, weight, bias, out=inner)
    assert torch.equal(addnorm.add_layer_norm(x, branch, weight, bias, out=inner), expected)
    assert (answered.pop(), answered.pop()) == (True, True)  # a tensor without a version counter
    with pytest.raises(RuntimeError, match="requires a gradient"):
        addnorm.add_layer_norm(x, branch, weight.requires_grad_(), bias, out=torch.empty_like(x))
    with pytest.raises(ValueError, match="shares memory"), torch.no_grad():
        addnorm.add_layer_norm(x, branch, weight, bias, return_residual=True, out=(target, target))
    with pytest.raises(ValueError, match="shares memory"), torch.no_grad():
        addnorm.add_layer_norm_(x.view(-1)[:240], x.view(-1)[120:])
    assert not any(answered)
    assert torch.equal(x, tensors()[0])


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names = [*getattr(self, "names", []), str(func)]
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names = [*getattr(self, "names", []), str(func)]
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    """A subclass that does nothing of its own."""


@pytest.mark.parametrize("requires_grad", [False, True])
def test_modes_see_the_operator(answered, requires_grad):
    for mode in (Seen(), SeenFunctions()):
        with mode:
            addnorm.add_layer_norm(*tensors(requires_grad=requires_grad))
        assert any("add_norm" in name for name in mode.names)
    assert not any(answered)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # of torch's own forward mode
def test_transforms_and_other_tensors_take_the_dispatcher(answered):
    x, branch, weight, bias = tensors()
    expected = F.layer_norm(x + branch, (24,), weight, bias)
    mapped = torch.func.vmap(lambda a, b: addnorm.add_layer_norm(a, b, weight, bias))(x, branch)
    _, tangent = torch.func.jvp(lambda a: addnorm.add_layer_norm(a, branch, weight, bias), (x,), (branch,))
    with forward_ad.dual_level():
        dual = addnorm.add_layer_norm(forward_ad.make_dual(x, branch), branch, weight, bias)
        assert forward_ad.unpack_dual(dual).tangent is not None
    with torch.autocast("cpu", torch.bfloat16):
        cast = addnorm.add_layer_norm(x, branch.bfloat16(), weight, bias)
    negated = torch._neg_view(x)
    shown = [
        mapped,
        addnorm.add_layer_norm(x.as_subclass(Marked), branch, weight, bias),
        addnorm.add_layer_norm(negated, branch, weight, bias),
    ]
    assert not any(answered)
    torch.testing.assert_close(shown[0], expected)
    torch.testing.assert_close(shown[1].as_subclass(torch.Tensor), expected)
    torch.testing.assert_close(shown[2], F.layer_norm(branch - x, (24,), weight, bias))
    assert tangent.abs().max() > 0
    assert cast.dtype == F.layer_norm(x, (24,)).dtype
    meta = addnorm.add_layer_norm(*(t.to("meta") for t in (x, branch, weight, bias)))
    assert (meta.device.type, answered[-1]) == ("meta", False)


def test_saved_outputs_and_saved_tensor_hooks_act(answered):
    x, *others = tensors(requires_grad=True)
    with torch.no_grad():
        others[1].abs_().add_(1.0)  # backward divides by the weight
    with addnorm.save_outputs():
        addnorm.add_layer_norm(x, *others)
    assert answered == [False]
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = addnorm.add_layer_norm(x, *others)
    assert answered == [False, True]
    assert len(packed) >= 3
    with torch.inference_mode():
        assert addnorm.add_layer_norm(x.detach(), *others).is_inference()
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_changed_input_is_detected_and_graph_is_freed():
    x, branch, weight, bias = tensors(requires_grad=True)
    y = addnorm.add_layer_norm(x, branch, weight, bias)
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda a: {**a, "branch": a["branch"][..., :5]}, "branch has shape"),
        (lambda a: {**a, "weight": a["weight"][:3]}, "weight has shape"),
        (lambda a: {**a, "residual": a["residual"].long()}, "residual has dtype"),
        (lambda a: {**a, "branch": 3.0}, "branch is"),
        (lambda a: {**a, "eps": torch.tensor(1e-5)}, "eps is"),
        (lambda a: {**a, "eps": -1.0}, "eps is"),
    ],
)
def test_invalid_arguments_raise_the_same_sentences(change, sentence):
    given = dict(zip(("residual", "branch", "weight", "bias"), tensors(), strict=True))
    with pytest.raises((TypeError, ValueError), match=sentence):
        addnorm.add_layer_norm(**change({**given, "eps": 1e-5}))


def test_empty_strided_and_large_tensors_are_computed():
    x, branch, weight, bias = tensors()
    strided = x.transpose(0, 1)
    assert torch.equal(
        addnorm.add_layer_norm(strided, branch.transpose(0, 1), weight, bias),
        addnorm.add_layer_norm(x, branch, weight, bias).transpose(0, 1),
    )
    assert addnorm.add_layer_norm(x[:0], branch[:0], weight, bias).shape == (0, 5, 24)
    one = torch.randn(24)
    torch.testing.assert_close(addnorm.add_layer_norm(one, one * 2), F.layer_norm(one * 3, (24,)))


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


def test_threads_compute_at_the_same_time():
    x, *others = tensors()
    expected = addnorm.add_layer_norm(x, *others)
    results = []
    threads = [
        threading.Thread(target=lambda: results.extend(addnorm.add_layer_norm(x, *others) for _ in range(200)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 800
    assert all(torch.equal(result, expected) for result in results)
