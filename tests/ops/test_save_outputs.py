"""Tests of saving y instead of z: the stated bound holds, nothing else changes, and weights that are too small are refused."""

import contextvars
import functools
import itertools

import pytest
import torch
from functorch.compile import aot_function, nop
from torch.utils.checkpoint import CheckpointError, checkpoint

import addnorm
from addnorm import reference
from addnorm.ops import save_outputs
from support.cases import bf16, f16, f32, f64
from support.oracle import UNIT

D = 40
FUNCTIONS = {"layer": addnorm.add_layer_norm, "rms": addnorm.add_rms_norm}


def draw(dtype, *, norm="layer", parameters=None, shift=0.0, rows=7):
    """Return residual, branch, weight and bias; the last features have weights near the smallest and large biases."""
    rng = torch.Generator().manual_seed(rows)
    residual, branch = (torch.randn(rows, D, generator=rng) + shift for _ in range(2))
    weight = torch.rand(D, generator=rng) + 0.5
    bias = torch.randn(D, generator=rng)
    weight[-8:] *= torch.tensor([-1.0, 0.01, 0.002, 1.0, 1.0, 4.0, 0.1, -0.1])
    bias[-8:] = weight[-8:] * torch.tensor([1.0, -2.0, 0.5, 15.0, -15.0, 3.0, 7.0, 11.0])
    parameters = [weight, bias] if norm == "layer" else [weight]
    return [t.to(dtype).requires_grad_() for t in (residual, branch, *parameters)]


def gradients(norm, tensors, saves, **options):
    """Return y, z and the gradients of all tensors for random cotangents of y and z."""
    rng = torch.Generator().manual_seed(5)
    with addnorm.save_outputs() if saves else torch.enable_grad():
        y, z = FUNCTIONS[norm](*tensors, return_residual=True, **options)
    cotangents = [torch.randn(t.shape, generator=rng).to(t.dtype) for t in (y, z)]
    return (y, z), cotangents, torch.autograd.grad((y, z), tensors, cotangents)


@pytest.mark.parametrize("shift", [0.0, 30.0])
@pytest.mark.parametrize("norm", FUNCTIONS)
@pytest.mark.parametrize("dtype", [f64, f32, bf16, f16], ids=str)
def test_gradients_are_within_the_stated_bound(dtype, norm, shift):
    tensors = draw(dtype, norm=norm, shift=shift)
    (y, z), (dy, dz), grads = gradients(norm, tensors, True)
    expected_outputs = gradients(norm, tensors, False)[0]
    assert y.equal(expected_outputs[0])
    assert z.equal(expected_outputs[1])
    weight, bias = (t.detach().double() for t in (*tensors[2:], torch.zeros(D))[:2])
    exact, dy = z.detach().double(), dy.double()
    stats = reference.statistics(exact, norm, 1e-5 if norm == "layer" else torch.finfo(reference.compute_dtype(z)).eps)
    x_hat = (exact - stats.mean) * stats.rstd
    unit, wide = UNIT[dtype], UNIT[f64 if dtype == f64 else f32]
    off = 2 * unit * (x_hat.abs() + (bias / weight).abs()) + 8 * wide * (x_hat.abs() + (stats.mean * stats.rstd).abs())
    truth = reference.normalize_backward(dy, exact, weight, stats, norm=norm)
    g = dy * weight
    c1 = (g * x_hat).mean(-1, keepdim=True).abs()
    # What a change of x_hat by `off` does to the formulas, and the rounding of the kernels' own sums and results.
    noise = (
        8
        * wide
        * stats.rstd
        * (g.abs() + g.abs().mean(-1, keepdim=True) + x_hat.abs() * (g * x_hat).abs().mean(-1, keepdim=True))
    )
    limits = {
        "residual": stats.rstd * (c1 * off + x_hat.abs() * (g.abs() * off).mean(-1, keepdim=True) + off * (g.abs() * off).mean(-1, keepdim=True)) + noise,
        "weight": (dy.abs() * off).sum(0) + 8 * wide * (dy * x_hat).abs().sum(0),
        "bias": 8 * wide * dy.abs().sum(0),
    }  # fmt: skip
    total = truth.z + dz.double()
    for name, actual, right in (
        ("residual", grads[0], total), ("residual", grads[1], total), ("weight", grads[2], truth.weight),
        *([("bias", grads[3], truth.bias)] if norm == "layer" else []),
    ):  # fmt: skip
        error = (actual.double() - right).abs()
        assert (error <= limits[name] + unit * 1.01 * right.abs()).all(), (name, float((error / limits[name]).max()))


