"""Tests of gradients that are sums, or of another dtype than their neighbours: rounded once, at the end, in memory of their own."""

import pytest
import torch

import addnorm
from addnorm.ops.schema import GRADIENTS
from support.cases import bf16, f16, f32, f64
from support.oracle import UNIT, relative

SHAPE = (3, 200, 16)
with_and_without_graph = pytest.mark.parametrize("create_graph", [False, True])
SHAPES = {
    "residual_scale": [(), (16,)],
    "layer_scale": [(), (16,)],
    "branch_bias": [(16,)],
    "row_scale": [(3, 200), (3, 1), (1, 200), (1, 1), (200,), ()],
}
# The operator itself has one number for each row.
CASES = [
    (name, shape, path)
    for name, shapes in SHAPES.items()
    for shape in shapes
    for path in ("kernels", "create_graph", "reference")
    if path != "reference" or name != "row_scale" or shape == SHAPE[:-1]
]


def inputs(dtype):
    """Return residual, branch, and a gradient of z whose products with them have a mean."""
    residual, branch, noise = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(7), dtype=f64)
    return residual.to(dtype), branch.to(dtype), (0.1 + residual + branch + 0.3 * noise).to(dtype)


def is_rounded_once(actual, expected, bound):
    """Return whether the error is that of the correctly rounded result, but for the bound."""
    best = expected.to(actual.dtype).to(f64) - expected
    return bool(((actual.to(f64) - expected).abs() <= best.abs() + bound).all())


@pytest.mark.parametrize("scale_dtype", [bf16, f16])
@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize(("name", "shape", "path"), CASES, ids=str)
def test_gradient_of_a_scale_is_rounded_once(name, shape, dtype, scale_dtype, path):
    """A sum of terms, of rows or of samples in 16 bits would be off by many roundings."""
    residual, branch, dz = inputs(dtype)
    factor = {"residual_scale": residual.to(f64), "branch_bias": torch.ones(SHAPE, dtype=f64)}.get(name, branch.to(f64))
    terms = dz.to(f64) * factor
    if name == "row_scale":
        terms = terms.sum(-1)
    expected, bound = terms.sum_to_size(shape), terms.abs().sum_to_size(shape) * 8 * UNIT[f32]
    scale = torch.ones(shape, dtype=scale_dtype, requires_grad=True)
    if path != "reference":
        z = addnorm.add_residual(residual, branch, **{name: scale})
        (grad,) = torch.autograd.grad(z, scale, dz, create_graph=path == "create_graph")
    else:
        grad = torch.ops.addnorm.add_norm_backward_reference(
            None, dz, dz, dz.new_empty(0), None, 2, dtype, dtype, f32, 1 << GRADIENTS.index(name), 0.0,
            residual, branch, **{name: scale.detach()},
        )[GRADIENTS.index(name)]  # fmt: skip
    assert grad.dtype == scale_dtype
    assert grad.shape == shape
    assert is_rounded_once(grad, expected, bound)


@pytest.mark.parametrize("shape", [(1, 5), (3, 1), (1, 1, 4), (2, 1, 3)], ids=str)
@with_and_without_graph
def test_row_scale_keeps_dimensions_of_one(shape, create_graph):
    residual, branch, dz = torch.randn(3, *shape, 8, dtype=f64)
    scale = torch.rand(shape, dtype=f64, requires_grad=True)
    z = addnorm.add_residual(residual, branch, row_scale=scale, layer_scale=2.0)
    (grad,) = torch.autograd.grad(z, scale, dz, create_graph=create_graph)
    torch.testing.assert_close(grad, 2 * (dz * branch).sum(-1), check_stride=False)


@pytest.mark.parametrize("options", [{}, {"layer_scale": 0.5}], ids=str)
@with_and_without_graph
def test_gradient_keeps_the_bits_of_its_own_dtype(options, create_graph):
    """The gradient of a float32 branch of a bfloat16 stream is not rounded to bfloat16."""
    residual = torch.randn(5, 33).to(bf16).requires_grad_()
    branch, dy = torch.randn(5, 33, requires_grad=True), torch.randn(5, 33)
    y, z = addnorm.add_layer_norm(residual, branch, return_residual=True, **options)
    _, grad = torch.autograd.grad(y, (residual, branch), dy, create_graph=create_graph)
    exact = z.detach().to(f64).requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.layer_norm(exact, (33,)), exact, dy.to(f64))
    expected *= options.get("layer_scale", 1.0)
    assert relative(grad, expected) < 8 * UNIT[f32]


@pytest.mark.parametrize("shared", ["mix", "inject", "collapse"])
@with_and_without_graph
def test_gradient_of_a_shared_coefficient_is_rounded_once(shared, create_graph):
    n, d = 4, 8
    streams, branch = torch.randn(2, 300, n, d), torch.randn(2, 300, d)
    coefficients = {"mix": torch.eye(n), "inject": torch.ones(n), "collapse": torch.ones(n)}
    leaf = coefficients[shared].to(bf16).requires_grad_()
    leaves = {**coefficients, shared: leaf}
    dnew, dread = torch.randn(2, 300, n, d), torch.randn(2, 300, d)

    def total(values):
        new, read = addnorm.add_norm_streams(streams, branch, **values, norm="none")[:2]
        return (new * dnew).sum() + (read * dread).sum()

    (grad,) = torch.autograd.grad(total(leaves), leaf, create_graph=create_graph)
    wide = leaf.detach().to(f32).requires_grad_()
    (expected,) = torch.autograd.grad(total({**coefficients, shared: wide}), wide)
    assert grad.dtype == bf16
    assert is_rounded_once(grad, expected, 1e-3)
