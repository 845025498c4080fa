"""Tests of autocast: y has the dtype of torch's own norm of the stream."""

import pytest
import torch
import torch.nn.functional as F

import addnorm
from addnorm.ops.autocast import y_dtype
from support.cases import DTYPES, bf16, f32, leaves, make


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(
    "variant", ["LayerNorm without bias", "RMSNorm", "LayerNorm without either", "weight_offset, RMSNorm"]
)
def test_on_cpu_y_has_the_dtype_of_torchs_norm_of_the_stream(variant, dtypes, grad):
    call = make(variant, dtypes, (9, 33))
    tensors = leaves(call) if grad else call.tensors
    with torch.autocast("cpu", dtype=bf16):
        y, z = call(tensors).values()
        y_alone = call.y_alone(tensors)
        expected = {"layer": F.layer_norm, "rms": F.rms_norm}[call.norm](z, z.shape[-1:])
    assert z.dtype == call.residual_dtype
    assert y.dtype == expected.dtype
    assert y.equal(y_alone)
    if grad:
        y.backward(torch.randn_like(y))
        assert {name: t.grad.dtype for name, t in tensors.items()} == {name: t.dtype for name, t in tensors.items()}


def test_out_dtype_wins_and_autocast_off_inside_is_off():
    x, branch = torch.randn(4, 16), torch.randn(4, 16).to(bf16)
    with torch.autocast("cpu", dtype=bf16):
        assert addnorm.add_rms_norm(x, branch, out_dtype=bf16).dtype == bf16
        assert addnorm.add_rms_norm(x, branch, residual_dtype=bf16).dtype == bf16
        assert torch.func.vmap(addnorm.add_rms_norm)(x, branch).dtype == f32
        assert addnorm.rms_norm(branch).dtype == bf16
        assert addnorm.layer_norm(x).dtype == f32
        with torch.autocast("cpu", enabled=False):
            assert addnorm.add_layer_norm(x, branch).dtype == bf16


def test_on_cuda_norms_run_in_float32():
    assert {dtype: y_dtype("cuda", dtype) for dtype in (f32, bf16, torch.float64)} == {
        f32: f32, bf16: f32, torch.float64: torch.float64,
    }  # fmt: skip
