"""Tests that calls keep their gradients, to the bit, on every route that records operators."""

import functools
import itertools

import pytest
import torch
from torch import nn

import addnorm
from addnorm.ops.streams.kinds import GATE_KINDS
from support.capture_routes import ROUTES, assert_gradients_survive
from support.deployed import operators
from support.equality import assert_same
from support.pairwise import mark_slow, rotate
from support.stream_calls import make_call
from support.stream_stacks import WIRINGS, D, make

pytestmark = [  # of torch's own code
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Block(nn.Module):
    """Two projections around one call of the library, whose parameters are part of the module."""

    def __init__(self, call):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, 5)
        self.gain = nn.ParameterList([nn.Parameter(torch.randn(D)) for _ in range(3)])
        self.call = call

    def forward(self, x):
        weight, bias, scale = self.gain
        outputs = self.call(x.sin(), self.up(x), weight, bias, scale)
        return self.down(outputs[0]) + sum(z.cos().mean() for z in outputs[1:])


CALLS = {
    "LayerNorm": lambda x, b, w, c, s: (addnorm.add_layer_norm(x, b, w, c),),
    "LayerNorm and stream": lambda x, b, w, c, s: addnorm.add_layer_norm(x, b, w, c, return_residual=True),
    "norm alone": lambda x, b, w, c, s: (addnorm.layer_norm(b, w, c),),
    "add alone": lambda x, b, w, c, s: (addnorm.add_residual(x, b, layer_scale=s, branch_bias=c),),
    "options": lambda x, b, w, c, s: (addnorm.add_rms_norm(x, b, w, c, layer_scale=s, residual_scale=1.5),),
    "options and stream": lambda x, b, w, c, s: addnorm.add_layer_norm(
        x, b, w, c, residual_scale=s, return_residual=True, row_scale=x[..., 0]
    ),
    "dropout and a float64 stream": lambda x, b, w, c, s: addnorm.add_layer_norm(
        x, b, w, c, dropout_p=0.4, seed=torch.tensor(7), residual_dtype=torch.float64, out_dtype=torch.float32,
        return_residual=True,
    )[:1],
    "two dimensions": lambda x, b, w, c, s: (addnorm.add_layer_norm(x, b, None, None, normalized_shape=(7, D)),),
}  # fmt: skip


STACKS = (
    "static_hyper_connections",
    "mhc",
    "independent_hc",
    "hyper_connections",
)  # all kinds of gates: mhc's head has "gates"


def make_stack(name):
    torch.manual_seed(3)
    return make(name, number=2)


BLOCKS = {name: functools.partial(Block, call) for name, call in CALLS.items()}
BLOCKS |= {name: functools.partial(make_stack, name) for name in STACKS}


@pytest.mark.usefixtures("operator_mode")
@pytest.mark.parametrize(("route", "name"), [*rotate([*ROUTES], [*CALLS], 3), *rotate([*ROUTES], STACKS, 1)])
def test_gradients_survive_capture(route, name):
    assert_gradients_survive(route, BLOCKS[name], torch.randn(2, 7, D), torch.randn(2, 7, D))


@pytest.mark.parametrize("name", BLOCKS)
def test_export_records_what_serving_needs(name):
    block, x = BLOCKS[name](), torch.randn(2, 7, D)
    graphs = []
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            graphs.append(operators(torch.export.export(block, (x,))))
    assert graphs[0] == graphs[1]
    operator, *more = {*graphs[0]}
    expected = ("add_norm_streams",) if name in STACKS else ("add_norm", "add_norm_stream", "add_norm_forward")
    assert operator in [f"addnorm.{one}.default" for one in expected]
    assert more == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_captured_autocast_has_eagers_dtypes(dtype):
    block, x = Block(CALLS["LayerNorm and stream"]), torch.randn(2, 7, D)
    with torch.autocast("cpu", dtype=dtype):
        expected = block(x)
        actual = torch.export.export(block, (x,)).module()(x)
    assert actual.equal(expected)


@pytest.mark.parametrize("kind", GATE_KINDS)
def test_autocast_changes_no_bit_of_a_call(kind):
    """Parameters and arithmetic stay in float32, also in a captured call and under a transform."""
    call = make_call(3, D, (4,), kind, dtype=torch.bfloat16)
    expected = call()
    module = nn.Module()
    module.forward = call.__call__  # of a dataclass, which is not a function
    with torch.autocast("cpu", dtype=torch.float16):
        results = [call(), call(call.leaves()), torch.export.export(module, (call.tensors,)).module()(call.tensors)]
        transformed = torch.func.vjp(call, call.tensors)[0]
    for result in results:
        assert_same(result, expected)
    assert [t.dtype for t in transformed.values()] == [t.dtype for t in expected.values()]
    torch.testing.assert_close(transformed, expected, rtol=2**-7, atol=1e-2)  # two roundings of bfloat16 apart


MODELS = {
    "pre-LN": lambda: addnorm.nn.Encoder(1, D, nhead=2, wiring="pre_ln").eval(),
    **{name: functools.partial(make_stack, name) for name in WIRINGS},
}
EXPORTS = itertools.product(MODELS, (False, True), (False, True))
FIRST = [
    ("pre-LN", False, True),
    ("mhc", True, False),
    ("hyper_connections", False, True),
    ("attention_residuals_three_reads", False, False),
]


@pytest.mark.parametrize(("name", "strict", "grad_mode"), mark_slow(EXPORTS, FIRST))
def test_export_with_dynamic_shapes_decomposes(name, strict, grad_mode):
    """Programs that serve batches of other sizes, in torch's own operators on request."""
    torch.manual_seed(1)
    model = MODELS[name]()
    shape = {0: torch.export.Dim("batch", max=512), 1: torch.export.Dim("tokens", min=2, max=64)}
    with torch.set_grad_enabled(grad_mode):
        program = torch.export.export(model, (torch.randn(4, 8, D),), dynamic_shapes=(shape,), strict=strict)
    decomposed = program.run_decompositions(addnorm.decompositions())
    assert operators(decomposed) == []
    for size in ((4, 8), (3, 5), (70, 33)):
        x = torch.randn(*size, D)
        with torch.set_grad_enabled(grad_mode):
            expected = model(x)
            torch.testing.assert_close(program.module()(x), expected, rtol=0, atol=2e-6)
            torch.testing.assert_close(decomposed.module()(x), expected, rtol=1e-4, atol=1e-5)
