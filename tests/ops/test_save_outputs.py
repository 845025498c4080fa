"""Tests of saving y instead of z: the stated bound holds, nothing else changes, and weights that are too small are refused."""

import contextvars
import functools
import itertools

import pytest
import torch
from functorch.compile import aot_function, nop
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointError, checkpoint

import addnorm
from addnorm.ops import save_outputs
from support.cases import bf16, f16, f32, f64
from support.memory import record_saved
from support.oracle import UNIT

D = 40
plain_and_with_options = pytest.mark.parametrize("options", [{}, {"layer_scale": 0.5}], ids=["plain", "with options"])
FUNCTIONS = {"layer": addnorm.add_layer_norm, "rms": addnorm.add_rms_norm}


def draw(*, norm="layer", shift=0.0, rows=7):
    """Return residual, branch, weight and bias; the last features have weights near the smallest and large biases."""
    rng = torch.Generator().manual_seed(rows)
    residual, branch = (torch.randn(rows, D, generator=rng) + shift for _ in range(2))
    weight = torch.rand(D, generator=rng) + 0.5
    bias = torch.randn(D, generator=rng)
    weight[-8:] *= torch.tensor([-1.0, 0.01, 0.002, 1.0, 1.0, 4.0, 0.1, -0.1])
    bias[-8:] = weight[-8:] * torch.tensor([1.0, -2.0, 0.5, 15.0, -15.0, 3.0, 7.0, 11.0])
    return [t.requires_grad_() for t in (residual, branch, weight, *([bias] if norm == "layer" else []))]


def gradients(norm, tensors, saves, **options):
    """Return the gradients of all tensors for random cotangents of y and z."""
    rng = torch.Generator().manual_seed(5)
    with addnorm.save_outputs() if saves else torch.enable_grad():
        results = FUNCTIONS[norm](*tensors, return_residual=True, **options)
    return torch.autograd.grad(results, tensors, [torch.randn(t.shape, generator=rng) for t in results])


@pytest.mark.parametrize("norm", FUNCTIONS)
def test_options_have_gradients_near_the_usual_ones(norm):
    tensors = draw(norm=norm)
    options = {
        "residual_scale": 1.5, "layer_scale": torch.linspace(0.5, 1.5, D, requires_grad=True), "dropout_p": 0.3,
        "seed": torch.tensor(3), "weight_offset": 0.25, "branch_bias": torch.linspace(-1, 1, D, requires_grad=True),
    }  # fmt: skip
    mine, usual = (gradients(norm, tensors, saves, **options) for saves in (True, False))
    assert_close(mine, usual, rtol=1e-4, atol=1e-4)


@plain_and_with_options
def test_y_is_saved_instead_of_z(options):
    tensors = draw()
    call = functools.partial(addnorm.add_layer_norm, *tensors, return_residual=True, **options)
    for saves in (True, False):
        with addnorm.save_outputs() if saves else torch.enable_grad():
            (y, z), saved = record_saved(call)
        places = [t.data_ptr() for t in saved]
        assert (y.data_ptr() in places, z.data_ptr() in places) == (saves, not saves)


def test_norm_alone_saves_its_input():
    x = torch.randn(3, D, requires_grad=True)
    with addnorm.save_outputs():
        _, saved = record_saved(lambda: addnorm.layer_norm(x, torch.zeros(D)))  # no inversion, so any weight
    assert x.data_ptr() in [t.data_ptr() for t in saved]
    assert addnorm.add_residual(x, x).grad_fn is not None


