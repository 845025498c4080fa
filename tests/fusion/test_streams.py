"""Tests of fusing boundaries of n residual streams: spellings, one call or two, refusals, gradients."""

import copy

import pytest
import torch
from torch.nn import functional as F

import addnorm
from addnorm.fusion.streams import DEPENDS, READ_ELSEWHERE
from support.fused_model import QUIET
from support.graph_capture import capture_graphs, relative_difference
from support.several_streams import make_mhc
from support.stream_boundary import Boundary, D, N, X, assert_as_exact, assert_close, broadcast_sums, deepseek

pytestmark = QUIET


def einsums(m, x, w, a, b, c):
    new = torch.einsum("btkj,btjd->btkd", a, x) + torch.einsum("btk,btd->btkd", b, w)
    return new, F.rms_norm(torch.einsum("btk,btkd->btd", c, new), (D,), m.weight, 1e-6)


def streams_first(m, x, w, a, b, c):
    new = torch.einsum("btkj,jbtd->kbtd", a, x.movedim(2, 0)) + torch.einsum("btk,btd->kbtd", b, w)
    return new, m.norm(torch.einsum("btk,kbtd->btd", c, new))


def unmixed(m, x, w, a, b, c):
    new = x + w.unsqueeze(-2)
    return new, m.norm((c[0, 0].unsqueeze(-1) * new).sum(-2))


def subtracted(m, x, w, a, b, c):
    new = a @ x - b.unsqueeze(-1) * w.unsqueeze(-2)
    return new, m.norm((c.unsqueeze(-1) * new).mean(-2))


def negated(m, x, w, a, b, c):
    new = torch.rsub(-(b.unsqueeze(-1) * w.unsqueeze(-2)), a @ x, alpha=2)
    return new, m.norm(-0.5 * (c.unsqueeze(-1) * new).sum(-2))


def alphas(m, x, w, a, b, c):
    new = torch.add(a @ x, b.unsqueeze(-1) * w.unsqueeze(-2), alpha=0.25)
    return new, m.norm((c.unsqueeze(-2) @ new).squeeze(-2) / 3)


def addcmul(m, x, w, a, b, c):
    new = torch.addcmul(a @ x, b.unsqueeze(-1), w.unsqueeze(-2), value=-1)
    return new, m.norm(torch.einsum("btkd,btk->btd", new, c))


def baddbmm(m, x, w, a, b, c):
    x, w, a, b, c = (t.flatten(0, 1) for t in (x, w, a, b, c))
    new = torch.baddbmm(b.unsqueeze(-1) * w.unsqueeze(-2), a, x, beta=0.5, alpha=-2)
    return new, m.norm(torch.bmm(c.unsqueeze(-2), new).squeeze(-2))


def outer_products(m, x, w, a, b, c):
    x, w, a, b, c = (t.flatten(0, 1) for t in (x, w, a, b, c))
    new = torch.baddbmm(a @ x, b.unsqueeze(-1), w.unsqueeze(-2))
    return new, m.norm(torch.bmm(c.unsqueeze(-2), new).squeeze(-2))


def joined(m, x, w, a, b, c):
    new = torch.cat([a, b.unsqueeze(-1)], -1) @ torch.cat([x, w.unsqueeze(-2)], -2)
    return new, m.norm((c.unsqueeze(-1) * new).sum(-2))


def joined_sums(m, x, w, a, b, c):
    one = torch.cat([b.unsqueeze(-1), a], -1)
    new = (one.unsqueeze(-1) * torch.cat([w.unsqueeze(-2), x], -2).unsqueeze(-3)).sum(-2)
    return new, m.norm((c.unsqueeze(-1) * new).sum(-2))


def expanded(m, x, w, a, b, c):
    new = x + b.unsqueeze(-1).expand_as(x) * w.unsqueeze(-2).expand_as(x)
    return new, m.norm((c.unsqueeze(-1) * new).sum(-2))


def python_sums(m, x, w, a, b, c):
    new = sum([a @ x, b.unsqueeze(-1) * w.unsqueeze(-2)])
    return new, m.norm((c.unsqueeze(-1) * new).sum(-2))


