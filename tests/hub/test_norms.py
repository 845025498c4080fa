"""Tests of the norms that `make hub` packs, with the operators of the package in place of a build's own."""

import importlib
import inspect
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from addnorm.ops import cpu
from support.equality import assert_same

SOURCES = Path(__file__).resolve().parents[2] / "hub" / "addnorm_norms"

pytestmark = [
    pytest.mark.skipif(cpu.ISA is None, reason="needs the C++ kernels"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),  # torch's own, in forward mode
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),  # torch's own
]


@pytest.fixture
def hub(monkeypatch):
    """Return the modules norms and layers, and count the calls that reach the kernels."""
    calls = []

    class Operators:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(torch.ops.addnorm, name)

    package, operators = types.ModuleType("hub_norms"), types.ModuleType("hub_norms._ops")
    package.__path__ = [str(SOURCES)]
    operators.ops = Operators()
    monkeypatch.setitem(sys.modules, "hub_norms", package)
    monkeypatch.setitem(sys.modules, "hub_norms._ops", operators)
    modules = {name: importlib.import_module(f"hub_norms.{name}") for name in ("norms", "layers")}
    yield types.SimpleNamespace(**modules, calls=calls)
    for name in modules:
        del sys.modules[f"hub_norms.{name}"]


def make(dtype, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(40,), (5, 8)])
@pytest.mark.parametrize(("name", "number"), [("layer_norm", 0), ("layer_norm", 2), ("rms_norm", 0), ("rms_norm", 1)])
def test_results_equal_float64(hub, dtype, shape, name, number):
    """With so many parameters."""
    inputs = [make(dtype, 3, 7, *shape), *(make(dtype, *shape, seed=k + 1) for k in range(number))]
    results = []
    for module, kind in ((hub.norms, dtype), (F, torch.float64)):
        x, *parameters = leaves = [t.to(kind).requires_grad_() for t in inputs]
        y = getattr(module, name)(x, shape, *parameters, eps=1e-5)
        results.append([y, *torch.autograd.grad(y, leaves, make(dtype, *y.shape, seed=3).to(kind))])
    for got, expected in zip(*results, strict=True):
        assert got.dtype == dtype
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error <= 4 * torch.finfo(dtype).eps
    assert hub.calls.count("add_norm_backward") == 1


def test_no_graph_calls_the_forward_only(hub):
    x = make(torch.float32, 2, 6).requires_grad_()
    with torch.no_grad():
        y = hub.norms.layer_norm(x, (6,))
    assert not y.requires_grad
    torch.testing.assert_close(y, F.layer_norm(x, (6,)).detach())
    assert hub.calls == ["add_norm_forward"]


class Tagged(torch.Tensor):
    pass


CASES = {
    "mixed dtypes": lambda f: f(make(torch.float32, 2, 6), (6,), make(torch.float64, 6)),
    "tensor subclass": lambda f: f(make(torch.float32, 2, 6).as_subclass(Tagged), (6,)),
    "integers": lambda f: f(torch.arange(12).view(2, 6), (6,)),
    "another shape": lambda f: f(make(torch.float32, 2, 6), (5,)),
    "no features": lambda f: f(torch.ones(2, 0), (0,)),
    "meta device": lambda f: f(torch.ones(2, 6, device="meta"), (6,)),
    "vmap": lambda f: torch.vmap(lambda x: f(x, (6,)))(make(torch.float32, 2, 6)),
    "forward gradient": lambda f: torch.func.jvp(
        lambda x: f(x, (6,)), (make(torch.float32, 2, 6),), (torch.ones(2, 6),)
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_other_calls_go_to_torch(hub, case, name):
    def run(function):
        try:
            return CASES[case](function)
        except (RuntimeError, NotImplementedError) as error:
            return str(error).splitlines()[0]

    expected, got = run(getattr(F, name)), run(getattr(hub.norms, name))
    if isinstance(expected, str):
        assert got == expected
    elif case in ("no features", "meta device"):
        assert got.shape == expected.shape
    else:
        assert_same(got, expected)
    assert hub.calls == []


def test_dual_tensors_keep_their_tangent_without_grad(hub):
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        x = torch.autograd.forward_ad.make_dual(make(torch.float32, 2, 6), make(torch.float32, 2, 6, seed=1))
        assert torch.autograd.forward_ad.unpack_dual(hub.norms.layer_norm(x, (6,))).tangent is not None


def test_second_derivative_raises(hub):
    x = make(torch.float32, 2, 6).requires_grad_()
    (dx,) = torch.autograd.grad(hub.norms.layer_norm(x, (6,)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_llama_rounds_before_weight(hub):
    x, weight = make(torch.bfloat16, 5, 64), make(torch.bfloat16, 64, seed=1)
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(hub.norms.rms_norm(x, (64,), weight, 1e-6, casting="llama"), expected)
    assert not torch.equal(hub.norms.rms_norm(x, (64,), weight, 1e-6), expected)
    mixed = hub.norms.rms_norm(x, (64,), weight.float(), 1e-6, casting="llama")  # by torch, in the promoted dtype
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, expected.float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "LlamaRMSNorm"])
def test_layers_may_replace_a_forward(hub, name):
    """What the hub asks: no constructor, no member beside the two flags, the same parameters of forward."""
    layer = getattr(hub.layers, name)
    assert layer.__init__ is torch.nn.Module.__init__
    members = {name for name, _ in inspect.getmembers(layer)} - {
        name for name, _ in inspect.getmembers(torch.nn.Module)
    }
    assert members == {"has_backward", "can_torch_compile"}
    if hasattr(torch.nn, name):
        theirs = getattr(torch.nn, name)
        assert list(inspect.signature(layer.forward).parameters) == list(inspect.signature(theirs.forward).parameters)
        module, x = theirs(12), make(torch.float32, 4, 12)
        torch.testing.assert_close(layer.forward(module, x), module(x))
