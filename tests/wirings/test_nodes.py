"""Tests of the autograd nodes of computed coefficients, which save little for the backward: they equal their formulas."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.testing import assert_close

from addnorm.nn import Place
from addnorm.nn.step import collapse
from addnorm.ops import attend
from addnorm.wirings.coefficients import GatedRead, SourceAttention, gated
from support.oracle import UNIT, worst

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
N, D = 3, 12
GATES = gated._GatesFunction, gated._compute_gates
READS = attend.AttendFunction, attend.reads_of


def gate_arguments(shape, dtype, injects=True):
    streams = torch.randn(*shape, N, D).mul(3).to(dtype)
    project = torch.randn(N, N * D) if injects else None
    return [streams, torch.randn(N, D), torch.randn(5, N * D), torch.randn(N * D, 5), project, 1e-6]


def read_arguments(shape, dtype, n=2, reads=2, normed_values=False, d=D, has_weight=True):
    rows = (torch.randn(*shape, d).mul(0.5 + k).to(dtype) for k in range(n))
    weight = torch.randn(d) if has_weight else None
    return [2 * torch.randn(reads, d) / d**0.5, weight, 1e-3, normed_values, *rows]


def strided_arguments(shape, dtype):
    """Return sources of two dtypes, wider than any block of the kernels, that are not contiguous."""
    query, weight, *numbers, first, second = read_arguments(shape, dtype, d=2 * 77)
    return [query[:, ::2], weight[::2], *numbers, first[..., ::2], second[..., 1::2].float()]


CASES = {
    "gates": (GATES, gate_arguments),
    "gates without a write": (GATES, lambda shape, dtype: gate_arguments(shape, dtype, False)),
    "reads": (READS, read_arguments),
    "reads of one source": (READS, lambda shape, dtype: read_arguments(shape, dtype, 1, 1)),
    "one read": (READS, lambda shape, dtype: read_arguments(shape, dtype, 5, 1, d=77)),
    "one read of many sources": (READS, lambda shape, dtype: read_arguments(shape, dtype, 19, 1, d=64)),
    "reads of normed values": (READS, lambda shape, dtype: read_arguments(shape, dtype, 3, 3, True, has_weight=False)),
    "reads of strided sources": (READS, strided_arguments),
}


def widen(arguments):
    return [t.double() if isinstance(t, torch.Tensor) else t for t in arguments]


def gradients(compute, arguments, frozen=None, create_graph=False, place=None, batch=()):
    """Return the outputs, and the gradients of all tensors but one; the backward runs in the context `place`.

    `batch` is the shape of several cotangents, which are differentiated at once.
    """
    inputs = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]
    leaves = [t.requires_grad_() for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and i != frozen]
    outputs = [t for t in compute(*inputs) if t is not None and t.requires_grad]
    n = math.prod(batch)
    cotangents = [torch.linspace(-1, 2, n * t.numel(), dtype=t.dtype).reshape(*batch, *t.shape).sin() for t in outputs]
    with place or nullcontext():
        first = torch.autograd.grad(
            outputs, leaves, cotangents, create_graph=create_graph, is_grads_batched=bool(batch)
        )
    if not create_graph:
        return [*outputs, *first]
    return torch.autograd.grad(sum(t.sin().sum() for t in first), leaves)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(2, 7), (0, 3), ()], ids=str)
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_node_equals_its_formula(name, shape, dtype):
    (node, formula), make = CASES[name]
    arguments = make(shape, dtype)
    exact = gradients(formula, widen(arguments))
    for ours, theirs, expected in zip(
        gradients(node.apply, arguments), gradients(formula, arguments), exact, strict=True
    ):
        assert ours.dtype == theirs.dtype
        if expected.numel():  # twice the formula's own error, and some roundings: the sums are in another order
            bound = 2 * worst(theirs - expected) + (16 * UNIT[f32] + UNIT[ours.dtype]) * worst(expected)
            assert worst(ours - expected) <= bound


@pytest.mark.parametrize("name", CASES)
def test_node_takes_several_cotangents_at_once(name):
    (node, formula), make = CASES[name]
    arguments = widen(make((2, 3), f32))
    found = (gradients(compute, arguments, batch=(3,)) for compute in (node.apply, formula))
    assert_close(*found, rtol=1e-12, atol=1e-12)  # of float64: the sums are in another order


@pytest.mark.parametrize("name", ["gates", "gates without a write", "reads", "reads of normed values"])
def test_node_has_second_derivatives_and_frozen_inputs(name):
    (node, formula), make = CASES[name]
    arguments = widen(make((2,), f64))
    arguments[0 if "gates" in name else -1][0] = 0.0  # a sublayer that has learned nothing
    for frozen in (None, *(i for i, t in enumerate(arguments) if isinstance(t, torch.Tensor))):
        for create_graph in (False, True):
            ours, expected = (gradients(f, arguments, frozen, create_graph) for f in (node.apply, formula))
            assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["gates", "reads"])
def test_backward_inside_autocast_is_not_rounded(name):
    (node, _), make = CASES[name]
    arguments = make((2, 7), f32)
    for create_graph, tolerance in ((False, 0.0), (True, 1e-4)):
        places = None, torch.autocast("cpu", bf16)
        expected, actual = (gradients(node.apply, arguments, None, create_graph, place) for place in places)
        assert_close(actual, expected, rtol=tolerance, atol=tolerance / 10)


def test_compiled_autograd_has_the_gradients_of_reads():
    (node, _), make = CASES["reads"]
    arguments = make((2,), f32)
    expected = gradients(node.apply, arguments)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        assert_close(gradients(node.apply, arguments), expected)


@pytest.mark.parametrize("kind", [GatedRead, SourceAttention])
def test_node_is_left_where_the_formula_is_needed(kind, monkeypatch):
    module = kind(D, N, 1, Place(1, 0, 3, 2))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    rows = torch.randn(2, N, D) if kind is GatedRead else torch.randn(N, 2, D).unbind()
    node, _ = GATES if kind is GatedRead else READS

    def read(rows):
        if kind is GatedRead:
            return module(rows).collapse
        reads = module.read(rows)
        return collapse(module(rows).collapse[0], rows) if reads is None else reads[0]

    called, apply = [], node.apply
    monkeypatch.setattr(node, "apply", lambda *given: called.append(1) or apply(*given))
    expected = read(rows)
    assert called == [1]
    assert_close(torch.func.vmap(read)(rows), expected)
    with torch.no_grad():
        assert_close(read(rows), expected)
    torch.export.export(module, (rows,))
    assert len(called) == (1 if kind is GatedRead else 2)  # the operator also serves without gradients
