"""Tests of inputs at the limits of dtypes and shapes, each with its documented result."""

import math

import pytest
import torch
import torch.nn.functional as F

import addnorm
from addnorm.ops import cpu, philox
from support.accuracy import assert_accurate, forward_and_backward
from support.cases import BASIC, DTYPES, bf16, cotangents, f16, f32, f64, gradients, leaves, make, random
from support.equality import assert_same
from support.inplace_calls import in_place
from support.oracle import UNIT, relative
from support.pairwise import product

NORMS = {"LayerNorm": addnorm.add_layer_norm, "RMSNorm": addnorm.add_rms_norm}
WIDTHS = [2, 17, 64, 100, 771]


def parameters(d):
    generator = torch.Generator().manual_seed(3)
    return random((d,), f32, generator, mean=1.0), random((d,), f32, generator)


@pytest.mark.parametrize("d", [77, 771])
def test_variance_of_one_odd_element_is_accurate(d):
    # The squared mean is about 2**48 d times the variance: in one pass even float64 sums keep no bit of it. The mean is rounded to 1,
    # which moves x_hat by 1 / d of its largest element.
    x = torch.ones(9, d)
    x[torch.arange(9), torch.arange(9) * d // 9] -= 2.0**-24
    y = addnorm.add_layer_norm(x, torch.zeros_like(x), None, None, eps=0.0)
    expected = F.layer_norm(x.double(), (d,), None, None, 0.0)
    assert relative(y, expected) < 2 / d**0.5


@pytest.mark.parametrize("d", [1, 2, 5, 16, 17, 33, 64, 77, 100, 771])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [*((f32, value) for value in (0.0, 0.1, -3.3, 1e4 + 0.3, 1e30, 5e36, 3e-39)), (bf16, 5e36), (f64, 1e306)],
)
def test_constant_row_gives_exactly_the_bias(dtype, value, d):
    """Elements beyond the end of a row must not enter its sums, whatever the value of mean * rstd."""
    weight, bias = parameters(d)
    residual = torch.full((5, d), value, dtype=dtype, requires_grad=True)
    y = addnorm.add_layer_norm(residual, torch.zeros_like(residual), weight, bias)
    if cpu.ISA is not None:
        assert y.equal(bias.to(dtype).expand(5, d))
    else:  # the reference's mean of d equal numbers may be off by one or two roundings
        left = 4 * UNIT[dtype] * abs(value) / math.sqrt(1e-5) if value < 1e30 else 0.0
        assert ((y - bias).abs() <= left * weight.abs() + 2 * UNIT[dtype] * bias.abs()).all()
    dy = cotangents({"y": y})["y"]
    y.backward(dy)
    # x_hat is 0: dz = rstd (g - mean(g)), as in torch.
    g = (dy * weight).to(f64)
    error = residual.grad.to(f64) - (g - g.mean(-1, keepdim=True)) / math.sqrt(1e-5)
    assert error.norm() < (2 if dtype == bf16 else 8) * UNIT[bf16 if dtype == bf16 else f32] * g.norm() / math.sqrt(
        1e-5
    )


@pytest.mark.parametrize(
    ("shape", "variant", "dtypes"),
    product([(0, 8), (3, 0, 8), (0, 1), (0, 0), (3, 0), (2, 3, 0)], list(BASIC), list(DTYPES)),
    ids=str,
)
def test_empty_inputs_give_zero_gradients(shape, variant, dtypes):
    call = make(variant, dtypes, shape)
    assert all(out.shape == shape for out in call().values())
    assert call.y_alone().shape == shape
    assert_same(gradients(call), {name: torch.zeros_like(t) for name, t in call.tensors.items()})


