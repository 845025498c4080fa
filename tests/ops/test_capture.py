"""Tests that calls keep their gradients, to the bit, on every route that records operators."""

import pytest
import torch
from torch import nn

import addnorm
from support.capture_routes import ROUTES, assert_gradients_survive
from support.pairwise import mark_slow

ops = torch.ops.addnorm

pytestmark = [  # of torch's own code
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Block(nn.Module):
    """Two projections around one call of the library, whose parameters are part of the module."""

    def __init__(self, call):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(12, 12), nn.Linear(12, 5)
        self.gain = nn.ParameterList([nn.Parameter(torch.randn(12)) for _ in range(3)])
        self.call = call

    def forward(self, x):
        weight, bias, scale = self.gain
        outputs = self.call(x.sin(), self.up(x), weight, bias, scale)
        return self.down(outputs[0]) + sum(z.cos().mean() for z in outputs[1:])


CALLS = {
    "LayerNorm": lambda x, b, w, c, s: (addnorm.add_layer_norm(x, b, w, c),),
    "LayerNorm and stream": lambda x, b, w, c, s: addnorm.add_layer_norm(x, b, w, c, return_residual=True),
    "RMSNorm and stream": lambda x, b, w, c, s: addnorm.add_rms_norm(x, b, w, return_residual=True),
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
    "two dimensions": lambda x, b, w, c, s: (addnorm.add_layer_norm(x, b, None, None, normalized_shape=(7, 12)),),
}  # fmt: skip


DEFAULT = [(route, call) for route in ROUTES for call in ("LayerNorm and stream", "options")]
DEFAULT += [("export", call) for call in CALLS] + [("jit.trace", "norm alone"), ("dispatch mode", "add alone")]
PAIRS = [(route, call) for route in ROUTES for call in CALLS]


@pytest.mark.usefixtures("operator_mode")
@pytest.mark.parametrize(("route", "call"), mark_slow(PAIRS, DEFAULT))
def test_gradients_survive_capture(route, call):
    x, x2 = torch.randn(2, 7, 12), torch.randn(2, 7, 12)
    assert_gradients_survive(route, lambda: Block(CALLS[call]), x, x2)


@pytest.mark.parametrize("call", CALLS)
def test_export_records_what_serving_needs(call):
    block, x = Block(CALLS[call]), torch.randn(2, 7, 12)
    graphs = []
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            program = torch.export.export(block, (x,))
        graphs.append([str(n.target) for n in program.graph.nodes if str(n.target).startswith("addnorm.")])
    assert graphs[0] == graphs[1]
    (name,) = graphs[0]
    assert name in ("addnorm.add_norm.default", "addnorm.add_norm_stream.default", "addnorm.add_norm_forward.default")


@pytest.mark.parametrize("name", ["add_norm", "add_norm_stream", "add_norm_forward"])
def test_forward_operators_are_differentiable(name):
    """Of every output, including y alone, and equal to eager's gradients to the bit."""
    residual, branch, weight, bias = (torch.randn(s, requires_grad=True) for s in ((3, 9), (3, 9), (9,), (9,)))
    inputs = residual, branch, weight, bias
    kind = 1 if name == "add_norm_forward" else True
    results = getattr(ops, name)(*inputs, 1e-5, kind)
    y, *rest = (results,) if isinstance(results, torch.Tensor) else results
    dy, dz = torch.randn(3, 9), torch.randn(3, 9)
    outputs, cotangents = ([y, rest[0]], [dy, dz]) if rest else ([y], [dy])
    actual = torch.autograd.grad(outputs, inputs, cotangents)
    y2, z2 = addnorm.add_rms_norm(residual, branch, weight, bias, eps=1e-5, return_residual=True)
    expected = torch.autograd.grad([y2, z2][: len(outputs)], inputs, cotangents)
    assert all(a.equal(e) for a, e in zip(actual, expected, strict=True))
    if len(rest) == 2:
        assert not rest[1].requires_grad
        assert rest[1].equal(getattr(ops, name).kernel(*inputs, 1e-5, kind)[2])


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_unrequested_outputs_stay_placeholders(outputs):
    inputs = [torch.randn(3, 9, requires_grad=True), torch.randn(3, 9), None, None, 1e-5, 0]
    results = ops.add_norm_forward(*inputs, outputs=outputs)
    expected = ops.add_norm_forward.kernel(*inputs, outputs=outputs)
    assert [t.shape for t in results] == [t.shape for t in expected]
    assert all(a.equal(e) for a, e in zip(results, expected, strict=True))


def test_exported_program_has_second_derivatives():
    block = Block(CALLS["options and stream"]).double()
    x = torch.randn(1, 7, 12, dtype=torch.float64, requires_grad=True)
    program = torch.export.export(block, (x,)).module()
    assert torch.autograd.gradgradcheck(lambda x: program(x).sum(dim=(0, 1)), (x,), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_captured_autocast_has_eagers_dtypes(dtype):
    block, x = Block(CALLS["LayerNorm and stream"]), torch.randn(2, 7, 12)
    with torch.autocast("cpu", dtype=dtype):
        expected = block(x)
        actual = torch.export.export(block, (x,)).module()(x)
    assert actual.dtype == expected.dtype
    assert actual.equal(expected)


MODELS = {
    "pre-LN": lambda: addnorm.nn.Encoder(1, 16, nhead=2, wiring="pre_ln").eval(),
    "post-LN": lambda: addnorm.nn.Encoder(1, 16, nhead=2, wiring="post_ln").eval(),
    "pre-LN in training": lambda: addnorm.nn.Encoder(1, 16, nhead=2, wiring="pre_ln"),
    "AddNorm": lambda: addnorm.AddNorm(16, dropout=0.0),
}
EXPORTS = [(name, strict, grad) for name in MODELS for strict in (False, True) for grad in (False, True)]
FIRST = [("pre-LN", False, False), ("post-LN", False, True), ("AddNorm", True, False)]


@pytest.mark.parametrize(("name", "strict", "grad_mode"), mark_slow(EXPORTS, FIRST))
def test_export_with_dynamic_shapes(name, strict, grad_mode):
    torch.manual_seed(1)
    model = MODELS[name]()
    single = isinstance(model, addnorm.nn.Encoder)
    batch, tokens = torch.export.Dim("batch", max=512), torch.export.Dim("tokens", min=2, max=64)
    shape = {0: batch, 1: tokens}
    dynamic = (shape,) if single else (shape, shape)
    inputs = [torch.randn(4, 8, 16) for _ in dynamic]
    with torch.set_grad_enabled(grad_mode):
        program = torch.export.export(model, tuple(inputs), dynamic_shapes=dynamic, strict=strict).module()
        for size in ((4, 8), (3, 5), (70, 33)):
            inputs = [torch.randn(*size, 16) for _ in dynamic]
            torch.testing.assert_close(program(*inputs), model(*inputs), rtol=0, atol=2e-6)
