"""Tests of Add & Norms whose replacement would be visible through memory, gradients, numbers or strides."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.graph_capture import D, FunctionModel, X, capture_graphs, fuse_function, relative_difference

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.*:UserWarning")
AFTER = "its weight or bias is computed after the add and cannot be moved before it"
BOUND = "its norm has eps as the least value of the square root"
DETACHED = "its norm detaches a part from the gradient"
NUMBER = "it uses a number that may differ between calls"
READ_LATER = "its add writes in place into memory that is read later through another view"
SAVED = "its sum, which backward needs, is modified in place later"
WRITES = "its norm writes in place into memory that is read elsewhere"


def rstd(z, eps=1e-6):
    return torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps)


def rms(m, z, eps=1e-6):
    return z * rstd(z, eps) * m.weight


def bounded(m, z):
    return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True).clamp_min(1e-10)) * m.weight


def layer(m, z, weight):
    return F.layer_norm(z, (D,), weight, m.bias)


def of_sum(function):
    """Return the forward in which a function reads the sum of the input and a sublayer."""
    return lambda m, x: function(m, x + m.f(x))


# --- weights ---------------------------------------------------------------------------------------------------------------


def dropped(m, z):
    other = F.dropout(z, 0.5)
    return layer(m, z, F.dropout(m.weight, 0.5)) + other


def without_gradient(m, z):
    with torch.no_grad():
        weight = 1 + m.weight
    return layer(m, z, weight)


def written(m, z):
    other = z * m.buffer
    m.buffer.mul_(2)
    return layer(m, z, m.buffer) + other


def angles(m, z):
    with torch.no_grad():
        angle = torch.arange(5.0).sin()
    return m.norm(z) * angle[:, None]


# --- memory ----------------------------------------------------------------------------------------------------------------


def later(m, z):
    h = z.float()
    y = (h * rstd(h)).to(z.dtype) * m.weight
    z += m.g(y)  # autograd saved h, not z
    return z


def step_seen_by_a_view(m, z):
    h = z - z.mean(-1, keepdim=True)
    view = h.view(-1)
    h *= rstd(h)
    return h * m.weight, view * 2


def sum_seen_by_a_view(m, z):
    view = z.view(-1)
    z -= z.mean(-1, keepdim=True)
    z *= rstd(z)
    return z * m.weight, view * 2


def unseen(m, z):
    h = z - z.mean(-1, keepdim=True)
    h *= rstd(h)
    h *= m.weight
    return h + z


def add_by_aten(m, x):
    f = m.f(x)
    return m.norm(torch.ops.aten.add_.Tensor(f, x)) + f


BF16 = {"dtype": torch.bfloat16, "limit": 3e-2}
NO_GRAD = {"gradients": False}
CASES = {
    "detached sum": (of_sum(lambda m, z: m.norm(z.detach()) + m.g(z)), DETACHED),
    "detached root": (
        of_sum(lambda m, z: z * rstd(z).detach() * m.weight), DETACHED,
    ),
    "detached weight": (of_sum(lambda m, z: layer(m, z, m.weight.detach())), None),
    "weight of the sum": (of_sum(lambda m, z: layer(m, z, z.mean((0, 1)))), AFTER),
    "weight with dropout": (of_sum(dropped), AFTER),
    "weight without gradient": (of_sum(without_gradient), AFTER),
    "weight that is written": (of_sum(written), AFTER, NO_GRAD),
    "weight computed from the input": (lambda m, x: layer(m, x + m.f(x), m.g(x[0, 0])), None),
    "other code without gradient": (of_sum(angles), None),
    "sum modified later": (of_sum(later), SAVED, BF16),
    "sum modified later, without gradients": (of_sum(later), None, BF16 | NO_GRAD),
    "lower bound, zeros": (lambda m, x: bounded(m, 0.0 * x + 0.0 * m.f(x)), BOUND),
    "lower bound, small numbers": (lambda m, x: bounded(m, 1e-7 * x + 1e-7 * m.f(x)), BOUND),
    "norm over another dimension": (
        lambda m, x: m.norm((x.transpose(1, 2) + m.f(x).transpose(1, 2)).transpose(1, 2)),
        "its norm is not over the last dimension of its sum",
    ),
    "add in place by aten": (add_by_aten, READ_LATER),
    "norm in place, a step seen by a view": (of_sum(step_seen_by_a_view), WRITES, NO_GRAD),
    "norm in place, the sum seen by a view": (of_sum(sum_seen_by_a_view), WRITES, NO_GRAD),
    "norm in place, unseen": (of_sum(unseen), None, NO_GRAD),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_side_effect_decides(name):
    function, reason, options = (*CASES[name], {})[:3]
    assert fuse_function(function, **options).reasons == [reason]


ALIASES = {
    "contiguous": lambda f: f.contiguous(), "to": lambda f: f.to(f.dtype), "dropout": lambda f: F.dropout(f, 0.5, False),
}  # fmt: skip


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("is_alias_written", [False, True])
def test_add_in_place_seen_by_an_alias_is_not_fused(alias, is_alias_written):
    def forward(m, x):
        f = m.f(x)
        written, read = (alias(f), f) if is_alias_written else (f, alias(f))
        written += x
        return m.norm(written) + read

    assert fuse_function(forward).reasons == [READ_LATER]


def test_write_inside_a_checkpoint_is_noticed():
    def forward(m, x):
        z = x + m.f(x)
        checkpoint(lambda t: t.mul_(2), z, use_reentrant=False)
        return m.norm(z)

    model = FunctionModel(forward)
    capture = capture_graphs(model)
    assert relative_difference(model(X), capture.compiled(X)) < 1e-6
    assert capture.reasons == []


# --- numbers ---------------------------------------------------------------------------------------------------------------


def test_varying_eps_is_not_fused():
    calls = [(X, eps) for eps in (1e-5, 1e-6, 1.0, 10.0)]
    assert {*fuse_function(lambda m, x, eps: rms(m, x + m.f(x), eps), *calls).reasons} == {None, NUMBER}


def test_varying_alpha_is_not_fused():
    calls = [(X, alpha) for alpha in (0.5, 1.0, 0.25)]
    capture = fuse_function(lambda m, x, alpha: m.norm(torch.add(x, m.f(x), alpha=alpha)), *calls)
    assert capture.reasons == ["its add has a factor", NUMBER]


def test_eps_in_a_buffer_is_not_fused():
    def change(model, k):
        model.eps.fill_(10.0**-k)

    capture = fuse_function(of_sum(lambda m, z: rms(m, z, m.eps)), (X,), (X,), change=change)
    assert {*capture.reasons} == {"its norm depends on more than the sum and its parameters"}


@pytest.mark.parametrize(("norm", "reason"), [(rms, None), (bounded, BOUND)])
def test_lower_bound_is_found_in_a_single_row(norm, reason):
    capture = fuse_function(of_sum(lambda m, z: norm(m, z.view(1, D)).view(-1)), (X[:1, 0],))
    assert capture.reasons == [reason]


def test_data_dependent_sizes_are_fused():
    def chosen(m, x, keep):
        x = x[keep.nonzero().squeeze(-1)]
        z = x + m.f(x)
        return m.norm(z.view(-1, D)), z

    keep = torch.tensor([True, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert fuse_function(chosen, (X, keep), (X, ~keep), (X, keep | ~keep)).reasons == [None]


# --- strides of the results ------------------------------------------------------------------------------------------------

LAID = {
    "rows": X, "tokens first": X.transpose(0, 1), "features first": X.view(2, D, 5).transpose(1, 2), "strided": X[:, ::2],
    "expanded": X[:1].expand(2, 5, D),
}  # fmt: skip


@pytest.mark.parametrize("x", LAID.values(), ids=LAID)
@pytest.mark.parametrize("norm", [rms, lambda m, z: m.norm(z)], ids=["by hand", "torch's"])
def test_results_keep_their_strides(x, norm):
    def both(m, x):
        z = x + x.tanh()
        return norm(m, z), z

    def mixed(m, x):
        z = m.f(x).transpose(0, 1).contiguous().transpose(0, 1) + x
        return norm(m, z), z

    def viewed(m, x):
        return (norm(m, (m.f(x) + x).transpose(0, 1)).contiguous().view(-1, D),)

    for function in (both, mixed, viewed):
        assert fuse_function(function, (x,)).reasons == [None]
