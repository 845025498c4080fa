"""Tests of the compile mode: a compiled graph contains the operator or its formulas, with the same numbers."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs

import addnorm
from addnorm.ops import compile_mode
from addnorm.ops.schema import SCHEMAS
from support.cases import VARIANTS, bf16, cotangents, f32, f64, make
from support.compiled_calls import WRONG_BRANCHES, compute_results
from support.oracle import UNIT, relative, truth

# torch.compile builds its own C++ with deprecated parts of setuptools and distutils, which warn.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def as_measured():
    torch._dynamo.reset()
    yield
    addnorm.set_compile_mode(None)
    torch._dynamo.reset()


def operators(function, *inputs) -> list[str]:
    """Return the names of our operators in a function's single graph, in order."""
    backend = EagerAndRecordGraphs()
    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, backend=backend)(*inputs)
    (graph,) = backend.graphs
    nodes = [node for module in graph.modules() if hasattr(module, "graph") for node in module.graph.nodes]
    return [node.target._opname for node in nodes if str(getattr(node.target, "namespace", "")) == "addnorm"]


def test_default_compile_mode_depends_on_the_device(monkeypatch):
    assert set(compile_mode.DEFAULT_MODES.values()) <= set(compile_mode.MODES)
    monkeypatch.setattr(compile_mode, "DEFAULT_MODES", {"cpu": "formula"})
    assert compile_mode.kernel("add_norm", torch.ones(2)) is compile_mode.FORMULAS["add_norm"]
    assert compile_mode.kernel("add_norm", torch.ones(2, device="meta")) is torch.ops.addnorm.add_norm.default


def test_every_operator_but_the_one_that_mutates_has_its_formula():
    assert set(SCHEMAS) == {*compile_mode.FORMULAS, "add_norm_out"}


def test_unknown_compile_mode_raises():
    with pytest.raises(
        ValueError, match="mode is 'kernel', expected 'op', 'formula', or None for the measured default"
    ):
        addnorm.set_compile_mode("kernel")
    assert compile_mode._mode is None


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("options", [{}, {"layer_scale": 0.5}], ids=["lean", "with options"])
def test_compile_mode_selects_the_node(grad, options):
    x, branch = torch.randn(3, 8, requires_grad=grad), torch.randn(3, 8)

    def function(x, branch):
        return addnorm.add_layer_norm(x, branch, **options)

    addnorm.set_compile_mode("op")
    assert len(operators(function, x, branch)) == 1 + grad  # its backward is in the graph
    addnorm.set_compile_mode("formula")
    assert operators(function, x, branch) == []


def test_out_and_in_place_are_operators_in_both_modes():
    x, branch = torch.randn(3, 8), torch.randn(3, 8)
    addnorm.set_compile_mode("formula")
    assert operators(addnorm.add_layer_norm_, x, branch) == ["add_norm_out"]
    assert operators(lambda x, b: addnorm.add_rms_norm(x, b, out=torch.empty_like(x)), x, branch) == ["add_norm_out"]


def test_changing_the_compile_mode_back_reuses_the_graph():
    counter = CompileCounterWithBackend("eager")
    function = torch.compile(addnorm.add_rms_norm, fullgraph=True, backend=counter)
    x, branch = torch.randn(3, 8), torch.randn(3, 8)
    counts = []
    for form in ("op", "formula", "op", "formula", "formula"):
        addnorm.set_compile_mode(form)
        function(x, branch)
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2, 2]


MIXED = "bfloat16 with float32 parameters"
DEFAULT = (
    "LayerNorm", "RMSNorm with bias", "LayerNorm without either", "row_scale and layer_scale", "residual_scale (d,)",
    "residual_dtype float32", "out_dtype bfloat16", "everything, LayerNorm", "the add alone",
)  # fmt: skip
CASES = [pytest.param(name, MIXED, marks=() if name in DEFAULT else pytest.mark.slow) for name in VARIANTS]
CASES += [(name, "float32") for name in ("LayerNorm", "everything, RMSNorm")]