@pytest.mark.parametrize("norm", FUNCTIONS)
def test_options_have_gradients_near_the_usual_ones(norm):
    tensors = draw(f32, norm=norm)
    options = {
        "residual_scale": 1.5, "layer_scale": torch.linspace(0.5, 1.5, D, requires_grad=True), "dropout_p": 0.3,
        "seed": torch.tensor(3), "weight_offset": 0.25, "branch_bias": torch.linspace(-1, 1, D, requires_grad=True),
    }  # fmt: skip
    mine, usual = (gradients(norm, tensors, saves, **options)[2] for saves in (True, False))
    for actual, expected in zip(mine, usual, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def saved_storages(call):
    """Return the outputs of a call and the addresses of the tensors that it saves."""
    saved = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.add(t.data_ptr()) or t, lambda t: t):
        return call(), saved


@pytest.mark.parametrize("options", [{}, {"layer_scale": 0.5}], ids=["plain", "with options"])
def test_y_is_saved_instead_of_z(options):
    tensors = draw(f32)
    call = functools.partial(addnorm.add_layer_norm, *tensors, return_residual=True, **options)
    with addnorm.save_outputs():
        (y, z), saved = saved_storages(call)
    assert (y.data_ptr() in saved, z.data_ptr() in saved) == (True, False)
    (_, z), saved = saved_storages(call)
    assert z.data_ptr() in saved


def test_norm_alone_saves_its_input():
    x = torch.randn(3, D, requires_grad=True)
    with addnorm.save_outputs():
        _, saved = saved_storages(lambda: addnorm.layer_norm(x, torch.zeros(D)))  # no inversion, so any weight
    assert x.data_ptr() in saved
    assert addnorm.add_residual(x, x).grad_fn is not None


def test_row_that_overflows_has_its_usual_gradient():
    residual, branch, weight, bias = draw(f32)
    with torch.no_grad():
        residual[2] *= 1e25
    mine, usual = (gradients("layer", (residual, branch, weight, bias), saves)[2] for saves in (True, False))
    assert torch.isfinite(usual[0]).all()
    torch.testing.assert_close(mine[0], usual[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("weight", "bias", "offset", "text"),
    [(0.0, 0.0, 0.0, "= 0 and bias 0 at feature 3"), (-1.0, 0.0, 1.0, "= 0 and bias 0 at feature 3"),
     (1e-4, 0.0, 0.0, "= 0.0001 and"), (0.5, 9.0, 0.0, "= 0.5 and bias 9 at feature 3"), (float("nan"), 0.0, 0.0, "= nan")],
)  # fmt: skip
def test_weight_that_cannot_be_inverted_is_refused(weight, bias, offset, text):
    parameters = [torch.ones(D), torch.zeros(D)]
    parameters[0][3], parameters[1][3] = weight, bias
    x = torch.randn(2, D, requires_grad=True)
    with addnorm.save_outputs(), pytest.raises(ValueError, match=text):
        addnorm.add_layer_norm(x, x, *parameters, weight_offset=offset)
    addnorm.add_layer_norm(x, x, *parameters, weight_offset=offset).sum().backward()


def test_bias_without_weight_has_the_same_limit():
    x = torch.randn(2, D, requires_grad=True)
    with addnorm.save_outputs(), pytest.raises(ValueError, match="bias 17 at feature 0"):
        addnorm.add_layer_norm(x, x, None, torch.full((D,), 17.0))


def test_second_derivative_is_refused():
    x = torch.randn(2, D, requires_grad=True)
    with addnorm.save_outputs():
        y = addnorm.add_layer_norm(x, x)
    with pytest.raises(RuntimeError, match="Second derivatives need z"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_y_changed_in_place_is_noticed():
    x = torch.randn(2, D, requires_grad=True)
    with addnorm.save_outputs():
        y = addnorm.add_layer_norm(x, x)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln"])
def test_stack_has_nearly_the_usual_gradients_with_less_memory(wiring):
    torch.manual_seed(1)
    stack = addnorm.ResidualStack([torch.nn.Linear(D, D) for _ in range(6)], D, wiring)
    x, cotangent = torch.randn(5, D), torch.randn(5, D)

    def run(saves):
        parameters, kept = {p.data_ptr() for p in stack.parameters()}, {}

        def pack(t):
            if t.data_ptr() not in parameters:
                kept[t.untyped_storage().data_ptr()] = t  # alive, so that no address is used twice
            return t

        stack.zero_grad()
        context = addnorm.save_outputs() if saves else torch.enable_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), context:
            y = stack(x)
        y.backward(cotangent)
        return (
            y.detach(),
            [p.grad for p in stack.parameters()],
            sum(t.untyped_storage().nbytes() for t in kept.values()),
        )

    (y, grads, memory), (usual_y, usual_grads, usual_memory) = run(True), run(False)
    assert y.equal(usual_y)
    torch.testing.assert_close(grads, usual_grads, rtol=1e-4, atol=1e-5)
    assert usual_memory - memory >= 5 * x.nbytes  # z of every add whose norm is read by a linear layer


def test_context_ends_with_an_exception():
    with pytest.raises(KeyError), addnorm.save_outputs():
        raise KeyError
    assert not save_outputs.is_active()


def test_generator_may_be_finished_in_another_context():
    def steps():
        with addnorm.save_outputs():
            yield save_outputs.is_active()

    generator = steps()
    assert contextvars.copy_context().run(next, generator)
    generator.close()
    assert not save_outputs.is_active()


ODD_DTYPES = [
    (bf16, f32, bf16),
    (f32, bf16, bf16),
    (f16, f16, f16),
    (f64, f32, f32),
    (f32, f64, f64),
    (bf16, bf16, f32),
]


@pytest.mark.parametrize("casting", ["float32", "llama", "t5"])
@pytest.mark.parametrize(("z_dtype", "y_dtype", "weight_dtype"), ODD_DTYPES, ids=str)
def test_normalized_value_is_within_the_stated_bound(z_dtype, y_dtype, weight_dtype, casting):
    residual, branch, weight, bias = (t.detach().double() for t in draw(f32, shift=3.0, rows=50))
    weight, bias = weight.abs().to(weight_dtype).requires_grad_(), bias.to(weight_dtype)
    options = {"casting": casting, "weight_offset": 0.125, "bias": bias, "return_residual": True, "out_dtype": y_dtype}
    with addnorm.save_outputs():
        y, z = addnorm.add_rms_norm(residual.to(z_dtype), branch.to(z_dtype), weight, **options)
    _, stats, *_ = y.grad_fn.saved_tensors
    with torch.no_grad():
        rebuilt, stats = save_outputs.rebuild(y, stats, weight, bias, z_dtype, 0.125)
    x_hat, size = z.double() * stats[..., 1:], (weight.double() + 0.125).abs()
    wide = UNIT[f64 if z_dtype == f64 else f32]
    unit = max(UNIT[y_dtype], wide)
    bound = 2 * unit * (x_hat.abs() + bias.double().abs() / size) + 8 * wide * x_hat.abs()
    bound += {"float32": 0.0, "llama": 2 * UNIT[z_dtype], "t5": 2 * UNIT[weight_dtype]}[casting] * x_hat.abs()
    bound += 2.0**-24 / size if y_dtype == f16 else 0.0
    assert ((rebuilt.double() * stats[..., 1:] - x_hat).abs() <= bound).all()


@pytest.mark.parametrize("d", [7, 33])
def test_largest_float16_has_finite_gradients(d):
    x = torch.zeros(1, d, dtype=f16)
    x[0, 0] = torch.finfo(f16).max
    x.requires_grad_()
    with addnorm.save_outputs():
        y = addnorm.add_rms_norm(x, torch.zeros_like(x))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"layer_scale": 0.5}], ids=["plain", "with options"])
