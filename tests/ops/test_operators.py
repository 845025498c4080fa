"""Tests of the operators in calls that the public functions make: kernels, references and fake kernels agree."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from addnorm.ops.streams.kinds import GATE_KINDS
from support.cases import BASIC, DTYPES, OPTIONS, SHAPES, VARIANTS, bf16, f32, f64
from support.memory_layouts import LAYOUTS
from support.operator_calls import OUTPUTS, assert_equal_references, assert_separate, record_calls, record_streams
from support.pairwise import product, rotate, with_values
from support.stream_calls import make_call

ops = torch.ops.addnorm
SUFFIXES = ("", "_reference")


TABLE = [
    *product(list(OPTIONS), list(DTYPES), [(70, 41), (9, 16), (5, 3), (2, 3, 130), (1, 19), (3, 1027), (8,)]),
    *product(list(BASIC), list(DTYPES), SHAPES),
]


@pytest.mark.parametrize(("variant", "dtypes", "shape"), TABLE, ids=str)
def test_kernels_agree_with_the_reference(variant, dtypes, shape):
    """Each output alone too: the kernels write only the requested ones. No output is an alias of an input."""
    assert_equal_references(*record_calls(variant, dtypes, shape))


@pytest.mark.parametrize("shape", [(8,), (1, 8), (3, 8)], ids=str)
@pytest.mark.parametrize("variant", ["everything, LayerNorm", "the add alone"])
def test_references_return_no_alias(variant, shape):
    """With one row the sum over rows is no operation, as is a cast to an equal dtype."""
    for dtypes in ("float32", "float64"):
        for one in record_calls(variant, dtypes, shape)[2]:
            if one.name in OUTPUTS:
                assert_separate(one.repeat("_reference", lambda t: t), one.arguments.values())


@pytest.mark.parametrize("kind", GATE_KINDS)
def test_operators_of_streams_return_no_alias(kind):
    for mode in ("write", "identity"):
        for one in record_streams(make_call(3, 8, (2, 3), kind, dtype=f32, mode=mode, norm="none")):
            for suffix in SUFFIXES:
                assert_separate(one.repeat(suffix, lambda t: t), one.arguments.values())


def describe(outputs):
    return [(tuple(t.shape), t.dtype, t.stride(), t.storage_offset()) for t in outputs]


@pytest.mark.parametrize(
    ("variant", "dtypes", "layout"),
    [
        *with_values(rotate(list(VARIANTS), ["float32", "bfloat16", "float64"], 1), None),
        *(("LayerNorm", "float32 stream, bfloat16 branch", layout) for layout in LAYOUTS),
    ],
)
def test_fake_kernels_return_the_real_metadata(variant, dtypes, layout):
    """Outputs of strided inputs are contiguous."""
    for shape in [(6, 9)] if layout else [(3, 2, 9), (0, 9)]:
        mode = FakeTensorMode()
        for i, one in enumerate(record_calls(variant, dtypes, shape, layout)[2]):
            suffix = SUFFIXES[i % 2]
            real = describe(one.repeat(suffix, lambda t: t))
            with mode:
                assert describe(one.repeat(suffix, mode.from_tensor)) == real
            assert describe(one.repeat(suffix, lambda t: t.to("meta"))) == real


def take_samples():
    """Return calls of each operator: for the operation also with options, for n streams of several kinds."""
    calls = [
        *record_calls("LayerNorm", "float32", (5, 17))[2][::-1],
        *record_calls("RMSNorm", "float32 stream, bfloat16 branch", (5, 17))[2][:2],
        *record_calls("everything, RMSNorm", "float32", (3, 2, 9))[2],
    ]
    samples = {(one.name, i // 12): one for i, one in enumerate(calls)}
    for kind, mode, dtype in (("given", "shared", f32), ("manifold", "write", bf16), ("gates", "identity", f64)):
        samples |= {
            (one.name, kind): one for one in record_streams(make_call(3, 8, (2, 3), kind, dtype=dtype, mode=mode))
        }
    return {", ".join(map(str, key)): one for key, one in samples.items()}


SAMPLES = take_samples()


@pytest.mark.parametrize(("sample", "suffix"), rotate(list(SAMPLES), SUFFIXES, 1))
def test_operators_pass_opcheck(sample, suffix):
    one = SAMPLES[sample]
    arguments = {name: t.detach().clone() if isinstance(t, Tensor) else t for name, t in one.arguments.items()}
    torch.library.opcheck(getattr(ops, one.name + suffix).default, (), arguments)