@pytest.mark.parametrize(("variant", "dtypes"), CASES)
def test_formula_is_one_graph_with_the_operators_results(variant, dtypes):
    call = make(variant, dtypes, (2, 3, 17))
    names = list(call.tensors)

    def function(*tensors):
        return tuple(call(dict(zip(names, tensors, strict=True))).values())

    outputs, grads = compute_results(function, call.tensors.values())
    addnorm.set_compile_mode("formula")
    got = compute_results(torch.compile(function, fullgraph=True, backend="aot_eager"), call.tensors.values())
    for name, mine, want in zip([*"yz"[-len(outputs) :], *names], got[0] + got[1], outputs + grads, strict=True):
        assert mine.dtype == want.dtype, name
        if want.dtype == f32:  # sums have another order
            assert relative(mine, want) < 8 * UNIT[f32] or mine.equal(want), name
        else:  # and sometimes an element is at the edge of a rounding
            torch.testing.assert_close(mine, want, rtol=2 * UNIT[bf16], atol=1e-6, msg=name)
            assert (mine != want).float().mean() < 0.05, name


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_inductor_formula_is_accurate(dtype):
    name = {f32: "float32", bf16: "bfloat16"}[dtype]
    call = make("LayerNorm", name, (64, 48))
    names = list(call.tensors)

    def function(*tensors):
        return tuple(call(dict(zip(names, tensors, strict=True))).values())

    addnorm.set_compile_mode("formula")
    (y, z), grads = compute_results(torch.compile(function, fullgraph=True), call.tensors.values())
    assert z.equal(function(*call.tensors.values())[1])
    given = dict(zip("yz", cotangents({"0": y, "1": z}).values(), strict=True))
    exact = truth(call, z, given)
    for name, got in {"y": y, **dict(zip(names, grads, strict=True))}.items():
        assert relative(got, exact[name]) < (1.02 if dtype == bf16 else 4) * UNIT[dtype], name


def test_dropout_drops_the_operators_elements():
    x, branch, seed = torch.zeros(5, 7), torch.ones(5, 7), torch.tensor(99)
    want = addnorm.add_residual(x, branch, dropout_p=0.4, seed=seed, offset=3)
    addnorm.set_compile_mode("formula")
    function = torch.compile(addnorm.add_residual, fullgraph=True, backend="aot_eager")
    assert function(x, branch, dropout_p=0.4, seed=seed, offset=3).equal(want)
    torch.manual_seed(5)
    first, second = function(x, branch, dropout_p=0.4), function(x, branch, dropout_p=0.4)
    torch.manual_seed(5)
    assert function(x, branch, dropout_p=0.4).equal(first)
    assert not first.equal(second)
    torch.manual_seed(5)
    assert addnorm.add_residual(x, branch, dropout_p=0.4).equal(first)


def test_dtypes_under_autocast_are_the_operators():
    x, branch = torch.randn(3, 8), torch.randn(3, 8, dtype=bf16)
    found = {}
    for form in compile_mode.MODES:
        addnorm.set_compile_mode(form)
        for stream in (None, f64):
            with torch.autocast("cpu", dtype=bf16):
                both = torch.compile(addnorm.add_rms_norm, fullgraph=True, backend="aot_eager")(
                    x, branch, residual_dtype=stream, return_residual=True
                )
            found.setdefault(stream, []).append([t.dtype for t in both])
    assert found == {None: [[f32, f32]] * 2, f64: [[f64, f64]] * 2}


def test_normalized_shape_is_the_operators():
    x, branch, weight = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(3, 4)
    want = addnorm.add_layer_norm(x, branch, weight, normalized_shape=(3, 4), return_residual=True)
    addnorm.set_compile_mode("formula")
    function = torch.compile(addnorm.add_layer_norm, fullgraph=True, backend="aot_eager")
    got = function(x, branch, weight, normalized_shape=(3, 4), return_residual=True)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("whole", [False, True], ids=["graphs", "fullgraph"])
@pytest.mark.parametrize("wrong", WRONG_BRANCHES)
def test_a_wrong_argument_is_refused_with_its_sentence(wrong, whole):
    shape, dtype = WRONG_BRANCHES[wrong]
    addnorm.set_compile_mode("formula")
    function = torch.compile(addnorm.add_layer_norm, backend="eager", fullgraph=whole)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"branch has (shape|dtype) .*, expected "):
        function(torch.randn(3, 8), torch.ones(shape, dtype=dtype))
