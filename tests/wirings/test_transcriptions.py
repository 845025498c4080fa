"""Wirings of several streams against plain transcriptions of their sources: values and every gradient, in float64.

Parameters are far from their initial values, and streams differ from the start where a wiring has several.
"""

import functools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from addnorm import Learned, ResidualStack, Wiring, wirings
from addnorm.wirings import Computed, Head, Stage
from addnorm.wirings.coefficients import SigmoidRead
from support import stream_formulas
from support.stream_stacks import Branch, D, perturb
from support.transformer_inputs import compute_gradients

START = (1.0, -0.4, 1.7, 0.3)  # factors of the embedding in each stream


def make_stack(wiring, num_sublayers=6, reads=None, **options):
    """Return a float64 stack with perturbed parameters; `reads[i]` are the inputs of sublayer i."""
    sublayers = [Branch(k) for k in reads or [1] * num_sublayers]
    return perturb(ResidualStack(sublayers, D, wiring, **options).double())


def function(norm):
    """Return a norm module's formula, those of several, or None."""
    if norm is None:
        return None
    if isinstance(norm, nn.ModuleList):
        return [function(each) for each in norm]
    if isinstance(norm, nn.LayerNorm):
        return lambda x: F.layer_norm(x, (D,), norm.weight, norm.bias, norm.eps)
    eps = torch.finfo(torch.float64).eps if norm.eps is None else norm.eps
    return lambda x: stream_formulas.rms(x, eps) * (1.0 if norm.weight is None else norm.weight)


def parts(stack):
    """Return the sublayers, their input norms and the final norm, as functions."""
    connections = stack.connections
    return [c.sublayer for c in connections], [function(c.norm_in) for c in connections], function(stack.norm_final)


def coefficients(stack):
    return [connection.coefficients for connection in stack.connections]


def unequal(wiring):
    """Return a wiring whose streams differ from the start."""
    return replace(wiring, embedding=START[: len(wiring.embedding)])


def streams(x, n):
    return [factor * x for factor in START[:n]]


CASES = {}


def case(stack):
    """Register a transcription for the stack that a function makes."""
    return lambda expected: CASES.setdefault(expected.__name__, (stack, expected))


@case(lambda: make_stack(unequal(wirings.hyper_connections(3, dynamic=False))))
def static_hyper_connections(stack, x):
    return stream_formulas.static_hyper_connections(streams(x, 3), *parts(stack), coefficients(stack))


@case(lambda: make_stack(unequal(wirings.hyper_connections(3)), norm="rms", eps=1e-2))
def dynamic_hyper_connections(stack, x):
    return stream_formulas.dynamic_hyper_connections(streams(x, 3), *parts(stack), coefficients(stack))


def strong(stack):
    """Let the streams move the coefficients, and the mixing matrices differ from the identity."""
    with torch.no_grad():
        for c in coefficients(stack):
            c.scale.uniform_(0.6, 1.4)
            c.bias.copy_(torch.randn_like(c.bias))
    return stack


@case(lambda: strong(make_stack(unequal(wirings.mhc(3, single_pass=True, iterations=4)))))
def single_pass_mhc(stack, x):
    options = {"eps": 1e-6, "hc_eps": 1e-6, "iterations": 4}
    return stream_formulas.single_pass_mhc(streams(x, 3), *parts(stack), coefficients(stack), **options)


def depth_reads(stack):
    """Return query and key weight of every read; the first has a single source, which needs none."""
    modules = [*coefficients(stack), stack.head.coefficients]
    return [(torch.zeros(D).double(), torch.ones(D).double()) if c is None else (c.query[0], c.weight) for c in modules]


