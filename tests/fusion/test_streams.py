"""Tests of fusing boundaries of n residual streams: spellings, one call or two, refusals, gradients."""

import copy

import pytest
import torch
from torch.nn import functional as F

import addnorm
from addnorm.fusion.streams import DEPENDS, READ_ELSEWHERE
from support.fused_model import QUIET, fuse
from support.graph_capture import capture_graphs, relative_difference
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
)
from support.stream_steps import noise

pytestmark = QUIET


def einsums(m, x, w, a, b, c):
    new = torch.einsum("btkj,btjd->btkd", a, x) + torch.einsum("btk,btd->btkd", b, w)
    return new, F.rms_norm(torch.einsum("btk,btkd->btd", c, new), (D,), m.weight, 1e-6)


def streams_first(m, x, w, a, b, c):
    new = torch.einsum("btkj,jbtd->kbtd", a, x.movedim(2, 0)) + torch.einsum("btk,btd->kbtd", b, w)
    return new, m.norm(torch.einsum("btk,kbtd->btd", c, new))


def spell(write, read=read):
    """Return the boundary of a write, a function of x, w, a and b, and of a read, a function of c and the new streams."""

    def boundary(m, x, w, a, b, c):
        new = write(x, w, a, b)
        return new, m.norm(read(c, new))

    return boundary


def flat(write):
    """Return the boundary of a write whose tensors have one dimension of tokens, and of a read by `torch.bmm`."""
    boundary = spell(write, lambda c, new: torch.bmm(c.unsqueeze(-2), new).squeeze(-2))
    return lambda m, *tensors: boundary(m, *(t.flatten(0, 1) for t in tensors))


joined = spell(lambda x, w, a, b: torch.cat([a, b.unsqueeze(-1)], -1) @ torch.cat([x, w.unsqueeze(-2)], -2))
SPELLINGS = {
    "deepseek": deepseek, "einsums": einsums, "streams first": streams_first, "broadcast sums": broadcast_sums, "joined": joined,
    "baddbmm": flat(lambda x, w, a, b: torch.baddbmm(outer(b, w), a, x, beta=0.5, alpha=-2)),
    "outer products": flat(lambda x, w, a, b: torch.baddbmm(a @ x, b.unsqueeze(-1), w.unsqueeze(-2))),
    "unmixed": spell(lambda x, w, a, b: x + w.unsqueeze(-2), lambda c, new: read(c[0, 0], new)),
    "subtracted": spell(lambda x, w, a, b: a @ x - outer(b, w), lambda c, new: (c.unsqueeze(-1) * new).mean(-2)),
    "negated": spell(lambda x, w, a, b: torch.rsub(-outer(b, w), a @ x, alpha=2), lambda c, new: -0.5 * read(c, new)),
    "alphas": spell(
        lambda x, w, a, b: torch.add(a @ x, outer(b, w), alpha=0.25), lambda c, new: (c.unsqueeze(-2) @ new).squeeze(-2) / 3
    ),
    "addcmul": spell(
        lambda x, w, a, b: torch.addcmul(a @ x, b.unsqueeze(-1), w.unsqueeze(-2), value=-1),
        lambda c, new: torch.einsum("btkd,btk->btd", new, c),
    ),
    "joined sums": spell(
        lambda x, w, a, b: read(torch.cat([b.unsqueeze(-1), a], -1), torch.cat([w.unsqueeze(-2), x], -2).unsqueeze(-3))
    ),
    "expanded": spell(lambda x, w, a, b: x + b.unsqueeze(-1).expand_as(x) * w.unsqueeze(-2).expand_as(x)),
    "sum of a list": spell(lambda x, w, a, b: sum([a @ x, outer(b, w)])),
    "stacked sum": spell(
        lambda x, w, a, b: torch.stack([F.linear(x.mT, a[0, 0]).mT, outer(b[0, 0], w)]).sum(0),
        lambda c, new: F.linear(new.mT, c[0, 0][None]).squeeze(-1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_boundary_is_one_call_as_exact_as_eager(name, dtype):
    model = Boundary(SPELLINGS[name]).to(dtype)
    capture = capture_graphs(model)
    assert_as_exact(model, capture.compiled, X.to(dtype), dtype=dtype)
    (boundary,) = capture.boundaries
    assert (boundary.reason, boundary.remark, boundary.streams, boundary.returns_residual) == (None, "", N, True)
    assert "einsum" not in capture.code


def test_coefficients_of_the_new_streams_make_two_calls():
    def dependent(m, x, w, a, b, c):
        new = outer(b, w) + a @ x
        return new, m.norm((new.mean(-1).sigmoid().unsqueeze(-1) * new).sum(-2))

    model = Boundary(dependent)
    capture = capture_graphs(model)
    assert_close(capture.compiled, model, X)
    assert [(one.kind, one.reason, one.remark) for one in capture.boundaries] == [
        ("none", None, DEPENDS), ("layer", None, DEPENDS),
    ]  # fmt: skip


def test_read_that_is_used_without_its_norm_is_not_fused():
    def shared(m, x, w, a, b, c):
        new = outer(b, w) + a @ x
        u = read(c, new)
        return new, m.norm(u), u.relu()

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
        new = outer(b, w) + a @ x
        x.mul_(2.0)
        return new, m.norm(read(c, new)), x

    model = Boundary(in_place)
    capture = capture_graphs(model)
    with torch.no_grad():
        assert_close(capture.compiled, model, X)
    # The write is none, and the read of the changed streams has its norm alone.
    assert [(one.reason, one.kind) for one in capture.boundaries] == [
        ("a tensor that it reads is modified in place later", "none"),
        (None, "layer"),
    ]


last_token = spell(lambda x, w, a, b: x + w.unsqueeze(-2), lambda c, new: read(c, new)[:, -1])
rounded_mix = spell(lambda x, w, a, b: (a @ x).half().float() + outer(b, w))
by_length = spell(lambda x, w, a, b: a @ x + outer(b, w) / x.shape[1], lambda c, new: read(c, new) / new.shape[1])


def unused(m, x, w, a, b, c):
    m.norm((x + w.unsqueeze(-2)).mean(-2))
    return (x + outer(b, w),)


@pytest.mark.parametrize("function", [deepseek, joined, last_token, rounded_mix, by_length, unused])
def test_fused_model_takes_other_numbers_of_tokens(function):
    """Where a cut depends on the number of tokens, or a product is rounded, the write is all that one call can do."""
    model = Boundary(function)
    plain = copy.deepcopy(model)
    assert fuse(model, X).proof.holds
    for tokens in (3, 7, 9, 2, *[0] * (function is not last_token)):
        x = torch.randn(2, tokens, N, D)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)


def test_second_derivative_is_that_of_the_model():
    model = Boundary(deepseek).double()
    capture, x = capture_graphs(model), X.double().requires_grad_()

    def penalty(call):
        (grad,) = torch.autograd.grad(call(x)[1].square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    assert relative_difference(penalty(model), penalty(capture.compiled)) < 1e-9


@pytest.mark.parametrize(("fault", "one_call"), [("single pass", 2), ("", 0)])
def test_fuse_reports_boundaries_of_streams(fault, one_call):
    model, x = make_mhc("stacked", fault, layers=1), noise(2, 5, D)
    fusion = fuse(model, x)
    assert fusion.proof.holds
    assert not fusion.unfused
    assert f"{one_call} of 2 writes of 4 streams in one call" in str(fusion)
    assert (DEPENDS.split()[-1] in str(fusion)) is not bool(one_call)
    addnorm.unfuse(model)
