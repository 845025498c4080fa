"""Tests of the in-place forms and out=: they write to the right memory and to no other.

test_functional.py and test_fuzz.py compare their bits with those of the functions.
"""

import pytest
import torch

import addnorm
from support.cases import bf16, f64, make
from support.equality import assert_same
from support.fuzz_bits import is_same
from support.inplace_calls import IN_PLACE, in_place, nan
from support.marks import needs_kernels
from support.memory_layouts import LAYOUTS
from support.pairwise import product


def test_default_eps_follows_the_dtype_of_outs_z():
    x, b = 1e-9 * torch.randn(4, 8), 1e-9 * torch.randn(4, 8)
    y, z = addnorm.add_rms_norm(x, b, residual_dtype=f64, return_residual=True)
    out = (nan(y), nan(z))
    addnorm.add_rms_norm(x, b, return_residual=True, out=out)
    assert_same(out, (y, z))
    x64, y64 = x.to(f64), b.to(f64)
    expected = addnorm.add_rms_norm(x64, y64)
    assert addnorm.add_rms_norm_(x64, y64).equal(expected)


def test_out_may_reuse_memory_of_equal_element_size():
    x, b = torch.randn(6, 8).to(bf16), torch.randn(6, 8).to(bf16)
    expected = addnorm.add_layer_norm(x, b, out_dtype=torch.float16)
    assert addnorm.add_layer_norm(x, b, out=b.view(torch.float16)).equal(expected)


def test_add_residual_may_add_a_tensor_to_itself():
    x = torch.randn(3, 8)
    expected = 2 * x
    assert addnorm.add_residual_(x, x) is x
    assert x.equal(expected)


@pytest.mark.parametrize(
    ("layout", "variant", "dtypes"),
    product(
        list(LAYOUTS),
        ["LayerNorm", "RMSNorm with bias", "everything, RMSNorm", "the add alone"],
        ["float32", "bfloat16", "float32 stream, bfloat16 branch", "float64"],
    ),
)
def test_strided_memory_is_written_and_nothing_beside_it(layout, variant, dtypes):
    call = make(variant, dtypes, (70, 37))
    expected = call()
    tensors = {name: LAYOUTS[layout](t) if name in ("residual", "branch") else t for name, t in call.tensors.items()}
    pairs = {name: (tensors[name], t._base.clone()) for name, t in tensors.items() if t._base is not None}
    assert pairs
    actual = in_place(call, tensors)
    assert_same(actual, expected)
    for name, (t, base) in pairs.items():
        unwritten = base.as_strided(t.shape, t.stride(), t.storage_offset())
        unwritten.copy_(t)
        assert is_same(base, t._base), f"something beside {name} was written"


# The reference computes into new tensors and copies.
@needs_kernels
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16", "float32 stream, bfloat16 branch"])
@pytest.mark.parametrize("variant", ["LayerNorm", "RMSNorm"])
def test_contiguous_memory_is_overwritten_without_any_new(variant, dtypes):
    call = make(variant, dtypes, (64, 64))
    tensors = dict(call.tensors)

    def allocated(function):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            function()
        return [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]

    assert allocated(call)
    assert allocated(lambda: IN_PLACE[call.norm](**tensors)) == []
