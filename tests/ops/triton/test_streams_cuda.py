"""Tests of the Triton kernels of n streams on a GPU: results against float64, and their bits in other batches and runs."""

from dataclasses import replace

import pytest
import torch

from addnorm.ops.streams.kinds import GATE_KINDS
from support.stream_calls import (
    BY_TOKEN,
    MODES,
    assert_accurate,
    bf16,
    f32,
    make_call,
    make_cotangents,
    make_varied_call,
    run,
)

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
from addnorm.ops.triton.streams import operators  # it imports Triton

SIZES = [(1, 64), (2, 100), (3, 768), (4, 4096), (5, 33), (6, 1000), (7, 130), (8, 2048), (4, 16384)]  # n and d_model


@pytest.fixture(autouse=True)
def no_reference(monkeypatch):
    """Make every operator fail that falls back to the reference."""
    monkeypatch.setattr(operators, "eager", None)


def to_cuda(call):
    return replace(call, tensors={name: t.cuda() for name, t in call.tensors.items()})


@pytest.mark.parametrize("dtype", [f32, bf16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", GATE_KINDS)
def test_boundary_is_accurate(kind, mode, dtype):
    call = to_cuda(make_varied_call(kind, mode, dtype, SIZES))
    # A norm of one stream ignores c but for eps: the terms of its gradient cancel, and the GPU adds them in a longer chain.
    assert_accurate(call, roundings=32 if call.tensors["streams"].shape[-2] == 1 else 16)


@pytest.mark.parametrize("kind", ["given", "manifold", "hyper"])
def test_token_has_the_same_bits_in_any_batch_and_run(kind):
    call = to_cuda(make_call(4, 1000, (3000,), kind, dtype=bf16))
    cotangents = make_cotangents(call)
    whole, again = (run(call, call.leaves(), cotangents) for _ in range(2))
    assert all(torch.equal(again[name], t) for name, t in whole.items())
    for i in (0, 17, 2999):
        part = replace(
            call, tensors={name: t[i : i + 1] if name in BY_TOKEN else t for name, t in call.tensors.items()}
        )
        alone = run(part, part.leaves(), {name: t[i : i + 1] for name, t in cotangents.items()})
        for name in (*cotangents, *(f"d{name}" for name in BY_TOKEN if name in call.tensors)):
            assert torch.equal(alone[name][0], whole[name][i]), name
