"""Tests of the compile mode: a compiled graph contains the operator or its formulas, with the same numbers."""

from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import EagerAndRecordGraphs

import addnorm
from addnorm import ResidualStack
from addnorm.ops import compile_mode
from addnorm.wirings.coefficients import Coefficients, SourceAttention
from support.accuracy import assert_accurate, forward_and_backward
from support.cases import VARIANTS, bf16, cotangents, f32, f64, make
from support.pairwise import mark_slow

# torch.compile builds its own C++ with deprecated parts of setuptools and distutils, which warn.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def default_mode():
    yield
    addnorm.set_compile_mode(None)


def operators(function, *inputs):
    """Return our operators in a function's single graph, in order."""
    backend = EagerAndRecordGraphs()
    torch.compile(function, fullgraph=True, backend=backend)(*inputs)
    (graph,) = backend.graphs
    nodes = [node for module in graph.modules() if hasattr(module, "graph") for node in module.graph.nodes]
    return [str(node.target) for node in nodes if str(getattr(node.target, "namespace", "")) == "addnorm"]


def test_default_mode_depends_on_device_size_and_options():
    x = torch.ones(2)
    assert compile_mode.form(torch.nn.Parameter(x), True) == "formula"
    assert compile_mode.form(torch.ones(2, device="meta"), True) == "op"
    assert compile_mode.form(x.as_subclass(type("Wrapper", (torch.Tensor,), {})), True) == "op"
    assert [compile_mode.form(x[:1].expand(n, 2**10), True) for n in (1023, 1024)] == ["formula", "op"]


def scaled(x, branch):
    return addnorm.add_layer_norm(x, branch, layer_scale=0.5)


# The operator in a graph, by mode, function, and whether a gradient is needed.
NODES = [
    (None, addnorm.add_layer_norm, False, "add_norm.formula1"),
    (None, scaled, False, "add_norm_forward.kernel"),
    (None, lambda x, b: addnorm.add_layer_norm(x, b.bfloat16()), False, "add_norm.kernel"),
    ("op", addnorm.add_layer_norm, False, "add_norm.kernel"),
    ("op", scaled, True, "add_norm_forward.default"),
    ("formula", addnorm.add_layer_norm, False, "add_norm.formula1"),
    ("formula", scaled, True, "add_norm_forward.formula1"),
    ("formula", addnorm.add_layer_norm_, False, "add_norm_out.default"),
    ("formula", lambda x, b: addnorm.add_rms_norm(x, b, out=torch.empty_like(x)), False, "add_norm_out.default"),
]


@pytest.mark.parametrize(("mode", "function", "grad", "operator"), NODES)
def test_mode_selects_the_operator(mode, function, grad, operator):
    addnorm.set_compile_mode(mode)
    assert operators(function, torch.randn(3, 8, requires_grad=grad), torch.randn(3, 8)) == [f"addnorm.{operator}"]


@pytest.mark.parametrize("mode", [None, "formula"])
def test_deterministic_algorithms_are_the_operator(mode):
    x, branch = torch.randn(3, 8), torch.randn(3, 8)
    addnorm.set_compile_mode(mode)
    try:
        torch.use_deterministic_algorithms(True)
        assert operators(addnorm.add_layer_norm, x, branch) == ["addnorm.add_norm.kernel"]
    finally:
        torch.use_deterministic_algorithms(False)


def test_formula_is_resolved_by_a_compiler_only():
    """A backend that runs Dynamo's graph as it is has the operator, with the bits of eager calls."""
    x, branch = (torch.randn(3, 40, requires_grad=True) for _ in range(2))
    expected = addnorm.add_layer_norm(x, branch)
    assert torch.compile(addnorm.add_layer_norm, backend="eager")(x, branch).equal(expected)
    results, targets = capture(addnorm.add_layer_norm, x, branch)
    torch.testing.assert_close(results, expected)
    assert not any("addnorm" in target for target in targets)
    assert any("native_layer_norm" in target for target in targets)


def double(module, streams, out):
    return Coefficients(tuple(tuple(2 * p for p in row) for row in out.collapse))


class Doubled(SourceAttention):
    def compute(self, streams):
        return double(self, streams, super().compute(streams))


# A change of the coefficients of one of three reads or of the call, and how many reads are the operator then.
READS = {
    "nothing": (lambda module: None, 3),
    "subclass": (lambda module: setattr(module, "__class__", Doubled), 2),
    "hook": (lambda module: module.register_forward_hook(double), 2),
    "method": (
        lambda module: setattr(module, "compute", lambda x: double(module, x, type(module).compute(module, x))),
        2,
    ),
    "formula": (lambda module: addnorm.set_compile_mode("formula"), 0),
}