BLOCKS = {  # by the number of sublayers in a block
    "1": lambda: make_stack(wirings.attention_residuals()),
    "4": lambda: make_stack(wirings.attention_residuals(layers_per_block=2), 10),
    "6, without rest": lambda: make_stack(wirings.attention_residuals(layers_per_block=3), 12),
    "6, of decoder layers": lambda: make_stack(
        wirings.attention_residuals(layers_per_block=2), 12, sublayers_per_layer=3
    ),
}
for size, make in BLOCKS.items():
    CASES[f"attention residuals in blocks of {size}"] = (
        make,
        lambda stack, x, size=int(size[0]): stream_formulas.block_attention_residuals(
            x, *parts(stack), depth_reads(stack), eps=1e-6, block_size=size
        ),
    )


def pre_ln_layers(stack):
    """Return the layers as functions of the stream, residual adds included."""
    sublayers, norms, _ = parts(stack)

    def layer(k, x):
        for i in (2 * k, 2 * k + 1):
            x = x + sublayers[i](norms[i](x))
        return x

    return [functools.partial(layer, k) for k in range(len(sublayers) // 2)]


def average_by_depth(stack, x, dilation, period):
    layers = pre_ln_layers(stack)
    modules = [*stack.connections[::2], stack.head]
    weights = {
        m: [getattr(modules[m], f"weight_{j}") for j in range(m + 1) if j % dilation == m % dilation]
        for m in range(1, len(modules)) if m % period == 0
    }  # fmt: skip
    return stream_formulas.denseformer(x, layers, parts(stack)[2], weights, dilation=dilation, period=period)


for dilation, period, number in ((1, 1, 8), (2, 3, 14), (3, 2, 12)):  # the last ends in an average
    wiring = wirings.denseformer(dilation=dilation, period=period)
    CASES[repr(wiring)] = (
        functools.partial(make_stack, wiring, number), functools.partial(average_by_depth, dilation=dilation, period=period),
    )  # fmt: skip


def mudd(stack, x, spread):
    sublayers, norms, final_norm = parts(stack)
    blocks = [
        (
            spread(sublayers[i]),
            *(norms[i] if isinstance(norms[i], list) else [norms[i]] * 3),
            sublayers[i + 1],
            norms[i + 1],
        )
        for i in range(0, len(sublayers), 2)
    ]
    modules = [*coefficients(stack)[2::2], stack.head.coefficients]
    reads = []
    for c in modules:
        w2, a = c.down.T, c.static
        if a.shape[0] == 2:  # one read and the residual: query, key and value are equal
            w2 = w2.unflatten(1, (2, c.n))[:, [0, 0, 0, 1]].flatten(1)
            a = a[[0, 0, 0, 1]]
        reads.append((c.up.T, w2, a))
    return stream_formulas.muddformer(x, blocks, final_norm, reads, eps=1e-6)


@case(lambda: make_stack(wirings.muddformer(reads=3), reads=[3, 1] * 3))
def muddformer(stack, x):
    return mudd(stack, x, lambda f: f)


@case(lambda: make_stack(wirings.muddformer()))
def muddformer_with_one_read(stack, x):
    return mudd(stack, x, lambda f: lambda q, k, v: f(q))


@case(lambda: make_stack(wirings.x0_residual(), 8, norm="rms"))
def x0_residual(stack, x):
    sublayers, norms, final_norm = parts(stack)
    blocks = [(sublayers[i], norms[i], sublayers[i + 1], norms[i + 1]) for i in range(0, len(sublayers), 2)]
    firsts = stack.connections[::2]
    factors = [c.scale for c in firsts], [c.x0_scale for c in firsts]
    return stream_formulas.nanochat(
        function(stack.norm_embedding)(x), blocks, final_norm, *factors, -stack.head.backout
    )


@case(lambda: make_stack(unequal(wirings.reversible())))
def reversible(stack, x):
    sublayers, norms, final_norm = parts(stack)
    first, second = stream_formulas.reversible(streams(x, 2), sublayers, norms)
    return final_norm((first + second) / 2)


@case(lambda: make_stack(wirings.ngpt(), norm="rms", elementwise_affine=False, eps=0.0))
def ngpt(stack, x):
    sublayers = [lambda h, f=f: f(math.sqrt(D) * h) for f in parts(stack)[0]]  # the library's vectors are sqrt(d) long
    stored = [c.alpha for c in coefficients(stack)]
    return math.sqrt(D) * stream_formulas.ngpt(stream_formulas.unit(x), sublayers, stored, alpha_init=0.05)


@case(lambda: make_stack(unequal(wirings.siamese_norm())))
def siamese_norm(stack, x):
    ends = [function(c.norm_streams["1"]) for c in [*stack.connections, stack.head]]
    outs = [function(c.norm_outs["0"]) for c in stack.connections]
    factors = [(i // 2 + 1) ** -0.5 for i in range(len(outs))]
    return stream_formulas.siamese_norm(streams(x, 2), parts(stack)[0], ends[:-1], outs, ends[-1], factors)


@case(lambda: make_stack(unequal(wirings.resi_dual())))
def resi_dual(stack, x):
    u, v = streams(x, 2)
    for connection in stack.connections:
        write = connection.sublayer(u)
        u, v = function(connection.norm_outs["0"])(u + write), v + write
    return u + function(stack.head.norm_streams["1"])(v)


@case(lambda: make_stack(wirings.b2t(), sublayers_per_layer=3))
def b2t_of_decoder_layers(stack, x):
    norms = [function(c.norm_outs["0"]) for c in stack.connections]
    return stream_formulas.bottom_to_top(x, parts(stack)[0], norms, 3)


def make_own(stage, embedding, head):
    """Return a stack of one stage in a wiring of one's own."""
    return make_stack(Wiring("own", stage, embedding=embedding, head=head), 1, sublayers_per_layer=1)


HALF = Learned(0.5), Learned(0.5)  # equal entries, each with a parameter of its own
ENTRIES = Stage(2, HALF, ((Learned(1.0), 0.0), (0.0, Learned(1.0))), (Learned(1.0), Learned(1.0)))


@case(lambda: make_own(ENTRIES, (1.0, -2.0), Head(2, HALF)))
def learned_entries(stack, x):
    at, head = stack.connections[0], stack.head
    write = at.sublayer(at.collapse_0_0 * x - 2 * at.collapse_0_1 * x)
    first, second = at.mix_0_0 * x + at.inject_0 * write, -2 * at.mix_1_1 * x + at.inject_1 * write
    return head.collapse_0_0 * first + head.collapse_0_1 * second


def constant_writes(stack, x):
    at = stack.connections[0]
    streams = torch.stack([x, 0.5 * x, 2 * x], -2)
    write = at.sublayer((at.coefficients(streams).collapse.unsqueeze(-1) * streams).sum(-2))
    return 0.2 * (x + at.inject_0 * write) + 0.3 * (0.5 * x - 2 * write) + 0.5 * (2 * x + at.inject_2 * write)


for per_feature in (False, True):
    inject = Learned(0.5, per_feature), -2.0, Learned(1.5, per_feature)
    computed_read = Stage(3, inject=inject, coefficients=Computed(SigmoidRead))
    CASES[f"constant writes beside computed reads, {per_feature=}"] = (
        lambda stage=computed_read: make_own(stage, (1.0, 0.5, 2.0), Head(3, (0.2, 0.3, 0.5))), constant_writes,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_wiring_equals_its_transcription(name):
    make, expected = CASES[name]
    stack = make()
    x = torch.randn(2, 3, D, dtype=torch.float64) * torch.linspace(0.2, 2.0, D)
    functions = stack, functools.partial(expected, stack)
    results = (compute_gradients(function, stack.parameters(), [x]) for function in functions)
    (y, *gradients), (y_expected, *gradients_expected) = results
    assert_close(y, y_expected, rtol=1e-10, atol=1e-10)
    names = ["x", *(name for name, _ in stack.named_parameters())]
    for parameter, gradient, wanted in zip(names, gradients, gradients_expected, strict=True):
        size = float(wanted.abs().max())
        assert size > 1e-8, f"{parameter} has no gradient: the test would not see it"
        assert_close(gradient, wanted, rtol=0, atol=1e-9 * max(1.0, size), msg=lambda m, p=parameter: f"{p}: {m}")
