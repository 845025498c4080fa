"""Tests that decomposed programs contain no operator of the library and compute the same, with dynamic shapes."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import addnorm
from addnorm.ops.schema import OVERLOADS, SCHEMAS
from addnorm.ops.streams.kinds import GATE_KINDS
from addnorm.ops.streams.schema import SCHEMAS as STREAMS
from support.cases import DTYPES, VARIANTS, make
from support.deployed import Calls, dynamic, operators
from support.fused_model import PreNormModel, X
from support.stacks import encoder
from support.stream_calls import make_call

# In eps of the dtype, for values of about 4: a rounding, or the order of the sums of a row.
ROUNDINGS = {torch.float64: 32, torch.float32: 32, torch.bfloat16: 4, torch.float16: 4}


def assert_equal_calls(actual, expected):
    for name, tensors in expected.items():
        # A rounding of z that goes the other way is seen in y, whatever its dtype.
        tolerance = max(ROUNDINGS[tensor.dtype] * torch.finfo(tensor.dtype).eps for tensor in tensors.values())
        for key, tensor in tensors.items():
            assert_close(actual[name][key], tensor, rtol=tolerance, atol=tolerance, msg=f"{name}: {key}")


def test_table_has_every_functional_operator():
    table = addnorm.decompositions(core_aten=False)
    assert {operator.name().removeprefix("addnorm::") for operator in table} == {
        f"{name}{overload}"
        for name in (*STREAMS, *SCHEMAS)
        for overload in OVERLOADS.get(name, ("",))
        if name != "add_norm_out"
    }
    whole = addnorm.decompositions()
    assert set(table) < set(whole)
    assert torch.ops.aten.t.default not in table


SOME = {name: VARIANTS[name] for name in ("LayerNorm", "RMSNorm", "dropout", "everything, RMSNorm", "the add alone")}


@pytest.mark.parametrize(
    ("dtypes", "variants"),
    [
        ("float32", VARIANTS),
        ("bfloat16 with float32 parameters", SOME),
        *(pytest.param(d, VARIANTS, marks=pytest.mark.slow) for d in DTYPES if d != "float32"),
    ],
)
def test_decomposed_calls_equal_the_operators(dtypes, variants):
    """Every option, dropout included, in one program with dynamic shapes."""
    module = Calls(variants, dtypes)
    inputs = module.inputs(4, 7)
    with torch.set_grad_enabled(dtypes == "float32"):
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic(2))
    assert len(operators(program)) == len(variants)
    program = program.run_decompositions(addnorm.decompositions(core_aten=dtypes != "float64"))
    assert operators(program) == []
    for sizes in ((4, 7), (1, 5), (3, 1), (0, 4)):
        inputs = module.inputs(*sizes, seed=1)
        assert_equal_calls(program.module()(*inputs), module(*inputs))


def test_decomposed_dropout_draws_eagers_mask():
    class Model(nn.Module):
        def forward(self, x):
            return addnorm.add_layer_norm(x, x, dropout_p=0.5)

    x = torch.randn(5, 9)
    program = torch.export.export(Model(), (x,), dynamic_shapes=({0: torch.export.Dim("rows", max=64)},))
    program = program.run_decompositions(addnorm.decompositions()).module()
    x = torch.randn(7, 9)
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = Model()(x)
        torch.manual_seed(seed)
        assert_close(program(x), expected)


def test_decomposed_program_has_gradients():
    model = encoder()
    x = torch.randn(2, 5, 16)
    program = torch.export.export(model, (x,)).run_decompositions(addnorm.decompositions()).module()
    assert_same_gradients(program, model, x)


def assert_same_gradients(program, model, x):
    for module in (program, model):
        module(x).square().sum().backward()
    for name, parameter in program.named_parameters():
        assert_close(parameter.grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-5, msg=name)


JOINT = {name: make(name, "float32", (3, 8)) for name in ("LayerNorm", "layer_scale (d,)")}
JOINT |= {kind: make_call(3, 8, (4,), kind) for kind in GATE_KINDS}


@pytest.mark.parametrize("name", JOINT)
def test_joint_graph_decomposes_to_torch_operators(name):
    """The backward operators, with options and without."""
    call = JOINT[name]

    def differentiate(*tensors):
        outputs = call(dict(zip(call.tensors, tensors, strict=True)))
        return torch.autograd.grad(sum(t.sin().sum() for t in outputs.values()), tensors)

    inputs = [t.clone().requires_grad_() for t in call.tensors.values()]
    opaque = make_fx(differentiate)(*inputs)
    graph = make_fx(opaque, decomposition_table=addnorm.decompositions(core_aten=False))(*inputs)
    names = [[str(node.target) for node in g.graph.nodes if "addnorm" in str(node.target)] for g in (opaque, graph)]
    assert len(names[0]) == 2
    assert names[0][1].endswith("_backward.default")
    assert names[1] == []
    assert_close(graph(*inputs), differentiate(*inputs), rtol=1e-4, atol=1e-4)


def test_out_keeps_its_operator():
    class Model(nn.Module):
        def forward(self, x):
            y = torch.empty_like(x)
            addnorm.add_layer_norm(x, x, out=y)
            return y + 1

    x = torch.randn(3, 8)
    with torch.no_grad():
        program = torch.export.export(Model(), (x,)).run_decompositions(addnorm.decompositions())
    assert "add_norm_out" in str(program)
    assert_close(program.module()(x), Model()(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:::torch")
def test_export_fused_keeps_the_calls_and_gradients():
    model = PreNormModel(layers=1).eval()
    with pytest.raises(ValueError, match=r"^model is PreNormModel, which is not fused: .*\.$"):
        addnorm.export_fused(model, (X,))
    fusion = addnorm.fuse(model, X, benchmark=False)
    program = addnorm.export_fused(model, (X,), dynamic_shapes=dynamic(1))
    names = operators(program)
    assert len(names) == len(fusion.fused)
    assert {*names} <= {"addnorm.add_norm.default", "addnorm.add_norm_stream.default"}
    module, x = program.module(), torch.randn(3, 4, X.shape[-1])
    assert_close(module(x), model(x))
    assert_same_gradients(module, model, x)
