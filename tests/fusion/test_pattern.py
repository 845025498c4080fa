"""Tests of the Add & Norm pattern in graphs: the spellings that are fused, and the reasons why others are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import addnorm
from support.fused_model import Model
from support.graph_capture import D, X, capture_graphs, fuse_function, run_both
from support.random_models.norms import functional_rms, gemma, llama

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.*:UserWarning")
ROUNDS = "its norm rounds intermediate results that the fused call keeps exact"
TRANSFORMED = "it runs inside a torch.func transform"
EPS = 1e-6


def block(add=torch.add, norm=lambda m, z: m.norm(z)):
    """Return the forward of an add, a norm that reads it, and a sublayer that reads the norm."""

    def forward(m, x):
        z = add(x, m.f(x))
        return z + m.g(norm(m, z))

    return forward


def _plus(x, f):
    x += f
    return x


ADDS = {
    "x + f": lambda x, f: x + f,
    "f + x": lambda x, f: f + x,
    "torch.add": torch.add,
    "x.add": lambda x, f: x.add(f),
    "sum of a list": lambda x, f: sum([x, f]),
    "in place into what was computed": lambda x, f: f.add_(x),
    "+=, into a copy": lambda x, f: _plus(x.clone(), f),
    "in two steps": lambda x, f: (x + f) + f.tanh(),
    "dropout on the way": lambda x, f: x + F.dropout(f, 0.5),
    "a factor on the way": lambda x, f: x + 0.5 * f,
}


@pytest.mark.parametrize("add", ADDS.values(), ids=ADDS)
def test_add_spellings_are_fused(add):
    assert fuse_function(block(add)).reasons == [None]


def test_add_in_place_is_read_through_its_argument():
    def forward(m, x):
        z = x.clone()
        z.add_(m.f(x))  # z is read below, not the result of add_
        return m.f(m.norm(z)) + z

    assert fuse_function(forward).reasons == [None]


# --- norms: formulas of x, weight, bias and eps -----------------------------------------------------------------------------


def olmo(x, w, b, eps):
    h = x.float()
    return (w * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def t5(x, w, b, eps):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    h = x * torch.rsqrt(variance + eps)
    return w * (h.to(w.dtype) if w.dtype in (torch.float16, torch.bfloat16) else h)


def cohere(x, w, b, eps):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    h = (h - mean) * torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + eps)
    return (w.float() * h).to(x.dtype)


def one_plus(x, w, b, eps):
    return F.layer_norm(x, (D,), w + 1, b, eps)  # w + 1 is rounded to the weight's dtype


def own(x, w, b, eps):
    h = x.double() if x.dtype == torch.float64 else x.float()
    var, mean = torch.var_mean(h, -1, correction=0, keepdim=True)
    return ((h - mean) / (var + eps).sqrt() * w + b).to(x.dtype)


NARROW = (llama, gemma, olmo, t5, cohere)  # they compute float64 in float32
CASTINGS = {llama: "llama", t5: "llama"}
NORMS = (*NARROW, one_plus, own, functional_rms)


@pytest.mark.parametrize("formula", NORMS, ids=lambda formula: formula.__name__)
def test_decomposed_norms_keep_bits_in_low_precision(formula):
    whole = torch.randint(-9, 10, (4, 50, D))  # their squares have the same exact sum in any order
    for dtype in (torch.bfloat16, torch.float16):
        capture = fuse_function(
            lambda m, x: formula(x + 0.0 * m.f(x), m.weight, m.bias, EPS), (whole.to(dtype),),
            gradients=False, dtype=dtype, limit=2e-2,
        )  # fmt: skip
        assert capture.reasons == [None]
        (before,), (after,) = capture.outputs
        # torch updates a variance step by step and rounds each time; a mean of squares is exact here.
        assert (before != after).double().mean() <= (2e-3 if formula in (one_plus, own) else 0.0)
        assert capture.boundaries[0].casting == CASTINGS.get(formula, "float32")


@pytest.mark.parametrize("formula", NORMS, ids=lambda formula: formula.__name__)
def test_decomposed_norms_are_exact_in_float32_and_float64(formula):
    function = block(norm=lambda m, z: formula(z, m.weight, m.bias, EPS))
    capture = fuse_function(function, gradients=False, limit=1e-6)
    assert capture.reasons == [None]
    assert capture.boundaries[0].weight is not None  # in the call, not multiplied after it
    nodes = [node for graph in capture.graphs for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    assert nodes
    assert all(node.users for node in nodes)  # no cast without effect is left, whose result nobody reads
    reason = "its norm does not compute the formula that was found" if formula in NARROW else None
    assert fuse_function(function, gradients=False, dtype=torch.float64, limit=1e-14).reasons == [reason]


def coarse(m, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * m.weight


def second_norm(norm):
    def forward(m, x):
        z = x + m.f(x)
        return z + m.g(norm(m, z)) + F.layer_norm(z, (D,))

    return forward


def transposed(m, x):
    z = x + m.f(x)
    return z + m.norm(z.transpose(1, 2)).transpose(1, 2)


def flat(m, x):
    z = (x + m.f(x)).transpose(0, 1)
    return z + m.g(m.norm(z.reshape(-1, D))).view(z.shape)


def autocast(m, x):
    y = m.norm(x + m.f(x))
    with torch.autocast("cpu", torch.bfloat16):
        w = x + m.f(y)
    return m.norm(w) + y


def seen_by_a_view(m, x):
    f = m.f(x)
    head = f[:, 0]
    f += x
    return m.norm(f) + head[:, None]


BF16 = {"dtype": torch.bfloat16, "limit": 3e-2, "gradients": False}
CASES = {
    "rounded statistics in float32": (block(norm=coarse), [None]),
    "rounded statistics in bfloat16": (block(norm=coarse), [ROUNDS], BF16),
    "unbiased variance": (
        block(norm=lambda m, x: (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + EPS).sqrt() * m.weight),
        ["its norm uses the unbiased variance (d - 1)"],
    ),
    "eps outside the root": (
        block(norm=lambda m, x: (x - x.mean(-1, True)) / (x.std(-1, correction=0, keepdim=True) + EPS) * m.weight),
        ["its norm adds eps outside the square root"],
    ),
    "L2 norm": (
        block(norm=lambda m, x: F.normalize(x, dim=-1) * m.weight),
        ["its norm divides by the L2 norm, not by the root mean square"],
    ),
    "weight of one number": (
        block(norm=lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, True) + EPS) * m.weight[:1]),
        ["its weight is one number, not one for each of 16 features"],
    ),
    "second norm of a sum": (
        second_norm(lambda m, z: m.norm(z)), [None, "its sum is already fused with the norm in norm"],
    ),
    "second norm if the first is not fused": (second_norm(coarse), [ROUNDS, None], BF16),
    "sum read through views": (flat, [None]),
    "view with keyword arguments": (lambda m, x: m.norm((x + m.f(x)).reshape(shape=(-1, D))), [None]),
    "float32 stream, bfloat16 branch": (block(lambda x, f: x + f.bfloat16()), [None], {"limit": 1e-3}),
    "sum rounded before its norm": (
        lambda m, x: F.layer_norm((x + m.f(x).bfloat16()).bfloat16(), (D,)),
        ["its norm does not compute the formula that was found"], BF16 | {"dtype": torch.float32},
    ),
    "inside vmap": (lambda m, x: torch.func.vmap(lambda t: m.norm(t + m.f(t)))(x), [TRANSFORMED], {"gradients": False}),
    "inside grad": (
        lambda m, x: torch.func.grad(lambda t: m.norm(t + m.f(t)).square().sum())(x), [TRANSFORMED], {"gradients": False},
    ),
    "autocast in between": (autocast, [None, "autocast or the grad mode changes between the add and the norm"]),
    "broadcasting": (lambda m, x: m.norm(x + m.f(x[:1])), ["its add broadcasts"]),
    "add into an input": (
        block(_plus), ["its add writes in place into an input or a buffer"], {"gradients": False},
    ),
    "add into viewed memory": (
        seen_by_a_view, ["its add writes in place into memory that is read later through another view"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_pattern_is_fused_or_has_its_reason(name):
    function, reasons, options = (*CASES[name], {})[:3]
    assert fuse_function(function, **options).reasons == reasons


def test_norm_of_a_transposed_square_sum_is_not_fused():
    assert None not in fuse_function(transposed, (torch.randn(2, D, D),)).reasons


def test_add_into_an_input_stays_in_place():
    x = X.clone()
    capture = fuse_function(block(_plus), gradients=False)
    with torch.no_grad():
        capture.compiled(x)
    assert not x.equal(X)


def test_views_keep_dynamic_sizes():
    def forward(m, x):
        z = x + m.f(x)
        return z + m.g(m.norm(z.view(-1, D))).view(z.shape)

    capture = fuse_function(forward, *((torch.randn(rows, 5, D),) for rows in (3, 7, 11)), dynamic=True)
    assert len(capture.graphs) == 1
    assert capture.reasons == [None]


def test_calls_of_addnorm_are_not_fused_again():
    stack = addnorm.ResidualStack([nn.Linear(D, D) for _ in range(3)], D, wiring="pre_ln")
    before, after, capture = run_both(stack, X)
    assert before.equal(after)
    assert None not in capture.reasons


def test_residual_is_returned_only_where_it_is_read():
    post, pre = fuse_function(lambda m, x: m.g(m.norm(x + m.f(x)))), fuse_function(block())
    assert [b.returns_residual for b in (*post.boundaries, *pre.boundaries)] == [False, True]
    assert "return_residual" not in post.code
    assert "return_residual = True" in pre.code
    for capture in (post, pre):
        assert "layer_norm(" not in capture.code.replace("add_layer_norm(", "")


def test_boundary_has_the_paths_of_its_modules():
    capture = capture_graphs(nn.Sequential(nn.Identity(), Model()))
    capture.compiled(X)
    first, _ = capture.boundaries
    assert (first.add, first.norm, first.kind, first.eps, first.shape, first.dtype) == (
        "1.layers.0", "1.layers.0.n", "layer", 1e-5, (2, 5, D), "float32",
    )  # fmt: skip
