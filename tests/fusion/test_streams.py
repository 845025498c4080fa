"""Tests of fusing boundaries of n residual streams: spellings, one call or two, refusals, gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import addnorm
from addnorm.fusion.streams import DEPENDS, READ_ELSEWHERE
from support.fused_model import QUIET
from support.graph_capture import capture_graphs, relative_difference
from support.several_streams import make_mhc

pytestmark = QUIET
N, D = 4, 16
X = torch.randn(2, 3, N, D, generator=torch.Generator().manual_seed(0))


class Boundary(nn.Module):
    """One boundary: a write with coefficients of each token, a read and its norm; `function` spells them."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.f, self.gates = function, nn.Linear(D, D), nn.Linear(D, N * (N + 2))
        self.norm, self.weight = nn.LayerNorm(D), nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x):
        w = self.f(x.mean(-2))
        z = self.gates(x.mean(-2)).sigmoid()
        return self.function(self, x, w, z[..., : N * N].unflatten(-1, (N, N)), *z[..., N * N :].split(N, -1))


def write(x, w, a, b):
    return b.unsqueeze(-1) * w.unsqueeze(-2) + a @ x


def read(c, new):
    return (c.unsqueeze(-1) * new).sum(-2)


def deepseek(m, x, w, a, b, c):
    new = b.unsqueeze(-1) * w.unsqueeze(-2) + torch.matmul(a.transpose(-1, -2), x)
    return new, m.norm((c.unsqueeze(-1) * new).sum(dim=2))


def einsums(m, x, w, a, b, c):
    new = torch.einsum("btkj,btjd->btkd", a, x) + torch.einsum("btk,btd->btkd", b, w)
    return new, F.rms_norm(torch.einsum("btk,btkd->btd", c, new), (D,), m.weight, 1e-6)


def streams_first(m, x, w, a, b, c):
    new = torch.einsum("btkj,jbtd->kbtd", a, x.movedim(2, 0)) + torch.einsum("btk,btd->kbtd", b, w)
    return new, m.norm(torch.einsum("btk,kbtd->btd", c, new))


def broadcast_sums(m, x, w, a, b, c):
    new = (a.unsqueeze(-1) * x.unsqueeze(-3)).sum(-2) + w.unsqueeze(-2) * b[..., None]
    return new, m.norm(new.mean(-2))


def unmixed(m, x, w, a, b, c):
    new = x + w.unsqueeze(-2)
    return new, m.norm(read(c[0, 0], new))


SPELLINGS = (deepseek, einsums, streams_first, broadcast_sums, unmixed)


def train(model, call, x):
    """Return outputs and gradients of a loss with fixed cotangents."""
    model.zero_grad()
    outputs = call(x)
    generator = torch.Generator().manual_seed(2)
    signs = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outputs]
    sum((out * sign.to(out.dtype)).sum() for out, sign in zip(outputs, signs, strict=True)).backward()
    return [*(out.detach() for out in outputs), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def capture_equal(model):
    """Return the graphs of a model after a call whose results are those of the model."""
    capture = capture_graphs(model)
    for after, before in zip(capture.compiled(X), model(X), strict=True):
        assert relative_difference(before, after) < 1e-5
    return capture


def errors(results, exact):
    return [
        float((own.double() - truth).norm() / truth.norm().clamp_min(1e-9))
        for own, truth in zip(results, exact, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("spell", SPELLINGS, ids=lambda spell: spell.__name__)
def test_boundary_is_one_call_as_exact_as_eager(spell, dtype):
    model, x = Boundary(spell).to(dtype), X.to(dtype)
    capture = capture_graphs(model)
    after = train(model, capture.compiled, x)
    before = train(model, model, x)
    wide = Boundary(spell).double()
    wide.load_state_dict(model.state_dict())
    exact = train(wide, wide, x.double())
    (boundary,) = capture.boundaries
    assert (boundary.reason, boundary.remark, boundary.streams, boundary.returns_residual) == (None, "", N, True)
    assert "einsum" not in capture.code
    assert [t.stride() for t in before[:2]] == [t.stride() for t in after[:2]]
    eps = torch.finfo(dtype).eps
    assert all(a <= 1.5 * b + 4 * eps for a, b in zip(errors(after, exact), errors(before, exact), strict=True))


def test_coefficients_of_the_new_streams_make_two_calls():
    def dependent(m, x, w, a, b, c):
        new = write(x, w, a, b)
        return new, m.norm(read(new.mean(-1).sigmoid(), new))

    capture = capture_equal(Boundary(dependent))
    assert [(one.kind, one.reason, one.remark) for one in capture.boundaries] == [
        ("none", None, DEPENDS), ("layer", None, DEPENDS),
    ]  # fmt: skip


def test_read_that_is_used_without_its_norm_is_not_fused():
    def shared(m, x, w, a, b, c):
        new = write(x, w, a, b)
        joined = read(c, new)
        return new, m.norm(joined), joined.relu()

    capture = capture_graphs(Boundary(shared))
    capture.compiled(X)
    reasons = {one.kind: one.reason for one in capture.boundaries}
    assert reasons == {"none": None, "layer": READ_ELSEWHERE}


def test_hook_that_changes_the_read_is_not_fused():
    model = Boundary(deepseek)
    model.norm.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
    assert [one.kind for one in capture_equal(model).boundaries] == ["none"]


def test_streams_written_in_place_are_not_fused():
    def in_place(m, x, w, a, b, c):
        x = x * 1.0
        new = write(x, w, a, b)
        x.mul_(2.0)
        return new, m.norm(read(c, new)), x

    with torch.no_grad():
        capture = capture_equal(Boundary(in_place))
    assert all(one.reason is not None or one.kind != "none" for one in capture.boundaries)


def last_token(m, x, w, a, b, c):
    new = x + w.unsqueeze(-2)
    return new, m.norm(read(c, new)[:, -1])


def rounded_mix(m, x, w, a, b, c):
    new = (a @ x).half().float() + b.unsqueeze(-1) * w.unsqueeze(-2)
    return new, m.norm(read(c, new))


def unused(m, x, w, a, b, c):
    m.norm((x + w.unsqueeze(-2)).mean(-2))
    return (x + b.unsqueeze(-1) * w.unsqueeze(-2),)


@pytest.mark.parametrize("spell", [deepseek, last_token, rounded_mix, unused], ids=lambda spell: spell.__name__)
def test_fused_model_takes_other_numbers_of_tokens(spell):
    """Where a cut depends on the number of tokens, or a product is rounded, the write is all that one call can do."""
    model = Boundary(spell)
    plain = copy.deepcopy(model)
    assert addnorm.fuse(model, X).proof.holds
    for tokens in (3, 7, 9, 2, *[0] * (spell is not last_token)):
        x = torch.randn(2, tokens, N, D)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)


def test_second_derivative_is_that_of_the_model():
    model = Boundary(deepseek).double()
    capture, x = capture_graphs(model), X.double().requires_grad_()

    def penalty(call):
        (grad,) = torch.autograd.grad(call(x)[1].square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    assert relative_difference(penalty(model), penalty(capture.compiled)) < 1e-9


@pytest.mark.parametrize(("fault", "one_call"), [("single pass", 4), ("", 0)])
def test_fuse_reports_boundaries_of_streams(fault, one_call):
    model, x = make_mhc("stacked", fault), torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))
    fusion = addnorm.fuse(model, x)
    assert fusion.proof.holds
    assert not fusion.unfused
    assert f"{one_call} of 4 writes of 4 streams in one call" in str(fusion)
    assert (DEPENDS.split()[-1] in str(fusion)) is not bool(one_call)
    addnorm.unfuse(model)
