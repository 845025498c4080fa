"""inspect, verify, record, decompose, ablate of sharded models with several streams: FSDP2, FSDP1, tensor parallelism."""

import copy

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard

import addnorm
from addnorm.distributed import parallelize
from support.distributed import case, make_test
from support.dtensors import mesh_of
from support.equality import assert_same
from support.families import shake
from support.instrumented_model import assert_same_numbers, step
from support.parallel_models import compare_steps, inputs, shard_layers, whole
from support.several_streams import make_mhc


def build(wiring="mhc"):
    torch.manual_seed(0)
    return shake(addnorm.nn.Encoder(2, 16, 4, wiring=wiring).eval()).double()


def assert_same_program(found, wanted):
    assert found.program is not None, found.unknown
    assert (found.wiring, found.closes) == (wanted.wiring, True)
    assert [site.id for site in found.program.sites] == [site.id for site in wanted.program.sites]
    for ours, theirs in zip(found.program.sites, wanted.program.sites, strict=True):
        for name in ("collapse", "mix", "inject"):
            torch.testing.assert_close(getattr(ours, name).values, getattr(theirs, name).values)
        assert dict(ours.parameters) == dict(theirs.parameters)


def check_model(plain, sharded, x):
    """Check the functions of a sharded model against the model before."""
    wanted, found = addnorm.inspect(plain, x), addnorm.inspect(sharded, x)
    assert_same_program(found, wanted)
    compare_steps(sharded, plain, x, (found.program.sites[1], wanted.program.sites[1]))
    assert addnorm.verify(sharded, x, wiring=wanted.program.wiring).agrees
    assert_same_numbers(step(sharded, x, gather=True), step(plain, x, gather=True))


def check_fsdp2(plain, sharded, x):
    check_model(plain, sharded, x)
    assert addnorm.verify(sharded, x, like=plain).agrees


@case(2)
def fsdp2_of_mhc():
    check_fsdp2(build(), shard_layers(build()), *inputs())


@case(1, 2, slow=True)
def fsdp2_of_other_wirings():
    for wiring in ("hyper_connections", "attention_residuals", "gated_residual"):
        check_fsdp2(build(wiring), shard_layers(build(wiring)), *inputs())


@case(2, slow=True)
def fsdp1_of_mhc():
    """No second backward runs, which ends the process, and no parameter is moved, whose memory may be freed."""
    (x,) = inputs()
    wanted = step(build(), x)
    for use_orig_params in (True, False):
        options = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
        plain, sharded = build(), build()
        for k in range(2):
            sharded.stack.layers[k] = FSDP1(sharded.stack.layers[k], **options)
        sharded = FSDP1(sharded, **options).eval()
        found = addnorm.inspect(sharded, x)
        assert (found.wiring, found.closes) == ("mhc", True)
        if not use_orig_params:
            continue
        verified = addnorm.verify(sharded, x, wiring="mhc")
        assert verified.agrees
        assert verified.moved is False
        assert "as they are" in str(verified)
        assert addnorm.verify(sharded, x, like=plain).agrees
        assert addnorm.decompose(sharded, x).closure < 1e-10
        rec = step(sharded, x)
        assert rec.metadata["omitted"] == {
            "gradients with frozen coefficients": "FullyShardedDataParallel allows no second backward: "
            "shard it with fully_shard"
        }
        for role, statistic in (("grad", "l2"), ("write", "l2"), ("read", "rms")):
            ours, theirs = ([value for _, value in one.series(role, statistic)] for one in (rec, wanted))
            assert ours == pytest.approx(theirs, rel=1e-7), role  # the sites have the names of the wrapped modules
            assert theirs


@case(2, slow=True)
def fsdp2_of_a_model_by_hand():
    for form in ("stacked", "tuple"):
        sharded = fully_shard(make_mhc(form).double(), mesh=mesh_of())
        check_fsdp2(make_mhc(form).double(), sharded, torch.randn(2, 5, 16, dtype=torch.float64))


def check_tensor_parallelism(wiring):
    plain, sharded, (x,) = build(wiring), parallelize(build(wiring), mesh_of()), inputs()
    check_model(plain, sharded, x)
    for model, like in ((sharded, plain), (plain, sharded)):
        with pytest.raises(ValueError, match="that tensor parallelism splits"):
            addnorm.verify(model, x, like=like)


@case(2)
def tensor_parallel_streams():
    check_tensor_parallelism("mhc")


@case(2, slow=True)
def tensor_parallel_streams_of_other_wirings():
    check_tensor_parallelism("attention_residuals")


@case(2, slow=True)
def sequence_parallel_streams():
    plain, (x,) = build("hyper_connections"), inputs()
    sharded = parallelize(build("hyper_connections"), mesh_of(), sequence_parallel=True)
    wanted, found = addnorm.inspect(plain, x), addnorm.inspect(sharded, x)
    assert found.closes
    assert addnorm.verify(sharded, x, wiring="hyper_connections").agrees
    assert addnorm.decompose(sharded, x).closure < 1e-10
    for s in (0.0, 0.5):
        with addnorm.scale_write(found.program.sites[1], s):
            rec, y = step(sharded, x), sharded(x)
        with addnorm.scale_write(wanted.program.sites[1], s):
            torch.testing.assert_close(y, plain(x))
        write = [value for _, value in rec.series("write", "l2")]
        assert (write[1] == 0.0) == (s == 0.0)


@case(2)
def verify_finds_the_error_of_a_sharded_model():
    for fault in ("transposed", "half gate"):
        plain = make_mhc(faults={2: fault})
        x = torch.randn(2, 5, 16)
        sharded = fully_shard(copy.deepcopy(plain), mesh=mesh_of())
        before = [whole(p).clone() for p in sharded.parameters()]
        found, wanted = (addnorm.verify(model, x, wiring="mhc") for model in (sharded, plain))
        assert [str(one) for one in found.deviations] == [str(one) for one in wanted.deviations] != []
        assert_same([whole(p) for p in sharded.parameters()], before)


test_sharded_programs = make_test(globals())
