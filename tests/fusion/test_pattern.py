"""Tests of the Add & Norm pattern in graphs: the spellings that are fused, and the reasons why others are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.graph_capture import capture_graphs, relative_difference, run_both

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.*:UserWarning")
D = 16
X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Model of x + f(x), a norm, and a sublayer that reads the norm; each part can be replaced."""

    def __init__(self, add=None, norm=None, after=None):
        super().__init__()
        torch.manual_seed(1)
        self.f, self.g = nn.Linear(D, D), nn.Linear(D, D)
        self.norm = norm or nn.LayerNorm(D)
        for p in self.norm.parameters():
            nn.init.uniform_(p, 0.5, 1.5)
        self.add = add or (lambda x, f: x + f)
        self.after = after or (lambda model, z, y: z + model.g(y))

    def forward(self, x):
        z = self.add(x, self.f(x))
        return self.after(self, z, self.norm(z))


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


def _plus(x, f):
    x += f
    return x


@pytest.mark.parametrize("add", ADDS.values(), ids=ADDS)
def test_add_spellings_are_fused(add):
    before, after, capture = run_both(Model(add), X.clone())
    assert capture.reasons == [None]
    assert relative_difference(before, after) < 1e-6


def test_add_in_place_is_read_through_its_argument():
    def forward(model, z, y):
        return model.f(y) + z

    class Method(Model):
        def forward(self, x):
            z = x.clone()
            z.add_(self.f(x))  # z is read below, not the result of add_
            return self.after(self, z, self.norm(z))

    before, after, capture = run_both(Method(after=forward), X)
    assert capture.reasons == [None]
    assert relative_difference(before, after) < 1e-6


# --- norms -----------------------------------------------------------------------------------------------------------------


class Hand(nn.Module):
    """Norm from a formula of x and a weight."""

    def __init__(self, formula, bias=False, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))
        self.bias = nn.Parameter(torch.ones(D)) if bias else None
        self.formula, self.eps = formula, eps

    def forward(self, x):
        args = (x, self.weight) if self.bias is None else (x, self.weight, self.bias)
        return self.formula(*args, self.eps)


def llama(x, w, eps):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype)


def gemma(x, w, eps):
    h = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (h * (1.0 + w.float())).type_as(x)


