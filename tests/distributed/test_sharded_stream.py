"""inspect, record, decompose and ablate of sharded models: FSDP2, FSDP1, tensor parallelism, DDP, in one process and in two."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.testing import assert_close

import addnorm
from addnorm.stream.dataflow import wrappers
from support.distributed import case, make_test
from support.dtensors import mesh_of
from support.equality import assert_same
from support.instrumented_model import assert_same_numbers, backward, compute_loss, record, step
from support.parallel_models import compare_steps, gradients_of
from support.refusals import assert_raises
from support.sharded_models import (
    LAYERS,
    WIDTH,
    Model,
    build,
    sequence_parallel,
    shard,
    tensor_parallel,
    tokens,
)
from support.stacks import torch_encoder

ROUND_OFF = {"rtol": 1e-5, "atol": 1e-5}


def describe(inspection):
    """Return what an inspection says about the model, without its class."""
    (stream,) = inspection.streams
    sites = [
        (site.id, site.kind, site.layer, str(site.row), site.norm_in and site.norm_in.kind) for site in stream.sites
    ]
    return inspection.wiring, inspection.closes, stream.width, stream.num_layers, sites


def assert_same_inspection(sharded, plain, x):
    assert describe(addnorm.inspect(sharded, x)) == describe(addnorm.inspect(plain, x))


def assert_same_series(actual, expected, *names):
    """Compare series of recordings whose sites have other names."""
    for role, statistic in names:
        values, wanted = (torch.tensor([v for _, v in rec.series(role, statistic)]) for rec in (actual, expected))
        assert_close(values, wanted, rtol=1e-4, atol=1e-7)


def build_encoder():
    return torch_encoder(True, LAYERS, nn.LayerNorm(WIDTH))


def check_model(make, build=build, inputs=tokens):
    """Check the functions of a sharded model against the model before."""
    plain, sharded, unrecorded, x = build(), make(build()), make(build()), inputs()
    expected, actual = addnorm.inspect(plain, x), addnorm.inspect(sharded, x)
    assert describe(actual) == describe(expected), (describe(actual), describe(expected))
    assert actual.closes
    assert not actual.unknown, actual.unknown
    step(sharded, x, gather=True)
    backward(unrecorded, x)
    assert_same(gradients_of(sharded), gradients_of(unrecorded))
    compare_steps(sharded, plain, x, (actual.sites[1], expected.sites[1]), **ROUND_OFF)


@case(1, 2)
def fsdp2_layers():
    check_model(shard)


@case(2, slow=True)
def fsdp2_in_other_ways():
    check_model(shard, partial(build, post=True))
    check_model(lambda model: fully_shard(model, mesh=mesh_of()))
    check_model(lambda model: shard(model, reshard_after_forward=False))


@case(1, slow=True)
def fsdp2_in_one_process():
    for options in ({"reshard_after_forward": True}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        check_model(lambda model, options=options: shard(model, **options))


@case(1, slow=True)
def fsdp2_of_torchs_layers():
    """In evaluation, where torch's layers take their fast path if no gradient is needed."""
    x = torch.randn(2, 5, WIDTH)
    check_model(shard, build_encoder, lambda: x)
    assert_same_numbers(record(shard(build_encoder()), x), record(build_encoder(), x), **ROUND_OFF)


@case(2)
def tensor_parallel_linears():
    check_model(tensor_parallel)


@case(2)
def sequence_parallel_stream():
    plain, sharded, ids = build(), sequence_parallel(build()), tokens()
    assert_same_inspection(sharded, plain, ids)
    rec, sharded_rec = step(plain, ids), step(sharded, ids, gather=True)
    assert_close(gradients_of(sharded), gradients_of(plain), **ROUND_OFF)
    skipped = ("in", "out", "read", "raw", "write", "grad", "norm_in", "norm_final")
    assert_same_numbers(sharded_rec, rec, skipped, **ROUND_OFF)
    for role, statistic, combine in (
        ("out", "max", max),
        ("grad", "max", max),
        ("write", "l2", lambda *v: sum(v) / len(v)),
    ):
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, [value for _, value in sharded_rec.series(role, statistic)])
        together = [combine(*both) for both in zip(*values, strict=True)]
        expected = [value for _, value in rec.series(role, statistic)]
        assert_close(torch.tensor(together), torch.tensor(expected), rtol=1e-5, atol=1e-7)
    for model in (plain, sharded):
        with addnorm.ablate(addnorm.inspect(model, ids).sites[1]):
            step(model, ids)
    assert_close(gradients_of(sharded), gradients_of(plain), **ROUND_OFF)