@pytest.mark.parametrize("d", [2**33, 2**62, 2**63 - 1])
@pytest.mark.parametrize("variant", ["LayerNorm without either", "dropout", "layer_scale a number", "the add alone"])
def test_rows_of_any_size_are_no_rows(variant, d):
    """The bytes of a row overflow, or exceed any memory."""
    call = make(variant, "float32", (0, 4))
    call.tensors = {name: torch.empty(0, d) for name in ("residual", "branch")}
    tensors = leaves(call)
    outputs = call(tensors)
    torch.autograd.backward(list(outputs.values()), list(outputs.values()))
    assert {t.shape for t in (*outputs.values(), *(t.grad for t in tensors.values()), *in_place(call).values())} == {
        (0, d)
    }


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize(("dtype", "size"), [(f32, 1e30), (bf16, 1e30), (f64, 1e200)])
@pytest.mark.parametrize("norm", NORMS)
def test_overflowing_squares_give_the_bias(norm, dtype, size, d):
    weight, bias = parameters(d)
    residual = torch.where(torch.arange(d) % 3 == 0, 1.0, -0.5).expand(4, d)
    residual = (residual.to(dtype) * size).requires_grad_()
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    y, z = NORMS[norm](residual, torch.zeros(4, d, dtype=dtype), weight, bias, return_residual=True)
    assert y.equal(bias.to(dtype).expand(4, d))
    grad_outputs = cotangents({"y": y, "z": z})
    torch.autograd.backward([y, z], list(grad_outputs.values()))
    assert residual.grad.equal(grad_outputs["z"])  # through the add alone
    assert weight.grad.tolist() == [0.0] * d
    torch.testing.assert_close(bias.grad, grad_outputs["y"].to(f32).sum(0))


@pytest.mark.parametrize("scale", [1e-30, 1e-38])
@pytest.mark.parametrize("norm", NORMS)
def test_vanishing_squares_without_eps_are_accurate_or_infinite(norm, scale):
    """The kernels square float32 in float64. In the reference the squares underflow, and rstd is infinite, as in torch."""
    z = scale * torch.randn(4, 33)
    y = NORMS[norm](z, torch.zeros_like(z), None, None, 0.0)
    if cpu.ISA is None:
        assert not y.isfinite().any()
    else:
        wide = z.to(f64)
        expected = F.layer_norm(wide, (33,), eps=0.0) if norm == "LayerNorm" else F.rms_norm(wide, (33,), eps=0.0)
        assert relative(y, expected) < 2 * UNIT[f32]


