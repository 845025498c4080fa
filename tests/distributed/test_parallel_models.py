"""Tests of parallel plans in two and four processes: wirings, compiled models, FSDP over tensor parallelism."""

import copy

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

import addnorm
from addnorm.distributed import parallelize
from support.distributed import case, make_test
from support.dtensors import TOLERANCE, mesh_of
from support.parallel_models import SIZES, compare, compare_decoders, inputs, packed, randomize, whole

WIRINGS = (
    "layer_scale",
    "parallel",
    "resi_dual",
    "b2t",
    "sandwich",
    "reordered",
    "layernorm_scaling",
    "rezero",
    "mix_ln",
)
ENCODERS = {
    "pre_ln": {},
    "post_ln, RMSNorm, swiglu": {"wiring": "post_ln", "norm": "rms", "activation": "swiglu"},
    "without biases": {"bias": False, "activation": "gelu"},
    "checkpoint": {"checkpoint": True},
    "tokens first": {"batch_first": False},
    "float64 stream": {"residual_dtype": torch.float64},
}


@case(2, 4)
def encoders_equal_one_process():
    for sequence_parallel in (False, True):
        for options in ENCODERS.values():
            torch.manual_seed(0)
            model = randomize(addnorm.nn.Encoder(2, **SIZES, **options))
            compare(model, sequence_parallel, *inputs((2, 6, 16)))


@case(2, 4)
def decoders_equal_one_process():
    compare_decoders()


@case(2)
def wirings_equal_one_process():
    for wiring in WIRINGS:
        torch.manual_seed(0)
        compare(randomize(addnorm.nn.Encoder(2, **SIZES, wiring=wiring)), True, *inputs((2, 6, 16)))


@case(4)
def fsdp_and_tensor_parallel_equal_one_process():
    torch.manual_seed(0)
    model = randomize(addnorm.nn.Encoder(2, **SIZES))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = parallelize(copy.deepcopy(model), mesh["tp"], sequence_parallel=True)
    fully_shard(ours, mesh=mesh["dp"])
    (x,) = inputs((4, 6, 16))
    expected = model(x)
    expected.square().mean().backward()
    part = slice(2 * mesh.get_local_rank("dp"), None)
    y = ours(x[part][:2])
    torch.testing.assert_close(y, expected[part][:2], **TOLERANCE)
    y.square().mean().backward()
    grads = packed({name: whole(p.grad) for name, p in ours.named_parameters()})
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


@case(2)
def compiled_models_equal_one_process():
    torch.manual_seed(0)
    model = randomize(addnorm.nn.Encoder(1, **SIZES))
    (x,) = inputs((2, 6, 16))
    for sequence_parallel in (False, True):
        ours = parallelize(copy.deepcopy(model), mesh_of(), sequence_parallel=sequence_parallel)
        compiled = torch.compile(ours, backend="aot_eager")
        model.zero_grad()
        y, expected = compiled(x), model(x)
        torch.testing.assert_close(y, expected, **TOLERANCE)
        y.square().sum().backward()
        expected.square().sum().backward()
        grads = packed({name: whole(p.grad) for name, p in ours.named_parameters()})
        for name, p in model.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, **TOLERANCE)


test_parallel_models = pytest.mark.slow(make_test(globals()))
