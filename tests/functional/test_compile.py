"""Tests of torch.compile with fullgraph: forward and backward equal eager's, without unexpected recompilation.

Inductor is the backend where its generated code could matter. Elsewhere it is aot_eager, which is
faster.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import addnorm
from addnorm.ops.schema import ForwardArguments
from support.pairwise import rotate, some, with_values
from support.torch_transformers import randomize

# torch.compile builds its own C++ with deprecated parts of setuptools and distutils, which warn.
# Graphs have the operator where a test does not choose; the formula has tests in ops/test_compile_mode.py.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("operator_mode")]


def test_compiled_dropout_follows_manual_seed():
    x, branch = torch.zeros(16, 32), torch.ones(16, 32, requires_grad=True)
    compiled = torch.compile(lambda x, b: addnorm.add_residual(x, b, dropout_p=0.5), fullgraph=True)
    torch.manual_seed(5)
    first, second = compiled(x, branch), compiled(x, branch)
    torch.manual_seed(5)
    again = compiled(x, branch)
    assert not first.equal(second)
    assert again.equal(first)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    dz = torch.randn(16, 32)
    first.backward(dz)
    assert branch.grad.equal(torch.where(first != 0, 2.0 * dz, 0.0))


D = 24
WEIGHT, BIAS, SEED = torch.linspace(0.5, 1.5, D), torch.linspace(-1.0, 1.0, D), torch.tensor(3)


def stack(wiring="pre_ln"):
    torch.manual_seed(0)
    wrap = addnorm.ResidualStack([torch.nn.Linear(D, D) for _ in range(2)], D, wiring=wiring)
    return lambda x, branch: wrap(x + branch)


# Compiled functions (residual, branch) -> results. Each entry is a factory, since every test needs a new module.
ENTRIES = {
    "y": lambda: lambda x, b: addnorm.add_layer_norm(x, b, WEIGHT, BIAS),
    "y and stream": lambda: lambda x, b: addnorm.add_layer_norm(x, b, WEIGHT, BIAS, return_residual=True),
    "rms, dropout": lambda: lambda x, b: addnorm.add_rms_norm(x, b, WEIGHT, dropout_p=0.3),
    "residual, dropout": lambda: lambda x, b: addnorm.add_residual(x, b, dropout_p=0.3),
    "layer_norm": lambda: lambda x, b: addnorm.layer_norm(x, WEIGHT, BIAS),
    "AddNorm": lambda: addnorm.AddNorm(D, dropout=0.1),
    "ResidualStack": stack,
    "streams": lambda: stack(addnorm.wirings.mhc(2, iterations=2)),
}
INTO_MEMORY = {
    "rms_, dropout": lambda: lambda x, b: addnorm.add_rms_norm_(x, b, WEIGHT, dropout_p=0.3, seed=SEED),
    "out": lambda: lambda x, b: addnorm.add_layer_norm(x, b, WEIGHT, BIAS, out=torch.empty_like(x)),
}


# Each function and module, with or without gradients.
TABLE = [
    *with_values(rotate([*ENTRIES], [False, True], 1), "op"),
    *((name, False, "op") for name in INTO_MEMORY),
    ("y and stream", True, "formula"),
]


@pytest.mark.parametrize(("name", "grad", "form"), TABLE)
def test_second_batch_size_makes_the_graph_dynamic(name, grad, form):
    """Each result is compared with that of eager mode."""
    addnorm.set_compile_mode(form)
    entry, counter, counts = (ENTRIES | INTO_MEMORY)[name](), CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(entry, fullgraph=True, backend=counter)
    for rows in (4, 7, 33):
        inputs = [torch.randn(rows, D, requires_grad=grad) for _ in range(2)]
        copies = [t.detach().clone().requires_grad_(grad) for t in inputs]
        outputs = []
        for function, arguments in ((compiled, inputs), (entry, copies)):
            torch.manual_seed(rows)  # of dropout
            y = function(*arguments)
            outputs.append(y if isinstance(y, tuple) else (y,))
            if grad:
                sum(t.square().sum() for t in outputs[-1]).backward()
        assert_close(*outputs)
        assert_close(inputs, copies)  # in-place calls write them
        for mine, want in zip(inputs, copies, strict=True):
            assert_close(mine.grad, want.grad, rtol=1e-4, atol=1e-5)
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2]


CHANGING = {
    "offset": lambda k: 3 + k,
    "seed": torch.tensor,
    "residual_scale": lambda k: torch.tensor(k / 4),
    "layer_scale": lambda k: torch.tensor(k / 4),
}


@pytest.mark.parametrize("name", some(CHANGING, ["offset", "seed", "layer_scale"]))
def test_changing_tensors_and_offsets_do_not_recompile(name):
    """A number for a scale or dropout_p is part of the graph. A tensor is an input, and the offset becomes a size."""
    counter = CompileCounterWithBackend("aot_eager")

    def function(x, branch, value):
        return addnorm.add_layer_norm(x, branch, WEIGHT, BIAS, **{"dropout_p": 0.3, "seed": SEED, name: value})

    compiled, counts = torch.compile(function, fullgraph=True, backend=counter), []
    x, branch = torch.randn(4, D, requires_grad=True), torch.randn(4, D)
    for k in range(1, 5):
        value = CHANGING[name](k)
        y, want = compiled(x, branch, value), function(x, branch, value)
        assert_close(y, want)
        counts.append(counter.frame_count)
    assert counts == ([1, 2, 2, 2] if name == "offset" else [1] * 4)


def test_cuda_graph_is_one_operator_and_a_seed():
    """Use fake CUDA tensors without memory; a torch without CUDA makes no autograd node for them."""
    graphs = EagerAndRecordGraphs()

    def function(x, branch, weight):
        y, z = addnorm.add_layer_norm(x, branch, weight, dropout_p=0.1, return_residual=True)
        return addnorm.add_rms_norm(z, y, weight)

    with FakeTensorMode():
        x, branch, weight = (torch.empty(shape, device="cuda") for shape in ((4, 8), (4, 8), (8,)))
        y = torch.compile(function, fullgraph=True, backend=graphs)(x, branch, weight)
    assert (y.device.type, y.shape) == ("cuda", (4, 8))
    (graph,) = graphs.graphs
    calls = [node for node in graph.graph.nodes if node.op == "call_function" and "functorch" not in node.name]
    names = [getattr(node.target, "__name__", str(node.target)) for node in calls]
    assert names == ["randint", "add_norm_forward.kernel", "getitem", "getitem", "add_norm.kernel"]
    assert calls[0].kwargs["device"].type == "cuda"  # no .item(), no .cpu()
    assert calls[1].args[ForwardArguments._fields.index("seed")] is calls[0]


CALLS = {
    "norm": lambda x, m: addnorm.add_layer_norm(x, m(x), m.norm.weight, m.norm.bias),
    "scaled": lambda x, m: addnorm.add_rms_norm(x, m(x), m.norm.weight, layer_scale=m.norm.bias),
    "streams": lambda x, m: m.stack(x),
}


@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # the frontend breaks the graph at autograd.grad
@pytest.mark.usefixtures("operator_mode")  # ops/test_nodes.py has this test too
@pytest.mark.parametrize("call", CALLS)
def test_gradient_between_two_graphs_has_a_derivative(call):
    """The frontend would capture a backward that runs there, and a captured backward has no second derivative."""
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 8)
    module.norm = torch.nn.LayerNorm(8)
    module.stack = addnorm.ResidualStack(
        [torch.nn.Linear(8, 8) for _ in range(2)], 8, addnorm.wirings.mhc(2, iterations=2)
    )
    randomize(module, 0.3)

    def force(x):
        x = x.detach().requires_grad_()
        energy = CALLS[call](x, module).sin().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    def second_order(function):
        gradients = torch.autograd.grad(function(x).square().sum(), [*module.parameters()], allow_unused=True)
        return {name: g for (name, _), g in zip(module.named_parameters(), gradients, strict=True) if g is not None}

    x = torch.randn(5, 8)
    expected = second_order(force)
    result = second_order(torch.compile(force, backend="eager"))
    assert len(expected) >= 3
    assert_close(result, expected)