@pytest.mark.parametrize(
    ("name", "autocast"), [*((name, False) for name in READS), ("nothing", True), ("formula", True)]
)
def test_reads_of_sources_compile_to_an_operator(name, autocast):
    """Only where the operator computes just what the module does."""
    change, number = READS[name]
    stack = ResidualStack([torch.nn.Linear(8, 8) for _ in range(3)], 8, "attention_residuals", sublayers_per_layer=1)
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter)
    change(stack.connections[1].coefficients)
    x = torch.randn(2, 3, 8, requires_grad=True)

    def gradients(y):
        return [y, *torch.autograd.grad(y.sin().sum(), [x, *stack.parameters()])]

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, (found, targets) = stack(x), capture(stack, x)
    assert targets.count("addnorm.attend_sources.default") == number
    bound = 1e-2 if autocast else 1e-5  # bfloat16's unit; sums in another order
    torch.testing.assert_close(gradients(found), gradients(expected), rtol=bound, atol=bound)


def capture(function, *inputs):
    """Return the results of a compiled function, and the operators of the forward graph that a compiler gets."""
    targets = []

    def keep(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    return torch.compile(function, backend=aot_autograd(fw_compiler=keep))(*inputs), targets


def test_unknown_compile_mode_raises():
    with pytest.raises(
        ValueError, match="mode is 'kernel', expected 'op', 'formula', or None for the measured default"
    ):
        addnorm.set_compile_mode("kernel")
    assert compile_mode._mode is None


MIXED = "bfloat16 with float32 parameters"
DEFAULT = ("residual_dtype float32", "out_dtype bfloat16", "everything, LayerNorm", "the add alone")
CASES = [*((name, MIXED) for name in VARIANTS), ("RMSNorm with bias", "float32"), ("everything, RMSNorm", "float32")]


def assert_formula_is_accurate(variant, dtypes, shape, backend):
    call = make(variant, dtypes, shape)
    grad_outputs = cotangents(call())
    addnorm.set_compile_mode("formula")
    compiled = torch.compile(call.__call__, fullgraph=True, backend=backend)
    assert_accurate(call, forward_and_backward(compiled, call, grad_outputs), grad_outputs)


@pytest.mark.parametrize(
    ("variant", "dtypes"), mark_slow(CASES, [*((name, MIXED) for name in DEFAULT), ("RMSNorm with bias", "float32")])
)
def test_formula_is_one_accurate_graph(variant, dtypes):
    assert_formula_is_accurate(variant, dtypes, (2, 3, 17), "aot_eager")


@pytest.mark.parametrize("dtypes", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_inductor_formula_is_accurate(dtypes):
    assert_formula_is_accurate("LayerNorm", dtypes, (64, 48), "inductor")


def test_formula_has_contiguous_outputs():
    x, branch = (torch.randn(4, 3, 8).transpose(0, 1) for _ in range(2))
    addnorm.set_compile_mode("formula")

    def function(x, branch):
        y, z = addnorm.add_rms_norm(x, branch, return_residual=True, casting="llama")
        return y.view(-1), z.view(-1), addnorm.add_residual(x, branch).view(-1)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, branch), function(x, branch))


def test_formula_has_the_operators_infinities():
    x = torch.randn(5, 8).to(bf16)
    x[1, 2], x[2, 3], x[3, 4] = float("inf"), float("-inf"), float("nan")
    addnorm.set_compile_mode("formula")
    compiled = torch.compile(addnorm.add_rms_norm, fullgraph=True, backend="aot_eager")
    branch = torch.randn(5, 8).to(bf16)
    assert compiled(x, branch).isnan().equal(addnorm.add_rms_norm(x, branch).isnan())


def test_formula_with_casting_adds_a_row_in_one_loop():
    addnorm.set_compile_mode("formula")
    call = partial(addnorm.add_rms_norm, casting="llama")
    assert not any("pad" in target for target in capture(call, torch.ones(2, 9), torch.ones(2, 9))[1])


def test_dtypes_under_autocast_are_the_operators():
    x, branch = torch.randn(3, 8), torch.randn(3, 8, dtype=bf16)
    for form, stream, dtype in (("op", None, f32), ("formula", None, f32), ("formula", f64, f64)):
        addnorm.set_compile_mode(form)
        function = torch.compile(addnorm.add_rms_norm, fullgraph=True, backend="eager")
        with torch.autocast("cpu", dtype=bf16):
            y, z = function(x, branch, residual_dtype=stream, return_residual=True)
        assert (y.dtype, z.dtype) == (dtype, dtype), (form, stream)


def test_no_guard_of_a_compiled_call_runs_python():
    def guards(function, *inputs):
        torch.compile(function, fullgraph=True, backend="eager")(*inputs)
        (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(function)
        return str(entry.guard_manager).splitlines()

    def ours(x, s, w, b):
        return addnorm.add_layer_norm(x, s, w, b)

    def theirs(x, s, w, b):
        return torch.nn.functional.layer_norm(x + s, (8,), w, b)

    inputs = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8), torch.randn(8)
    found, plain = (guards(function, *inputs) for function in (ours, theirs))
    # Two ways from a function to one object are such a guard: `a.b is c.b`, which costs as much as twenty others.
    assert sum("LAMBDA_GUARD" in line for line in found) == sum("LAMBDA_GUARD" in line for line in plain) > 0