@pytest.mark.parametrize("check", ["default", "none"])
def test_checkpoint_around_the_context_is_never_wrong(options, check):
    """Recomputed outside of the context, z has the place, shape and dtype of y; with options the bias has a place too."""
    x, branch, weight = draw(f32, norm="rms")
    with addnorm.save_outputs():
        y = checkpoint(
            lambda *t: addnorm.add_rms_norm(*t, **options),
            x,
            branch,
            weight,
            use_reentrant=False,
            determinism_check=check,
        )
    if check == "default":
        with pytest.raises(CheckpointError, match="different metadata"):
            torch.autograd.grad(y.pow(3).sum(), x)
    else:
        usual = addnorm.add_rms_norm(x, branch, weight, **options)
        torch.testing.assert_close(
            torch.autograd.grad(y.pow(3).sum(), x), torch.autograd.grad(usual.pow(3).sum(), x), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(("norm", "forward"), list(itertools.product(FUNCTIONS, [True, False])))
def test_stack_with_checkpoints_keeps_its_context(norm, forward):
    """The context holds in the forward only, or in the backward only."""
    stack = addnorm.ResidualStack([torch.nn.Linear(D, D) for _ in range(4)], D, "pre_ln", norm=norm, checkpoint=True)
    x, cotangent = torch.randn(5, D), torch.randn(5, D)
    usual = torch.autograd.grad(stack(x), tuple(stack.parameters()), cotangent)
    contexts = [addnorm.save_outputs, torch.enable_grad][:: 1 if forward else -1]
    with contexts[0]():
        y = stack(x)
    with contexts[1]():
        grads = torch.autograd.grad(y, tuple(stack.parameters()), cotangent)
    torch.testing.assert_close(grads, usual, rtol=1e-4, atol=1e-4)


def test_traced_call_keeps_z():
    tensors = draw(f32)
    with addnorm.save_outputs():
        grads = torch.autograd.grad(aot_function(addnorm.add_layer_norm, nop)(*tensors).sum(), tensors)
    torch.testing.assert_close(grads, torch.autograd.grad(addnorm.add_layer_norm(*tensors).sum(), tensors))