def stacked_sum(m, x, w, a, b, c):
    new = torch.stack([F.linear(x.mT, a[0, 0]).mT, b[0, 0].unsqueeze(-1) * w.unsqueeze(-2)]).sum(0)
    return new, m.norm(F.linear(new.mT, c[0, 0][None]).squeeze(-1))


SPELLINGS = (
    deepseek, einsums, streams_first, broadcast_sums, unmixed, subtracted, negated, alphas, addcmul, baddbmm,
    outer_products, joined, joined_sums, expanded, python_sums, stacked_sum,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("spell", SPELLINGS, ids=lambda spell: spell.__name__)
def test_boundary_is_one_call_as_exact_as_eager(spell, dtype):
    model = Boundary(spell).to(dtype)
    capture = capture_graphs(model)
    assert_as_exact(model, capture.compiled, X.to(dtype), dtype=dtype)
    (boundary,) = capture.boundaries
    assert (boundary.reason, boundary.remark, boundary.streams, boundary.returns_residual) == (None, "", N, True)
    assert "einsum" not in capture.code


def test_coefficients_of_the_new_streams_make_two_calls():
    def dependent(m, x, w, a, b, c):
        new = b.unsqueeze(-1) * w.unsqueeze(-2) + a @ x
        return new, m.norm((new.mean(-1).sigmoid().unsqueeze(-1) * new).sum(-2))

    model = Boundary(dependent)
    capture = capture_graphs(model)
    assert_close(capture.compiled, model, X)
    assert [(one.kind, one.reason, one.remark) for one in capture.boundaries] == [
        ("none", None, DEPENDS), ("layer", None, DEPENDS),
    ]  # fmt: skip


def test_read_that_is_used_without_its_norm_is_not_fused():
    def shared(m, x, w, a, b, c):
        new = b.unsqueeze(-1) * w.unsqueeze(-2) + a @ x
        read = (c.unsqueeze(-1) * new).sum(-2)
        return new, m.norm(read), read.relu()

    capture = capture_graphs(Boundary(shared))
    capture.compiled(X)
    reasons = {one.kind: one.reason for one in capture.boundaries}
    assert reasons == {"none": None, "layer": READ_ELSEWHERE}


def test_hook_that_changes_the_read_is_not_fused():
    model = Boundary(deepseek)
    model.norm.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
    capture = capture_graphs(model)
    assert_close(capture.compiled, model, X)
    assert [one.kind for one in capture.boundaries] == ["none"]


def test_streams_written_in_place_are_not_fused():
    def in_place(m, x, w, a, b, c):
        x = x * 1.0
        new = b.unsqueeze(-1) * w.unsqueeze(-2) + a @ x
        x.mul_(2.0)
        return new, m.norm((c.unsqueeze(-1) * new).sum(-2)), x

    model = Boundary(in_place)
    capture = capture_graphs(model)
    with torch.no_grad():
        assert_close(capture.compiled, model, X)
    assert all(one.reason is not None or one.kind != "none" for one in capture.boundaries)


def last_token(m, x, w, a, b, c):
    new = x + w.unsqueeze(-2)
    return new, m.norm((c.unsqueeze(-1) * new).sum(-2)[:, -1])


def rounded_mix(m, x, w, a, b, c):
    new = (a @ x).half().float() + b.unsqueeze(-1) * w.unsqueeze(-2)
    return new, m.norm((c.unsqueeze(-1) * new).sum(-2))


def by_length(m, x, w, a, b, c):
    new = a @ x + (b.unsqueeze(-1) * w.unsqueeze(-2)) / x.shape[1]
    return new, m.norm((c.unsqueeze(-1) * new).sum(-2) / x.shape[1])


def unused(m, x, w, a, b, c):
    m.norm((x + w.unsqueeze(-2)).mean(-2))
    return (x + b.unsqueeze(-1) * w.unsqueeze(-2),)


@pytest.mark.parametrize(
    "spell", [deepseek, joined, last_token, rounded_mix, by_length, unused], ids=lambda spell: spell.__name__
)
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
