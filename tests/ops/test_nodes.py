"""Tests of both autograd nodes, in C++ and in Python: the same bits, and the tests of gradients again with the one in Python."""

import pytest
import torch
from torch._dynamo import compiled_autograd

import addnorm
from addnorm.ops import autograd, dispatch
from functional.test_compile import test_gradient_between_two_graphs_has_a_derivative  # noqa: F401
from ops.test_autograd import *  # noqa: F403
from support.cases import DTYPES, VARIANTS, gradients, leaves, make
from support.equality import assert_same
from support.pairwise import rotate

NODE = autograd.node
built = pytest.mark.skipif(NODE is None, reason="the second library is not built")


@pytest.fixture(autouse=True)
def python_node(monkeypatch):
    """Use the node in Python, and the dispatcher."""
    monkeypatch.setattr(autograd, "node", None)
    monkeypatch.setattr(dispatch, "direct", None)


def kinds_of_nodes(call):
    return {type(t.grad_fn).__name__ for t in call(leaves(call)).values()}


@built
@pytest.mark.parametrize(("variant", "dtypes"), rotate(list(VARIANTS), list(DTYPES), 2))
def test_both_nodes_have_the_same_bits(monkeypatch, variant, dtypes):
    call = make(variant, dtypes, (5, 19))
    in_python = gradients(call)
    assert kinds_of_nodes(call) == {"AddNormFunctionBackward"}
    monkeypatch.setattr(autograd, "node", NODE)
    assert kinds_of_nodes(call) != {"AddNormFunctionBackward"}
    assert_same(gradients(call), in_python)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("in_cpp", [False, pytest.param(True, marks=built)])
@pytest.mark.parametrize("variant", ["LayerNorm", "everything, RMSNorm"])
def test_compiled_autograd_has_the_gradients(monkeypatch, variant, in_cpp):
    monkeypatch.setattr(autograd, "node", NODE if in_cpp else None)
    call = make(variant, "float32", (4, 8))
    results = []
    for compiled in (False, True):
        tensors = leaves(call)
        loss = sum(t.sin().sum() for t in call(tensors).values())
        with compiled_autograd._enable(torch.compile(backend="aot_eager")) if compiled else torch.enable_grad():
            loss.backward()
        results.append({name: t.grad for name, t in tensors.items()})
    torch.testing.assert_close(*results)


@built
def test_node_of_another_torch_is_not_loaded(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert autograd._load_node() == (None, None, None)


@built
def test_saved_outputs_use_the_node_in_python(monkeypatch):
    monkeypatch.setattr(autograd, "node", NODE)
    x = torch.randn(2, 8, requires_grad=True)
    with addnorm.save_outputs():
        y = addnorm.add_layer_norm(x, x.detach())
    assert type(y.grad_fn).__name__ == "AddNormFunctionBackward"
