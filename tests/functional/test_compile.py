"""Tests of torch.compile with fullgraph: forward and backward equal eager's, without unexpected recompilation.

Inductor is the backend where its generated code could matter. Elsewhere it is aot_eager, which is
faster.
"""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode

import addnorm
from addnorm.ops.schema import ForwardArguments
from support.accuracy import forward_and_backward
from support.cases import BASIC, OPTIONS, cotangents, make
from support.pairwise import mark_slow, some

pytestmark = [
    # torch.compile builds its own C++ with deprecated parts of setuptools and distutils, which warn.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh_cache(operator_mode):
    """Compile anew, with the operator where a test does not choose; the formula has tests in ops/test_compile_mode.py."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("form", "backend"), [("op", "inductor"), ("formula", "aot_eager")])
def test_compiled_dropout_follows_manual_seed(form, backend):
    addnorm.set_compile_mode(form)
    x, branch = torch.zeros(16, 32), torch.ones(16, 32, requires_grad=True)
    compiled = torch.compile(lambda x, b: addnorm.add_residual(x, b, dropout_p=0.5), fullgraph=True, backend=backend)
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


COMPILED = [*BASIC, *(name for name in OPTIONS if "everything" in name or name.startswith(("row", "stream", "weight")))]


@pytest.mark.parametrize("variant", some(COMPILED, ["RMSNorm without weight", "everything, LayerNorm"]))
def test_compiled_graph_has_the_bits_of_eager(variant):
    call = make(variant, "bfloat16 with float32 parameters", (2, 3, 17))
    compiled = torch.compile(call.__call__, fullgraph=True, backend="aot_eager")
    grad_outputs = cotangents(call())
    expected, actual = (forward_and_backward(function, call, grad_outputs) for function in (call, compiled))
    assert [name for name, t in expected.items() if not t.equal(actual[name])] == []


D = 24
WEIGHT, BIAS, SEED = torch.linspace(0.5, 1.5, D), torch.linspace(-1.0, 1.0, D), torch.tensor(3)


def add_norm_module():
    return addnorm.AddNorm(D, dropout=0.1)


def stack(wiring="pre_ln"):
    torch.manual_seed(0)
    wrap = addnorm.ResidualStack([torch.nn.Linear(D, D) for _ in range(2)], D, wiring=wiring)
    return lambda x, branch: wrap(x + branch)


# Compiled functions (residual, branch) -> results. Each entry is a factory, since every test needs a new module.
ENTRIES = {
    "y": lambda: lambda x, b: addnorm.add_layer_norm(x, b, WEIGHT, BIAS),
    "y and stream": lambda: lambda x, b: addnorm.add_layer_norm(x, b, WEIGHT, BIAS, return_residual=True),
    "rms": lambda: lambda x, b: addnorm.add_rms_norm(x, b, WEIGHT),
    "rms, dropout": lambda: lambda x, b: addnorm.add_rms_norm(x, b, WEIGHT, dropout_p=0.3),
    "residual": lambda: addnorm.add_residual,
    "residual, dropout": lambda: lambda x, b: addnorm.add_residual(x, b, dropout_p=0.3),
    "layer_norm": lambda: lambda x, b: addnorm.layer_norm(x, WEIGHT, BIAS),
    "rms_norm, weight_offset": lambda: lambda x, b: addnorm.rms_norm(x, WEIGHT, weight_offset=1.0),
    "AddNorm": add_norm_module,
    "ResidualStack": stack,
    "streams": lambda: stack(addnorm.wirings.mhc(2, iterations=2)),
}
INTO_MEMORY = {
    "layer_": lambda: lambda x, b: addnorm.add_layer_norm_(x, b, WEIGHT, BIAS),
    "rms_, dropout": lambda: lambda x, b: addnorm.add_rms_norm_(x, b, WEIGHT, dropout_p=0.3, seed=SEED),
    "residual_": lambda: addnorm.add_residual_,
    "out": lambda: lambda x, b: addnorm.add_layer_norm(x, b, WEIGHT, BIAS, out=torch.empty_like(x)),
}


def count_compilations(entry, form, grad, rows, *, mark_dynamic=False):
    """Return the number of compilations after each batch size; check each result against eager."""
    addnorm.set_compile_mode(form)
    counter = CompileCounterWithBackend("aot_eager")
    compiled, counts = torch.compile(entry, fullgraph=True, backend=counter), []
    for count in rows:
        inputs = [torch.randn(count, D, requires_grad=grad) for _ in range(2)]
        copies = [t.detach().clone().requires_grad_(grad) for t in inputs]
        if mark_dynamic:
            for t in inputs:
                torch._dynamo.mark_dynamic(t, 0)
        outputs = []
        for function, grad_outputs in ((compiled, inputs), (entry, copies)):
            torch.manual_seed(count)  # of dropout
            y = function(*grad_outputs)
            outputs.append(y if isinstance(y, tuple) else (y,))
            if grad:
                sum(t.square().sum() for t in outputs[-1]).backward()
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(inputs, copies)  # in-place calls write them
        for mine, want in zip(inputs, copies, strict=True):
            torch.testing.assert_close(mine.grad, want.grad, rtol=1e-4, atol=1e-5)
        counts.append(counter.frame_count)
    return counts


EVERY = [
    *itertools.product(ENTRIES, ["op"], [False, True]), *itertools.product(["y and stream", "ResidualStack"], ["formula"], [True]),
    *itertools.product(INTO_MEMORY, ["op"], [False]),
]  # fmt: skip
# Each operator and module once, with or without gradients, and one formula.
DEFAULT = [
    *itertools.product(["y", "rms, dropout", "ResidualStack", "out"], ["op"], [False]),
    *itertools.product(["y and stream", "residual, dropout", "layer_norm", "AddNorm", "streams"], ["op"], [True]),
    ("y and stream", "formula", True),
]


@pytest.mark.parametrize(("name", "form", "grad"), mark_slow(EVERY, DEFAULT))
def test_second_batch_size_makes_the_graph_dynamic(name, form, grad):
    assert count_compilations((ENTRIES | INTO_MEMORY)[name](), form, grad, (4, 7, 33)) == [1, 2, 2]


@pytest.mark.parametrize(
    ("name", "grad"),
    mark_slow(
        itertools.product(["y and stream", "rms, dropout", "ResidualStack", "streams"], [False, True]),
        [("y and stream", False), ("rms, dropout", True)],
    ),
)
def test_dynamic_batch_needs_one_graph(name, grad):
    assert count_compilations(ENTRIES[name](), "op", grad, (4, 7, 33), mark_dynamic=True) == [1, 1, 1]


@pytest.mark.parametrize(
    "grad", [pytest.param(False, id="no grad", marks=pytest.mark.slow), pytest.param(True, id="grad")]
)
def test_one_row_and_no_rows_have_their_own_graphs(grad):
    assert count_compilations(ENTRIES["y and stream"](), "op", grad, (4, 7, 1, 0, 5, 1, 0)) == [1, 2, 3, 4, 4, 4, 4]


CHANGING = {
    "offset": lambda k: 3 + k,
    "seed": torch.tensor,
    "residual_scale": lambda k: torch.tensor(k / 4),
    "layer_scale": lambda k: torch.tensor(k / 4),
}


@pytest.mark.parametrize(
    ("name", "form"),
    mark_slow(
        [*((name, "op") for name in CHANGING), ("offset", "formula")],
        [("offset", "op"), ("seed", "op"), ("layer_scale", "op")],
    ),
)
def test_changing_tensors_and_offsets_do_not_recompile(name, form):
    """A number for a scale or dropout_p is part of the graph. A tensor is an input, and the offset becomes a size."""
    addnorm.set_compile_mode(form)
    counter = CompileCounterWithBackend("aot_eager")

    def function(x, branch, value):
        return addnorm.add_layer_norm(x, branch, WEIGHT, BIAS, **{"dropout_p": 0.3, "seed": SEED, name: value})

    compiled, counts = torch.compile(function, fullgraph=True, backend=counter), []
    x, branch = torch.randn(4, D, requires_grad=True), torch.randn(4, D)
    for k in range(1, 5):
        value = CHANGING[name](k)
        y, want = compiled(x, branch, value), function(x, branch, value)
        torch.testing.assert_close(y, want)
        counts.append(counter.frame_count)
    assert counts == ([1, 2, 2, 2] if name == "offset" else [1] * 4)


@pytest.mark.parametrize("seed", [None, SEED], ids=["drawn", "given"])
def test_cuda_graph_is_one_operator_and_a_seed(seed):
    """Use fake CUDA tensors without memory; a torch without CUDA makes no autograd node for them."""
    graphs = EagerAndRecordGraphs()

    def function(x, branch, weight, seed):
        y, z = addnorm.add_layer_norm(x, branch, weight, dropout_p=0.1, seed=seed, return_residual=True)
        return addnorm.add_rms_norm(z, y, weight)

    with FakeTensorMode():
        x, branch, weight = (torch.empty(shape, device="cuda") for shape in ((4, 8), (4, 8), (8,)))
        seed = None if seed is None else torch.empty((), dtype=torch.int64, device="cuda")
        y = torch.compile(function, fullgraph=True, backend=graphs)(x, branch, weight, seed)
    assert (y.device.type, y.shape) == ("cuda", (4, 8))
    (graph,) = graphs.graphs
    calls = [node for node in graph.graph.nodes if node.op == "call_function" and "functorch" not in node.name]
    names = [getattr(node.target, "__name__", str(node.target)) for node in calls]
    drawn = ["randint"] if seed is None else []
    assert names == [*drawn, "add_norm_forward.kernel", "getitem", "getitem", "add_norm.kernel"]
    if seed is None:  # no .item(), no .cpu()
        assert calls[0].kwargs["device"].type == "cuda"
        assert calls[1].args[ForwardArguments._fields.index("seed")] is calls[0]


CALLS = {
    "norm": lambda x, m: addnorm.add_layer_norm(x, m(x), m.norm.weight, m.norm.bias),
    "scaled": lambda x, m: addnorm.add_rms_norm(x, m(x), m.norm.weight, layer_scale=m.norm.bias),
    "streams": lambda x, m: m.stack(x),
}


@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # the frontend breaks the graph at autograd.grad
@pytest.mark.parametrize("call", CALLS)
def test_gradient_between_two_graphs_has_a_derivative(call):
    """The frontend would capture a backward that runs there, and a captured backward has no second derivative."""
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 8)
    module.norm = torch.nn.LayerNorm(8)
    module.stack = addnorm.ResidualStack([torch.nn.Linear(8, 8) for _ in range(2)], 8, "mhc")
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.3)

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
    torch.testing.assert_close(result, expected)
