"""Tests of sharded stacks without one write, and of sharded tensors whose shapes do not fit."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import addnorm.distributed
from addnorm import SublayerConnection
from addnorm.nn import Encoder, ResidualLayer
from support.distributed import case, make_test


def model_and_input(wiring):
    torch.manual_seed(4)
    model = Encoder(2, 16, 4, wiring=wiring, dtype=torch.float64)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model, torch.randn(3, 5, 16, dtype=torch.float64)


@case(2)
def without_uses_gathered_parameters():
    """The factors and norms of the changed connection are parameters that FSDP replaces in each call."""
    for wiring in ("layer_scale", "sandwich"):
        model, x = model_and_input(wiring)
        stack, mesh = model.stack, init_device_mesh("cpu", (2,))
        expected, whole = stack.without(1)(x), stack(x)
        for module in [m for m in stack.modules() if isinstance(m, ResidualLayer | SublayerConnection)][::-1]:
            fully_shard(module, mesh=mesh)
        fully_shard(stack, mesh=mesh)
        stack(x).sum().backward()
        torch.testing.assert_close(stack.without(1)(x), expected)
        torch.testing.assert_close(stack(x), whole)


@case(2, slow=True)
def without_under_tensor_parallelism():
    for sequence_parallel in (False, True):
        model, x = model_and_input("layer_scale")
        expected = copy.deepcopy(model).stack.without(2)(x)
        mesh = init_device_mesh("cpu", (2,))
        addnorm.distributed.parallelize(model, mesh, sequence_parallel=sequence_parallel)
        torch.testing.assert_close(model.stack.without(2)(x), expected)


@case(2)
def shapes_of_whole_tensors_are_compared():
    """The parts of the first process have equal shapes: without a check only the other one would raise."""
    mesh = init_device_mesh("cpu", (2,))
    residual, branch, out = (distribute_tensor(torch.randn(n, 8), mesh, [Shard(0)]) for n in (4, 3, 3))
    assert torch.distributed.get_rank() or residual.to_local().shape == branch.to_local().shape
    for options in ({}, {"residual_scale": 2.0}, {"dropout_p": 0.5}):
        with pytest.raises(
            ValueError, match=r"^branch has shape \(3, 8\), expected \(4, 8\), the shape of residual: .*\.$"
        ):
            addnorm.add_layer_norm(residual, branch, **options)
        with pytest.raises(ValueError, match=r"^branch has shape \(3, 8\)"):
            addnorm.add_rms_norm(residual.requires_grad_(), branch, **options)
    with pytest.raises(ValueError, match=r"shape \(3, 8\), expected \(4, 8\)"):
        addnorm.add_layer_norm(residual.detach(), residual.detach(), out=out)


test_sharded_calls = make_test(globals())
