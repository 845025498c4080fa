"""Tests that calls of `add_norm_streams` keep their outputs and gradients, to the bit, on every route that records operators."""

from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import checkpoint

import addnorm
from addnorm.ops.streams.kinds import KINDS
from support.capture_routes import ROUTES, assert_gradients_survive
from support.pairwise import mark_slow
from support.stream_calls import make_call

pytestmark = [  # of torch's own code
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
N, D = 3, 12


class Block(nn.Module):
    """Coefficients of each token and one call of the library, whose parameters are part of the module."""

    def __init__(self, kind, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        call = make_call(N, D, (1,), kind, norm="rms" if kind in ("gates", "hyper") else "layer")
        call = replace(call, iterations=3)
        own = ("project", "scale", "base", "weight", "bias")
        self.names = [name for name in own if name in call.tensors]
        self.values = nn.ParameterList([nn.Parameter(call.tensors[name]) for name in self.names])
        self.coefficients, self.write = nn.Linear(D, N * (N + 2)), nn.Linear(D, D)
        self.down, self.call, self.dtype = nn.Linear(D, 5), call, dtype

    def forward(self, x):
        c = self.coefficients(x)
        streams = torch.stack([x.sin(), x.cos(), 2.0 * x], -2).to(self.dtype)
        tensors = {"streams": streams, "branch": self.write(x).to(self.dtype), "inject": c[..., :N]}
        tensors["mix"] = c[..., N : N * (N + 1)].unflatten(-1, (N, N))
        if self.call.kind == "given":
            tensors["collapse"] = c[..., -N:]
        outputs = self.call(tensors | dict(zip(self.names, self.values, strict=True)))
        read = self.down(outputs.pop("read").to(self.down.weight.dtype))
        return read + sum(t.float().cos().mean() for t in outputs.values())


def make_inputs():
    return torch.randn(2, 7, D), torch.randn(2, 7, D)


PAIRS = [(route, kind) for route in ROUTES for kind in KINDS]
DEFAULT = [(route, [*KINDS][i % len(KINDS)]) for i, route in enumerate(ROUTES)]


@pytest.mark.usefixtures("operator_mode")
@pytest.mark.parametrize(("route", "kind"), mark_slow(PAIRS, DEFAULT))
def test_gradients_survive_capture(route, kind):
    assert_gradients_survive(route, lambda: Block(kind), *make_inputs())


@pytest.mark.parametrize("kind", KINDS)
def test_modes_give_the_bits_of_an_eager_call(kind):
    block, (x, _) = Block(kind), make_inputs()
    expected = block(x)
    with torch.no_grad():
        assert block(x).equal(expected)
    with torch.inference_mode():
        assert block(x).equal(expected)
    grads = []
    for reentrant in (None, False, True):
        leaf = x.clone().requires_grad_()
        y = block(leaf) if reentrant is None else checkpoint(block, leaf, use_reentrant=reentrant)
        assert y.equal(expected)
        block.zero_grad()
        y.square().sum().backward()
        grads.append([leaf.grad, *(p.grad for p in block.parameters())])
    assert all(a.equal(b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_no_bit_of_a_call(kind):
    """Parameters and arithmetic stay in float32, also in a captured call and under a transform."""
    call = make_call(N, D, (4,), kind, dtype=torch.bfloat16)
    expected = call()
    module = nn.Module()
    module.forward = call.__call__  # of a dataclass, which is not a function
    with torch.autocast("cpu", dtype=torch.float16):
        results = [call(), call(call.leaves()), torch.export.export(module, (call.tensors,)).module()(call.tensors)]
        transformed = torch.func.vjp(call, call.tensors)[0]
    for result in results:
        assert all(t.equal(expected[name]) and t.dtype == expected[name].dtype for name, t in result.items())
    assert [t.dtype for t in transformed.values()] == [t.dtype for t in expected.values()]
    torch.testing.assert_close(transformed, expected, rtol=2**-7, atol=1e-2)  # two roundings of bfloat16 apart


EXPORTS = [(kind, strict, grad_mode) for kind in KINDS for strict in (False, True) for grad_mode in (False, True)]


@pytest.mark.parametrize(("kind", "strict", "grad_mode"), mark_slow(EXPORTS, [("hyper", False, True)]))
def test_export_with_dynamic_shapes_decomposes(kind, strict, grad_mode):
    """One operator that serves batches of other sizes, and torch's own operators on request."""
    block = Block(kind).eval()
    sizes = {0: torch.export.Dim("batch", max=512), 1: torch.export.Dim("tokens", min=2, max=64)}
    with torch.set_grad_enabled(grad_mode):
        program = torch.export.export(block, (torch.randn(4, 8, D),), dynamic_shapes=(sizes,), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if "addnorm" in str(node.target)]
    assert targets == ["addnorm.add_norm_streams.default"]
    decomposed = program.run_decompositions(addnorm.decompositions())
    assert "addnorm" not in decomposed.graph_module.code
    for size in ((1, 5), (70, 33)):
        x = torch.randn(*size, D)
        assert program.module()(x).equal(block(x))
        torch.testing.assert_close(decomposed.module()(x), block(x), rtol=1e-4, atol=1e-5)


BACKENDS = [(kind, backend) for backend in ("aot_eager", "inductor") for kind in KINDS]


@pytest.mark.usefixtures("operator_mode")
@pytest.mark.parametrize(("kind", "backend"), mark_slow(BACKENDS, [("manifold", "aot_eager")]))
def test_dynamic_batches_compile_once(kind, backend):
    """Inductor computes what is around the operator with other roundings, here of bfloat16."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    block = Block(kind, torch.bfloat16)
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for rows in (3, 17):
        x = torch.randn(rows, 7, D)
        results = []
        for call in (block, compiled):
            block.zero_grad()
            y = call(x)
            y.square().sum().backward()
            results.append([y, *(p.grad for p in block.parameters())])
        for actual, expected in zip(*reversed(results), strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2 * (1 + expected.abs().max().item()))
        counts.append(counter.frame_count)
    if backend == "aot_eager":  # Inductor has guards of its own
        assert counts[0] == counts[1]
