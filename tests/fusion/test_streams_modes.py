"""Tests of models with several streams, fused: modes of use in which the graph, its gradients or its dtypes are others."""

import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import addnorm
from addnorm.fusion.streams import OTHER_AXIS
from addnorm.fusion.unrecognized import UNRECOGNIZED
from support.fused_model import QUIET, count_calls, fuse
from support.graph_capture import capture_graphs, relative_difference
from support.random_programs import D as WIDTH
from support.random_programs import random_program
from support.several_streams import make_mhc
from support.stream_boundary import (
    Boundary,
    D,
    N,
    X,
    assert_as_exact,
    assert_close,
    broadcast_sums,
    deepseek,
    outer,
    read,
    train,
)
from support.stream_steps import noise

pytestmark = QUIET
LIMIT = 1e-5  # relative, of float32


class Layers(nn.Module):
    """Two boundaries, the second of which reads the streams of the first, and the sum of their norms; `run` runs a layer."""

    def __init__(self, function=deepseek, run=lambda layer, x: layer(x)):
        super().__init__()
        self.layers, self.run = nn.ModuleList(Boundary(function) for _ in range(2)), run

    def forward(self, x):
        total = 0.0
        for layer in self.layers:
            x, y = self.run(layer, x)
            total = total + y
        return x, total


def reasons_of(fusion):
    """Return why each boundary is not fused, and what is remarked of it."""
    return [(one.reason, one.remark) for one in fusion.boundaries]


def test_inductor_compiles_the_fused_graph():
    model = Boundary(deepseek)
    fusion = fuse(model, X, compile=True)
    assert reasons_of(fusion) == [(None, "")]
    assert fusion.is_applied
    assert_close(model, Boundary(deepseek), X)
    compiled = Boundary(deepseek)
    assert_as_exact(compiled, torch.compile(compiled, backend="addnorm", options={"inductor": True}))


@pytest.mark.parametrize(
    "sizes", [None, {0: torch.export.Dim("b"), 1: torch.export.Dim("t")}], ids=["static", "dynamic"]
)
def test_exported_program_has_the_fused_call(sizes):
    model = Boundary(deepseek)
    fuse(model, X)
    program = addnorm.export_fused(model, (X,), dynamic_shapes=None if sizes is None else {"x": sizes})
    assert sum("add_norm_streams" in str(node.target) for node in program.graph.nodes) == 1
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert_close(torch.export.load(file).module(), Boundary(deepseek), X if sizes is None else torch.randn(3, 7, N, D))