@pytest.mark.parametrize(
    ("variant", "poison", "dtypes", "d"),
    product(["LayerNorm", "RMSNorm with bias"], [math.nan, math.inf, -math.inf], list(DTYPES), [2, 17, 64]),
)
def test_nan_and_infinity_stay_in_their_row(variant, poison, dtypes, d):
    call = make(variant, dtypes, (6, d))
    clean = call()
    grad_outputs = cotangents(clean)
    untouched = gradients(call, grad_outputs)
    call.tensors["branch"][2, d // 2] = poison
    y, z = call().values()
    rest = [0, 1, 3, 4, 5]
    assert y[rest].equal(clean["y"][rest])
    assert z[rest].equal(clean["z"][rest])
    if variant.startswith("RMSNorm") and math.isinf(poison):
        # The square overflows: rstd is 0, 0 times infinity is NaN, and the other elements equal the bias, as in torch.
        there = torch.arange(d) == d // 2
        assert y[2].isnan().equal(there)
        assert y[2][~there].equal(call.tensors["bias"].to(y.dtype)[~there])
    else:
        assert y[2].isnan().all()
    grads = gradients(call, grad_outputs)
    for name in ("residual", "branch"):
        assert grads[name][2].isnan().all()
        assert grads[name][rest].equal(untouched[name][rest])


@pytest.mark.parametrize("variant", ["LayerNorm", "RMSNorm", "everything, LayerNorm"])
def test_lazily_negated_views_are_resolved(variant):
    """`t.conj().imag` is a float view whose memory has the opposite sign."""
    call = make(variant, "float32", (9, 33))
    expected = call()
    branch = call.tensors["branch"]
    call.tensors["branch"] = torch.complex(branch, -branch).conj().imag
    assert call.tensors["branch"].is_neg()
    assert_same(call(), expected)


@pytest.mark.parametrize("name", ["z", "weight"])
def test_changing_a_saved_tensor_before_its_backward_raises(name):
    call = make("LayerNorm", "float32", (4, 8))
    tensors = leaves(call)
    outputs = call(tensors)
    (outputs | tensors)[name].detach().add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs["y"].sum().backward()


@pytest.mark.parametrize("dtype", [f32, bf16, f16, f64])
def test_dropout_of_infinities_leaves_the_residual(dtype):
    residual = torch.randn(4, 33).to(dtype)
    branch = torch.full((4, 33), math.inf, dtype=dtype)
    branch[::2] = math.nan
    branch.requires_grad_()
    seed = torch.tensor(5)
    z = addnorm.add_residual(residual, branch, dropout_p=0.5, seed=seed)
    dropped = ~philox.keep_mask((4, 33), 0.5, seed)
    assert dropped.any()
    assert z[dropped].equal(residual[dropped])
    assert not z[~dropped].isfinite().any()
    nothing = addnorm.add_residual(residual, branch, dropout_p=1.0)
    assert nothing.equal(residual)
    nothing.backward(torch.randn(4, 33).to(dtype))
    assert branch.grad.eq(0).all()


@pytest.mark.parametrize("d", [4096, 32768, 70000])
def test_long_row_is_as_exact_as_torchs(d):
    call = make("LayerNorm without either", "float32", (16, d))
    grad_outputs = cotangents(call())
    assert_accurate(call, forward_and_backward(call, call, grad_outputs), grad_outputs)


@pytest.mark.parametrize("options", [{}, {"layer_scale": 0.5, "return_residual": True}], ids=["plain", "options"])
def test_jagged_nested_tensors_are_computed_by_rows(options):
    values, weight, bias = torch.randn(8, 6), torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)
    offsets = torch.tensor([0, 3, 8])
    results = []
    for wrap in (lambda t: torch.nested.nested_tensor_from_jagged(t, offsets), lambda t: t):
        leaf = values.clone().requires_grad_()
        x = wrap(leaf)
        outputs = addnorm.add_layer_norm(x, x.sin(), weight, bias, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert all(t.shape == x.shape for t in outputs)
        rows = [t.values() if t.is_nested else t for t in outputs]
        results.append([*rows, *torch.autograd.grad(sum(t.sin().sum() for t in rows), [leaf, weight, bias])])
    assert_same(*results)


def test_nested_branch_needs_the_offsets_of_residual():
    x, other = (
        torch.nested.nested_tensor([torch.randn(3, 6), torch.randn(5, 6)], layout=torch.jagged) for _ in range(2)
    )
    for branch, words in (
        (other, "a nested tensor with other offsets"),
        (torch.randn(8, 6), r"a float32 tensor of shape \(8, 6\)"),
    ):
        with pytest.raises(
            ValueError, match=f"branch is {words}, expected a nested tensor with the offsets of residual"
        ):
            addnorm.add_layer_norm(x, branch)
    assert addnorm.AddNorm(6)(x, x).shape == x.shape


def test_normalized_dimensions_of_nested_tensors_are_whole():
    rows = torch.randn(8, 2, 6)
    x = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 3, 8]))
    assert (
        addnorm.layer_norm(x, normalized_shape=(2, 6)).values().equal(addnorm.layer_norm(rows, normalized_shape=(2, 6)))
    )
    swapped = x.transpose(1, 2)
    assert addnorm.rms_norm(swapped).unbind()[1].equal(addnorm.rms_norm(swapped.unbind()[1]))
    ragged = torch.nested.nested_tensor([torch.randn(3), torch.randn(5)], layout=torch.jagged)
    for call in (lambda: addnorm.rms_norm(ragged), lambda: addnorm.layer_norm(x, normalized_shape=(8, 2, 6))):
        with pytest.raises(TypeError, match="x is a nested tensor, expected an ordinary one"):
            call()