def test_row_that_overflows_has_its_usual_gradient():
    residual, branch, weight, bias = draw()
    with torch.no_grad():
        residual[2] *= 1e25
    mine, usual = (gradients("layer", (residual, branch, weight, bias), saves) for saves in (True, False))
    assert torch.isfinite(usual[0]).all()
    assert_close(mine[0], usual[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("weight", "bias", "offset", "text"),
    [(0.0, 0.0, 0.0, "= 0 and bias 0 at feature 3"), (-1.0, 0.0, 1.0, "= 0 and bias 0 at feature 3"),
     (1e-4, 0.0, 0.0, "= 0.0001 and"), (0.5, 9.0, 0.0, "= 0.5 and bias 9 at feature 3"), (float("nan"), 0.0, 0.0, "= nan"),
     (None, 17.0, 0.0, "bias 17 at feature 3")],
)  # fmt: skip
def test_weight_that_cannot_be_inverted_is_refused(weight, bias, offset, text):
    weights, biases = torch.ones(D), torch.zeros(D)
    weights[3], biases[3] = weight or 0.0, bias
    parameters = None if weight is None else weights, biases
    x = torch.randn(2, D, requires_grad=True)
    with addnorm.save_outputs(), pytest.raises(ValueError, match=text):
        addnorm.add_layer_norm(x, x, *parameters, weight_offset=offset)
    addnorm.add_layer_norm(x, x, *parameters, weight_offset=offset).sum().backward()


def test_saved_y_allows_no_second_derivative_and_no_change():
    x = torch.randn(2, D, requires_grad=True)
    with addnorm.save_outputs():
        y = addnorm.add_layer_norm(x, x)
    with pytest.raises(RuntimeError, match="Second derivatives need z"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("wiring", ["pre_ln", "post_ln"])
def test_stack_needs_less_memory(wiring):
    stack, x = addnorm.ResidualStack([torch.nn.Linear(D, D) for _ in range(6)], D, wiring), torch.randn(5, D)
    counts = []
    for context in (addnorm.save_outputs, torch.enable_grad):
        with context():
            _, saved = record_saved(lambda: stack(x))
        counts.append(len({t.data_ptr() for t in saved if t.shape == x.shape}))
    assert counts[1] - counts[0] >= 5  # z of every add whose norm is read by a linear layer


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


DTYPES = [  # of z, y and weight
    *((dtype,) * 3 for dtype in (f64, f32, bf16, f16)),
    (bf16, f32, bf16), (f32, bf16, bf16), (f64, f32, f32), (f32, f64, f64), (bf16, bf16, f32),
]  # fmt: skip


@pytest.mark.parametrize("shift", [3.0, 30.0])
@pytest.mark.parametrize(("norm", "casting"), [("layer", None), ("rms", "float32"), ("rms", "llama"), ("rms", "t5")])
@pytest.mark.parametrize(("z_dtype", "y_dtype", "weight_dtype"), DTYPES, ids=str)
def test_normalized_value_is_within_the_stated_bound(z_dtype, y_dtype, weight_dtype, norm, casting, shift):
    """Backward computes from it what it computes from z's without the context."""
    residual, branch, weight, bias = (t.detach().double() for t in draw(shift=shift, rows=50))
    weight, bias = weight.abs().to(weight_dtype).requires_grad_(), bias.to(weight_dtype)
    options = {"casting": casting} if casting else {}
    options |= {"weight_offset": 0.125, "bias": bias, "return_residual": True, "out_dtype": y_dtype}
    call = functools.partial(FUNCTIONS[norm], residual.to(z_dtype), branch.to(z_dtype), weight, **options)
    with addnorm.save_outputs():
        y, z = call()
    assert all(map(torch.equal, (y, z), call()))
    _, stats, *_ = y.grad_fn.saved_tensors
    with torch.no_grad():
        rebuilt, stats = save_outputs.rebuild(y, stats, weight, bias, z_dtype, 0.125)
    mean, rstd = stats.double().split(1, -1)
    x_hat, size = (z.double() - mean) * rstd, (weight.double() + 0.125).abs()
    wide = UNIT[f64 if z_dtype == f64 else f32]
    unit = max(UNIT[y_dtype], wide)
    bound = 2 * unit * (x_hat.abs() + bias.double().abs() / size) + 8 * wide * (x_hat.abs() + (mean * rstd).abs())
    bound += {"llama": 2 * UNIT[z_dtype], "t5": 2 * UNIT[weight_dtype]}.get(casting, 0.0) * x_hat.abs()
    bound += 2.0**-24 / size if y_dtype == f16 else 0.0
    assert (((rebuilt.double() - mean) * rstd - x_hat).abs() <= bound).all()


@pytest.mark.parametrize("d", [7, 33])
def test_largest_float16_has_finite_gradients(d):
    x = torch.zeros(1, d, dtype=f16)
    x[0, 0] = torch.finfo(f16).max
    x.requires_grad_()
    with addnorm.save_outputs():
        y = addnorm.add_rms_norm(x, torch.zeros_like(x))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


@plain_and_with_options
@pytest.mark.parametrize("check", ["default", "none"])
def test_checkpoint_around_the_context_is_never_wrong(options, check):
    """Recomputed outside of the context, z has the place, shape and dtype of y; with options the bias has a place too."""
    x, branch, weight = draw(norm="rms")
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
        assert_close(
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
    assert_close(grads, usual, rtol=1e-4, atol=1e-4)


def test_traced_call_keeps_z():
    tensors = draw()
    with addnorm.save_outputs():
        grads = torch.autograd.grad(aot_function(addnorm.add_layer_norm, nop)(*tensors).sum(), tensors)
    assert_close(grads, torch.autograd.grad(addnorm.add_layer_norm(*tensors).sum(), tensors))