def olmo(x, w, eps):
    h = x.float()
    return (w * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def t5(x, w, eps):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    h = x * torch.rsqrt(variance + eps)
    return w * (h.to(w.dtype) if w.dtype in (torch.float16, torch.bfloat16) else h)


def cohere(x, w, eps):
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


HANDS = {
    "llama": (llama, False, "llama"), "gemma": (gemma, False, "float32"), "olmo2": (olmo, False, "float32"),
    "t5": (t5, False, "llama"), "cohere": (cohere, False, "float32"), "1 + w, rounded": (one_plus, True, "float32"),
    "var_mean": (own, True, "float32"),
    "torch's rms_norm": (lambda x, w, eps: F.rms_norm(x, (D,), w, eps), False, "float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", HANDS)
def test_decomposed_norms_keep_bits_in_low_precision(name):
    formula, bias, casting = HANDS[name]
    whole = torch.randint(-9, 10, (4, 50, D))  # their squares have the same exact sum in any order
    for dtype in (torch.bfloat16, torch.float16):
        model = Model(norm=Hand(formula, bias), after=lambda model, z, y: y).to(dtype)
        nn.init.zeros_(model.f.weight)
        nn.init.zeros_(model.f.bias)
        before, after, capture = run_both(model, whole.to(dtype))
        assert capture.reasons == [None]
        assert capture.boundaries[0].casting == casting
        # torch updates a variance step by step and rounds each time; a mean of squares is exact here.
        flipped = float((before != after).double().mean())
        assert flipped <= (2e-3 if formula in (one_plus, own) else 0.0)


@pytest.mark.parametrize("name", HANDS)
def test_decomposed_norms_are_exact_in_float32_and_float64(name):
    formula, bias, _ = HANDS[name]
    for dtype, limit in ((torch.float32, 1e-6), (torch.float64, 1e-6 if name in ("llama", "gemma") else 1e-14)):
        before, after, capture = run_both(Model(norm=Hand(formula, bias)).to(dtype), X.to(dtype))
        if dtype == torch.float64 and formula in (llama, gemma, olmo, t5, cohere):
            assert capture.reasons == [
                "its norm does not compute the formula that was found"
            ]  # the norm computes float64 in float32
        else:
            assert capture.reasons == [None]
            assert capture.boundaries[0].weight is not None  # in the call, not multiplied after it
        assert relative_difference(before, after) < limit


def coarse(x, w, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def test_norm_with_rounded_statistics_is_not_fused():
    for dtype, reason in ((torch.float32, None), (torch.bfloat16, "its norm rounds intermediate results that the fused call keeps exact")):  # fmt: skip
        before, after, capture = run_both(Model(norm=Hand(coarse)).to(dtype), X.to(dtype))
        assert capture.reasons == [reason]
        assert before.equal(after) or (reason is None and relative_difference(before, after) < 1e-6)


LEFT = {
    "its norm uses the unbiased variance (d - 1)": lambda x, w, eps: (
        (x - x.mean(-1, True)) / (x.var(-1, keepdim=True) + eps).sqrt() * w
    ),
    "its norm adds eps outside the square root": lambda x, w, eps: (
        (x - x.mean(-1, True)) / (x.std(-1, correction=0, keepdim=True) + eps) * w
    ),
    "its norm divides by the L2 norm, not by the root mean square": lambda x, w, eps: F.normalize(x, dim=-1) * w,
    "its weight is one number, not one for each of 16 features": lambda x, w, eps: (
        x * torch.rsqrt(x.pow(2).mean(-1, True) + eps) * w[:1]
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_norm_of_another_formula_is_not_fused(reason):
    before, after, capture = run_both(Model(norm=Hand(LEFT[reason])), X)
    assert before.equal(after)
    assert reason in capture.reasons


def test_norm_of_a_transposed_square_sum_is_not_fused():
    class Turned(Model):
        def forward(self, x):
            z = x + self.f(x)
            return z + self.norm(z.transpose(1, 2)).transpose(1, 2)

    before, after, capture = run_both(Turned(), torch.randn(2, D, D))
    assert before.equal(after)
    assert None not in capture.reasons


# --- views, shapes, memory -------------------------------------------------------------------------------------------------


def test_norm_reads_the_sum_through_views():
    class Flat(Model):
        def forward(self, x):
            z = (x + self.f(x)).transpose(0, 1)
            return z + self.g(self.norm(z.reshape(-1, D))).view(z.shape)

    before, after, capture = run_both(Flat(), X)
    assert capture.reasons == [None]
    assert relative_difference(before, after) < 1e-6


def test_views_keep_dynamic_sizes():
    class Flat(Model):
        def forward(self, x):
            z = x + self.f(x)
            return z + self.g(self.norm(z.view(-1, D))).view(z.shape)

    model = Flat()
    capture = capture_graphs(model, dynamic=True)
    with torch.no_grad():
        for rows in (3, 7, 11):
            x = torch.randn(rows, 5, D)
            assert relative_difference(model(x), capture.compiled(x)) < 1e-6
    assert len(capture.graphs) == 1
    assert capture.reasons == [None]


def test_broadcasting_add_is_not_fused():
    class Places(Model):
        def __init__(self):
            super().__init__()
            self.places = nn.Parameter(torch.randn(1, 5, D))

        def forward(self, x):
            return self.norm(x + self.places)

    before, after, capture = run_both(Places(), X)
    assert capture.reasons == ["its add broadcasts"]
    assert before.equal(after)
    before, after, capture = run_both(Places(), X[:1])
    assert relative_difference(before, after) < 1e-6  # here the shapes are equal; another batch gets another graph


def test_add_into_an_input_stays_in_place():
    x = X.clone()
    model = Model(_plus)
    before, after, capture = run_both(model, x)
    assert capture.reasons == ["its add writes in place into an input or a buffer"]
    assert before.equal(after)
    with torch.no_grad():
        capture.compiled(x)
    assert not x.equal(X)


def test_add_into_viewed_memory_stays_in_place():
    def add(x, f):
        head = f[:, 0]
        f += x
        return f + head[:, None]

    before, after, capture = run_both(Model(add), X)
    assert before.equal(after) or relative_difference(before, after) < 1e-6
    before, after, capture = run_both(Model(lambda x, f: f, after=_seen), X)
    assert before.equal(after)
    assert "its add writes in place into memory that is read later through another view" in capture.reasons


def _seen(model, z, y):
    f = model.g(y)
    head = f[:, 0]
    f += z
    return model.norm(f) + head[:, None]


def test_second_norm_of_a_sum_is_not_fused():
    def after(model, z, y):
        return z + model.g(y) + F.layer_norm(z, (D,))

    before, after, capture = run_both(Model(after=after), X)
    assert capture.reasons == [None, "its sum is already fused with the norm in norm"]
    assert relative_difference(before, after) < 1e-6


def test_second_norm_is_fused_if_the_first_is_not():
    def after(model, z, y):
        return z + model.g(y) + F.layer_norm(z, (D,))

    model = Model(norm=Hand(coarse), after=after).bfloat16()
    before, after, capture = run_both(model, X.bfloat16())
    assert capture.reasons == ["its norm rounds intermediate results that the fused call keeps exact", None]
    assert relative_difference(before, after) < 1e-2


def test_autocast_between_add_and_norm_is_not_fused():
    def after(model, z, y):
        with torch.autocast("cpu", torch.bfloat16):
            w = z + model.f(z)
        return model.norm(w) + y

    before, after, capture = run_both(Model(after=after), X)
    assert "autocast or the grad mode changes between the add and the norm" in capture.reasons
    assert relative_difference(before, after) < 1e-6


def test_calls_of_addnorm_are_not_fused_again():
    import addnorm

    stack = addnorm.ResidualStack([nn.Linear(D, D) for _ in range(3)], D, wiring="pre_ln")
    before, after, capture = run_both(stack, X)
    assert before.equal(after)
    assert [reason for reason in capture.reasons if reason is None] == []


def test_residual_is_returned_only_where_it_is_read():
    post = run_both(Model(after=lambda model, z, y: model.g(y)), X)[2]
    pre = run_both(Model(), X)[2]
    assert [b.returns_residual for b in (*post.boundaries, *pre.boundaries)] == [False, True]
    assert "return_residual" not in post.code
    assert "return_residual = True" in pre.code
    for capture in (post, pre):
        assert "layer_norm(" not in capture.code.replace("add_layer_norm(", "")


def test_boundary_has_the_paths_of_its_modules():
    outer = nn.Sequential(nn.Identity(), Model())
    capture = run_both(outer, X)[2]
    assert [(b.add, b.norm, b.kind, b.eps, b.shape, b.dtype) for b in capture.boundaries] == [
        ("1", "1.norm", "layer", 1e-5, (2, 5, D), "float32")
    ]
