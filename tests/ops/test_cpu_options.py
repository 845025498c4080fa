"""Tests that the C++ kernels compute every option and dtype, and match the reference's sums and masks."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import addnorm
from support.cases import DTYPES, VARIANTS, bf16, f16, f32, f64, gradients, make
from support.marks import needs_kernels
from support.pairwise import rotate

pytestmark = needs_kernels


def operators(function):
    """Return the names of this library's operators that a function runs, nested ones included."""
    with profile(activities=[ProfilerActivity.CPU]) as ran:
        function()
    return {event.key.removeprefix("addnorm::") for event in ran.key_averages() if event.key.startswith("addnorm::")}


@pytest.mark.parametrize(("variant", "dtypes"), rotate(list(VARIANTS), list(DTYPES), 3))
def test_kernels_compute_every_option(variant, dtypes):
    call = make(variant, dtypes, (5, 19))

    def everything():
        gradients(call)
        with torch.no_grad():
            call()
            if call.norm != "none":
                call.y_alone()

    ran = operators(everything)
    assert any("backward" in name for name in ran) or variant == "the add alone"  # whose gradient passes through
    assert [name for name in ran if "reference" in name] == []


def test_inputs_without_features_use_the_reference():
    rows, features = torch.empty(0, 4), torch.empty(4, 0)
    assert operators(lambda: addnorm.add_layer_norm(rows, rows)) == {"add_norm"}
    assert "add_norm_reference" in operators(lambda: addnorm.add_layer_norm(features, features))


def list_all(dtype):
    """Return all numbers of a dtype of 16 bits."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_all_16_bit_numbers_convert_as_in_torch(dtype):
    """Convert all 65536 of them: subnormals stay exact, and infinities and NaNs stay what they are."""
    every = list_all(dtype).reshape(64, 1024)
    zero = torch.zeros_like(every)
    for stream in (dtype, f32, f64):
        z = addnorm.add_residual(every, zero, residual_scale=1.0, residual_dtype=stream)
        expected = every.to(stream)
        assert z.isnan().equal(expected.isnan())
        assert z.nan_to_num(7.0).equal(expected.nan_to_num(7.0))


@pytest.mark.parametrize("stream", [f16, bf16])
@pytest.mark.parametrize("wide", [f32, f64])
def test_rounding_to_16_bits_is_torchs_at_every_tie_and_beyond(wide, stream):
    every = list_all(stream)
    every = every[every.isfinite()].sort().values.to(f64)
    between = torch.cat(
        [every, (every[1:] + every[:-1]) / 2, torch.tensor([65519.9, 65520.0, 1e5, -65520.0, 3.4e38, 1e-9])]
    )
    near = torch.cat([between, between * (1 + 1e-7), between * (1 - 1e-7)]).to(wide)
    z = addnorm.add_residual(near, torch.zeros_like(near), layer_scale=2.0, residual_dtype=stream)
    assert z.equal(near.to(stream))


def test_float16_subnormals_survive_flush_to_zero():
    """They are normal numbers in float32, and torch reads them so too."""
    half = torch.arange(-1200, 1200, dtype=torch.float64).mul(2**-24).to(f16)
    expected = half.to(f64)
    assert torch.set_flush_denormal(True)
    try:
        wide = addnorm.add_residual(half, torch.zeros_like(half, dtype=f64), residual_dtype=f64)
        single = addnorm.add_residual(half, torch.zeros_like(half), residual_dtype=f32)
    finally:
        torch.set_flush_denormal(False)
    assert wide.equal(expected)
    assert single.equal(expected.to(f32))