def test_broadcast_sums_are_fused_under_autocast():
    model = Boundary(broadcast_sums)
    capture = capture_graphs(model)

    def run(call, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(x)

    assert_as_exact(model, capture.compiled, run=run, dtype=torch.bfloat16)
    assert reasons_of(capture) == [(None, "")]


def test_products_that_autocast_rounds_are_reported():
    """A product of matrices rounds the streams to bfloat16, which one call would not do."""
    x = noise(2, 5, D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fusion = fuse(make_mhc("stacked", layers=1), x)
    assert {(one.kind, one.streams, one.reason) for one in fusion.unfused} == {("none", 4, UNRECOGNIZED)}
    assert len(fusion.unfused) == 2
    assert not fusion.fused


def test_autocast_inside_separates_write_and_read():
    def inside(m, x, w, a, b, c):
        new = a @ x + outer(b, w)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.dtype != torch.float64):
            return new, m.norm(read(c, new))

    model = Boundary(inside)
    capture = capture_graphs(model)
    assert_as_exact(model, capture.compiled, dtype=torch.bfloat16)
    assert [(one.kind, one.reason) for one in capture.boundaries] == [("none", None), ("layer", None)]
    assert {one.remark for one in capture.boundaries} == {"autocast or the grad mode changes inside"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_model_in_low_precision_is_proven(dtype):
    model, x = make_mhc("stacked", "single pass", layers=1).to(dtype), torch.randn(2, 5, D).to(dtype)
    fusion = fuse(model, x)
    assert fusion.proof.holds
    assert not fusion.unfused
    assert {one.dtype for one in fusion.fused} == {str(dtype)[6:]}


@pytest.mark.parametrize("trained", ["f", "gates", "norm"])
def test_frozen_parameters_have_no_gradient(trained):
    model = Boundary(deepseek)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(trained))
    capture = capture_graphs(model)
    assert_as_exact(model, capture.compiled)
    assert [out.requires_grad for out in capture.compiled(X)] == [out.requires_grad for out in model(X)]
    assert capture.reasons == [None]


@pytest.mark.parametrize("name", ["x", "w", "a", "b", "c"])
def test_gradient_of_one_operand_alone(name):
    def alone(m, *tensors):
        return deepseek(m, *(t if name == own else t.detach() for own, t in zip("xwabc", tensors, strict=True)))

    model = Boundary(alone)
    capture, x = capture_graphs(model), X.clone().requires_grad_()
    model.norm.requires_grad_(False)

    def gradients(call):
        model.zero_grad()
        x.grad = None
        sum(out.pow(3).sum() for out in call(x) if out.requires_grad).backward()
        return [p.grad for p in (x, *model.parameters()) if p.grad is not None]

    after, before = gradients(capture.compiled), gradients(model)
    assert all(relative_difference(*pair) < LIMIT for pair in zip(before, after, strict=True))


def test_checkpointed_layers_are_fused():
    model = Layers(run=lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    fusion = fuse(model, X)
    assert reasons_of(fusion) == [(None, "")] * 2
    plain = Layers()
    plain.load_state_dict(model.state_dict())
    pairs = zip(train(plain, plain, X), train(model, model, X), strict=True)
    assert all(relative_difference(*pair) < LIMIT for pair in pairs)


def test_fused_model_is_called_and_loaded():
    model, plain = Layers(), Layers()
    fuse(model, X)
    assert count_calls(model, X) == 2
    with torch.inference_mode():
        assert_close(model, plain, X)
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.1)
    model.load_state_dict(plain.state_dict())
    assert_close(model, plain, X, X.mT.contiguous().mT, X[:, :, :1].expand_as(X), X[:1])
    assert [y.shape for y in model(X[:, :0])] == [y.shape for y in plain(X[:, :0])]


def test_norm_that_nothing_reads_stays_out_of_the_call():
    model = Layers()
    model.forward = lambda x: model.layers[1](model.layers[0](x)[0])
    capture = capture_graphs(model)
    sum(y.square().sum() for y in capture.compiled(X)).backward()
    assert [one.kind for one in capture.boundaries if one.is_fused] == ["none", "layer"]
    assert model.layers[0].norm.weight.grad is None
    assert model.layers[1].norm.weight.grad is not None


def test_fuse_in_inference_mode():
    model = Boundary(deepseek)
    with torch.inference_mode():
        fusion = fuse(model, X)
        assert reasons_of(fusion) == [(None, "")]
        assert_close(model, Boundary(deepseek), X)


@pytest.mark.parametrize(("n", "d"), [(1, 16), (4, 4), (16, 4), (4, 1), (17, 16)])
def test_unusual_numbers_of_streams_and_features(n, d):
    model, x = Boundary(deepseek, n, d), torch.randn(2, 3, n, d)
    capture = capture_graphs(model)
    assert_as_exact(model, capture.compiled, x)
    assert capture.reasons == ([None] if 1 < n < 17 and d > 1 else [])


def test_dimensions_that_can_be_exchanged_follow_the_read():
    """X + b w has two meanings if d is small; here the read sums over the last dimension."""

    def turned(m, x, w, a, b, c):
        new = x + outer(b, w)
        return new, nn.functional.layer_norm(new.mean(-1), (N,))

    model = Boundary(turned)
    capture = capture_graphs(model)
    assert_as_exact(model, capture.compiled)
    assert {one.remark for one in capture.boundaries} == {OTHER_AXIS}


@pytest.mark.parametrize("seed", range(300, 306))
def test_random_programs_in_float64(seed):
    """In float64 no rounding hides a difference. The loss is random; gradients of sums that cancel are compared in size."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = random_program(seed)
        model.keeps_answer = False
        x = noise(2, 5, WIDTH, seed=seed)
        capture = capture_graphs(model)
        plain, fused = (train(model, lambda x, call=call: (call(x),), x) for call in (model, capture.compiled))
    finally:
        torch.set_default_dtype(before)
    is_tuple = model.form == "tuple"  # of separate tensors, which are not fused
    assert is_tuple or any(one.reason is None and one.streams for one in capture.boundaries)
    size = max(t.norm() for t in plain)
    assert all((a - b).norm() <= 1e-8 * (a.norm() + 0.01 * size) for a, b in zip(fused, plain, strict=True))