class AllReduced(nn.Module):
    """Sublayer whose output is added up by hand."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x) / dist.get_world_size()
        dist.all_reduce(y)
        return y


@case(2)
def all_reduce_by_hand():
    plain, reduced, ids = build(), build(), tokens()
    for layer in reduced.layers:
        layer.feed_forward = AllReduced(layer.feed_forward)
    with torch.no_grad():
        found, expected = addnorm.inspect(reduced, ids), addnorm.inspect(plain, ids)
        assert [site.kind for site in found.sites] == [site.kind for site in expected.sites]
        assert found.closes
    assert_same_series(record(reduced, ids), record(plain, ids), ("raw", "l2"), ("write", "l2"), ("out", "l2"))


@case(2, slow=True)
def fsdp2_bfloat16():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, sharded, ids = build().bfloat16(), shard(build(), mp_policy=policy), tokens()
    assert_same_inspection(sharded, plain, ids)
    assert sharded(ids).equal(plain(ids))
    assert_same_numbers(step(sharded, ids, gather=True), step(plain, ids), skip=("params",), rtol=2e-2, atol=2e-2)
    unrecorded = shard(build(), mp_policy=policy)
    backward(unrecorded, ids)
    assert_same(gradients_of(sharded), gradients_of(unrecorded))


@case(1)
def fsdp2_casts_inputs():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, x = shard(build_encoder(), mp_policy=policy), torch.randn(2, 6, WIDTH)
    assert len(addnorm.inspect(model, x).sites) == 4
    rec = step(model, x)
    assert len(rec.series("out", "rms")) == 5
    assert "note" not in rec.metadata, rec.metadata["note"]


@case(2)
def recording_in_one_process_alone_ends_before_it_communicates():
    model, ids, wrappers.PATIENCE = shard(build()), tokens(), 0.5
    expected = step(model, ids)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="process 1 did not begin"), addnorm.record(model):
            backward(model, ids)
    wrappers.PATIENCE = 30.0
    dist.barrier()
    assert_same_numbers(step(model, ids), expected)


def train(model, steps=3):
    """Train with gradients that are set to zero, not freed; return the losses and the recording."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=False)
        backward(model, tokens())
        optimizer.step()
        addnorm.inspect(model, tokens())  # must not leave gathered parameters, which the optimizer would not change
        losses.append(compute_loss(model(tokens())).item())
        backward(model, tokens())
    return losses


@case(2, slow=True)
def fsdp2_training():
    losses, recordings = [], []
    for make in (lambda model: model, shard, lambda model: shard(model, reshard_after_forward=False)):
        model = make(build(post=True))
        with addnorm.record(model, gather=True) as rec:
            losses.append(train(model))
        recordings.append(rec)
    assert_close(torch.tensor(losses[1:]), torch.tensor([losses[0]] * 2), rtol=1e-4, atol=1e-6)
    for rec in recordings[1:]:
        assert_same_numbers(rec, recordings[0], rtol=1e-2, atol=1e-4)
        assert rec.balances["stream"].closure < 1e-5


@case(2, slow=True)
def fsdp2_accumulates():
    recordings = []
    for model in (build(), shard(build())):
        with addnorm.record(model, gather=True, accumulate=2) as rec:
            for _ in range(2):
                backward(model, tokens())
        recordings.append(rec)
    assert_same_numbers(recordings[1], recordings[0], **ROUND_OFF)


@case(2)
def fsdp2_local_part():
    model = shard(build())
    rec = step(model, tokens())
    site = rec.sites[1].id
    names = [name for name, _ in model.named_parameters() if name.startswith("layers.0.attention.")]
    parameters = [model.get_parameter(name) for name in names]
    for statistic, tensors in (("l2", parameters), ("grad_l2", [p.grad for p in parameters])):
        norm = torch.stack([t.to_local().norm() for t in tensors]).norm()
        value = {s.id: v for s, v in rec.series("params", statistic)}[site]
        assert math.isclose(value, float(norm), rel_tol=1e-5), (value, norm)


@case(1, 2, slow=True)
def fsdp1():
    for use_orig_params in (True, False):
        plain, ids = build(), tokens()
        wrapped = build()
        for k in range(LAYERS):
            wrapped.layers[k] = FSDP1(wrapped.layers[k], use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        wrapped = FSDP1(wrapped, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        found, expected = addnorm.inspect(wrapped, ids), addnorm.inspect(plain, ids)
        assert (found.wiring, found.closes) == (expected.wiring, True)
        assert [site.kind for site in found.sites] == [site.kind for site in expected.sites]
        assert_same_series(step(wrapped, ids), step(plain, ids), ("out", "rms"), ("write", "ratio"), ("grad", "l2"))
        assert addnorm.decompose(wrapped, ids).closure < 1e-5
        with addnorm.ablate(found.sites[0]), torch.no_grad():
            ablated = wrapped(ids)
        with addnorm.ablate(expected.sites[0]), torch.no_grad():
            assert_close(ablated, plain(ids))
        whole = partial(step, wrapped, ids, gather=True)
        assert_raises("ValueError: gather is True, expected False for FullyShardedDataParallel", whole)
        assert_raises("fuse the model first, and shard it then", partial(addnorm.fuse, wrapped, ids))


@case(2, slow=True)
def ddp():
    plain, wrapped, ids = build(), nn.parallel.DistributedDataParallel(build()), tokens()
    assert_same_inspection(wrapped.module, plain, ids)
    assert addnorm.inspect(wrapped, ids).wiring == addnorm.inspect(plain, ids).wiring
    assert_same_series(step(wrapped, ids), step(plain, ids), ("out", "rms"), ("params", "grad_l2"))


@case(1)
def sharded_models_are_refused():
    ids = tokens()
    for make in (shard, tensor_parallel):
        refused = partial(addnorm.fuse, make(build()), ids)
        assert_raises("DTensor, expected plain tensors: fuse the model first, and shard it then", refused)
    wrapped = nn.parallel.DistributedDataParallel(build())
    assert "addnorm.fuse(model.module" in assert_raises(
        "DistributedDataParallel, expected ", lambda: addnorm.fuse(wrapped, ids)
    )
    assert addnorm.fuse(wrapped.module, ids, benchmark=False).fused
    assert_close(wrapped(ids), build()(ids))
    copied = "sharded by FSDP and cannot be copied, which float64=True needs"
    assert_raises(copied, lambda: addnorm.inspect(shard(build()), ids, float64=True))
    with torch.device("meta"):
        meta = Model()
    for make in (lambda model: model, shard):
        model = make(meta)
        for function in (addnorm.inspect, addnorm.decompose, addnorm.fuse):
            assert_raises(
                "on the meta device, which has no values: load the weights first", partial(function, model, ids)
            )
        with pytest.raises(ValueError, match="on the meta device"), addnorm.record(model):
            model(ids)


test_sharded_stream = make_test(globals())
