"""Tests of Add & Norms whose replacement would be visible through memory, gradients, numbers or strides."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.graph_capture import D, FunctionModel, X, capture_graphs, fuse_function, relative_difference

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.*:UserWarning")
READ_LATER = "its add writes in place into memory that is read later through another view"
WRITES = "its norm writes in place into memory that is read elsewhere"
AFTER = "its weight or bias is computed after the add and cannot be moved before it"
NUMBER = "it uses a number that may differ between calls"


def rms(m, z, eps=1e-6):
    return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps) * m.weight


def layer(m, z, weight):
    return F.layer_norm(z, (D,), weight, m.bias)


def reasons_of(function, *calls, **options):
    """Return the reasons for unfused adds, after a comparison of outputs, strides, buffers and gradients."""
    return fuse_function(function, *calls, **options).reasons


# --- gradients -------------------------------------------------------------------------------------------------------------


def detached(m, x):
    z = x + m.f(x)
    return m.norm(z.detach()) + m.g(z)


def detached_root(m, x):
    z = x + m.f(x)
    return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6).detach() * m.weight


@pytest.mark.parametrize("function", [detached, detached_root])
def test_detached_norm_is_not_fused(function):
    assert reasons_of(function) == ["its norm detaches a part from the gradient"]


def test_detached_weight_stays_detached():
    assert reasons_of(lambda m, x: layer(m, x + m.f(x), m.weight.detach())) == [None]


def test_sum_modified_later_is_not_saved():
    def later(m, x):
        z = x + m.f(x)
        h = z.float()
        y = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(z.dtype) * m.weight
        z += m.g(y)  # autograd saved h, not z
        return z

    bf16 = {"dtype": torch.bfloat16, "limit": 3e-2}
    assert reasons_of(later, **bf16) == ["its sum, which backward needs, is modified in place later"]
    assert reasons_of(later, gradients=False, **bf16) == [None]


# --- weights ---------------------------------------------------------------------------------------------------------------


def of_the_sum(m, x):
    z = x + m.f(x)
    return layer(m, z, z.mean((0, 1)))


def dropped(m, x):
    z = x + m.f(x)
    other = F.dropout(z, 0.5)
    return layer(m, z, F.dropout(m.weight, 0.5)) + other


def without_gradient(m, x):
    z = x + m.f(x)
    with torch.no_grad():
        weight = 1 + m.weight
    return layer(m, z, weight)


@pytest.mark.parametrize("function", [of_the_sum, dropped, without_gradient])
def test_weight_that_depends_on_the_sum_is_not_moved(function):
    assert reasons_of(function) == [AFTER]


def test_no_grad_code_in_between_is_allowed():
    def angles(m, x):
        z = x + m.f(x)
        with torch.no_grad():
            angle = torch.arange(5.0).sin()
        return m.norm(z) * angle[:, None]

    assert reasons_of(angles) == [None]


def test_weight_written_after_the_add_is_not_moved():
    def written(m, x):
        z = x + m.f(x)
        other = z * m.buffer
        m.buffer.mul_(2)
        return layer(m, z, m.buffer) + other

    assert reasons_of(written, gradients=False) == [AFTER]


def test_weight_computed_from_inputs_is_allowed():
    def adaptive(m, x):
        z = x + m.f(x)
        return layer(m, z, m.g(x[0, 0]))

    assert reasons_of(adaptive) == [None]


# --- numbers ---------------------------------------------------------------------------------------------------------------


def test_varying_eps_is_not_fused():
    calls = [(X, eps) for eps in (1e-5, 1e-6, 1.0, 10.0)]
    assert set(reasons_of(lambda m, x, eps: rms(m, x + m.f(x), eps), *calls)) == {None, NUMBER}


def test_varying_alpha_is_not_fused():
    calls = [(X, alpha) for alpha in (0.5, 1.0, 0.25)]
    reasons = reasons_of(lambda m, x, alpha: m.norm(torch.add(x, m.f(x), alpha=alpha)), *calls)
    assert reasons == ["its add has a factor", NUMBER]


def test_eps_in_a_buffer_is_not_fused():
    def change(model, k):
        model.eps.fill_(10.0**-k)

    reasons = reasons_of(lambda m, x: rms(m, x + m.f(x), m.eps), (X,), (X,), change=change)
    assert set(reasons) == {"its norm depends on more than the sum and its parameters"}


@pytest.mark.parametrize("size", [0.0, 1e-7])
def test_lower_bound_is_not_taken_for_eps(size):
    def bounded(m, x):
        z = size * x + size * m.f(x)
        return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True).clamp_min(1e-10)) * m.weight

    assert reasons_of(bounded) == ["its norm has eps as the least value of the square root"]


def test_lower_bound_is_found_in_a_single_row():
    bounded = lambda m, x: rms(m, (x + m.f(x)).view(1, D)).view(-1)  # noqa: E731
    assert reasons_of(bounded, (X[:1, 0],)) == [None]

    def clamped(m, x):
        z = (x + m.f(x)).view(1, D)
        return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True).clamp_min(1e-10)) * m.weight

    assert reasons_of(clamped, (X[:1, 0],)) == ["its norm has eps as the least value of the square root"]


def test_data_dependent_sizes_are_fused():
    def chosen(m, x, keep):
        x = x[keep.nonzero().squeeze(-1)]
        z = x + m.f(x)
        return m.norm(z.view(-1, D)), z

    keep = torch.tensor([True, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert reasons_of(chosen, (X, keep), (X, ~keep), (X, keep | ~keep)) == [None]


def test_norm_over_another_dimension_is_not_fused():
    def channels(m, x):
        z = x.transpose(1, 2) + m.f(x).transpose(1, 2)
        return m.norm(z.transpose(1, 2))

    assert reasons_of(channels) == ["its norm is not over the last dimension of its sum"]


# --- memory ----------------------------------------------------------------------------------------------------------------

ALIASES = {
    "contiguous": lambda f: f.contiguous(), "to": lambda f: f.to(f.dtype), "dropout": lambda f: F.dropout(f, 0.5, False),
}  # fmt: skip


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_add_in_place_seen_by_an_alias_is_not_fused(alias):
    def one(m, x):
        f = m.f(x)
        other = alias(f)
        f += x
        return m.norm(f) + other

    def other(m, x):
        f = m.f(x)
        other = alias(f)
        other += x
        return m.norm(other) + f

    assert reasons_of(one) == [READ_LATER]
    assert reasons_of(other) == [READ_LATER]


def test_add_in_place_by_aten_is_not_fused():
    def add(m, x):
        f = m.f(x)
        return m.norm(torch.ops.aten.add_.Tensor(f, x)) + f

    assert reasons_of(add) == [READ_LATER]


def test_norm_in_place_seen_by_a_view_is_not_fused():
    def of_a_step(m, x):
        z = x + m.f(x)
        h = z - z.mean(-1, keepdim=True)
        view = h.view(-1)
        h *= torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return h * m.weight, view * 2

    def of_the_sum(m, x):
        z = x + m.f(x)
        view = z.view(-1)
        z -= z.mean(-1, keepdim=True)
        z *= torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-5)
        return z * m.weight, view * 2

    assert reasons_of(of_a_step, gradients=False) == [WRITES]
    assert reasons_of(of_the_sum, gradients=False) == [WRITES]


def test_unobserved_norm_in_place_is_fused():
    def unseen(m, x):
        z = x + m.f(x)
        h = z - z.mean(-1, keepdim=True)
        h *= torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        h *= m.weight
        return h + z

    assert reasons_of(unseen, gradients=False) == [None]


def test_write_inside_a_checkpoint_is_noticed():
    def forward(m, x):
        z = x + m.f(x)
        checkpoint(lambda t: t.mul_(2), z, use_reentrant=False)
        return m.norm(z)

    model = FunctionModel(forward)
    capture = capture_graphs(model)
    assert relative_difference(model(X), capture.compiled(X)) < 1e-6
    assert capture.reasons == []


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
        y = norm(m, (m.f(x) + x).transpose(0, 1))
        return (y.contiguous().view(-1, D),)

    assert reasons_of(both, (x,)) == [None]
    assert reasons_of(mixed, (x,)) == [None]
    assert reasons_of(viewed, (x,)) == [None]


def test_view_that_depends_on_strides_works():
    def forward(m, x):
        z = x + x.tanh()
        y = rms(m, z)
        return y.transpose(0, 1).view(-1, D) + z.transpose(0, 1).view(-1, D)

    assert reasons_of(forward, (X.transpose(0, 1),)) == [None]
