"""Tests that stacks train in several processes as in one: DDP, FSDP2 around any of their modules, checkpoints, pipelines."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import addnorm
from addnorm import SublayerConnection
from addnorm.distributed import parallelize
from addnorm.nn import ResidualLayer
from support.distributed import case, make_test
from support.dtensors import mesh_of
from support.parallel_models import (
    batch,
    check_gradients,
    encoder,
    gradients_of,
    part,
    shard,
    shard_layers,
    share_folder,
    train,
)

# A pipeline is built from a program of torch.export, and torch.distributed warns while doing so.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

D, DTYPE = 16, torch.float64
# The stream has one factor per feature, a norm after the add, two streams, parallel sublayers, or none of these.
WIRINGS = ("pre_ln", "post_ln", "deepnorm", "layer_scale", "resi_dual", "parallel", "b2t")
UNITS = {  # what is sharded besides the root
    "the root alone": lambda stack: [],
    "layers": lambda stack: [*stack.layers],
    "connections": lambda stack: stack.connections,
    "sublayers": lambda stack: [connection.sublayer for connection in stack.connections],
    "norms": lambda stack: [m for m in stack.modules() if isinstance(m, addnorm.LayerNorm)],
    "groups of connections": lambda stack: [[*layer.connections] for layer in stack.layers],
    "a group of layers": lambda stack: [[*stack.layers[:2]], stack.layers[2]],
}


@case(2)
def ddp():
    for wiring in ("layer_scale", "rezero"):
        check_gradients(train(DistributedDataParallel(encoder(wiring))), encoder(wiring))
    for option in ("static_graph", "find_unused_parameters", "gradient_as_bucket_view"):
        check_gradients(train(DistributedDataParallel(encoder(), **{option: True})), encoder())


@case(2)
def fsdp2():
    check_fsdp2("layer_scale", "post_ln")


@case(2, slow=True)
def fsdp2_of_every_wiring():
    check_fsdp2(*WIRINGS)


def check_fsdp2(*wirings: str) -> None:
    """Check the gradients with every unit of sharding."""
    for wiring in wirings:
        for unit, select in UNITS.items():
            model = encoder(wiring)
            try:
                check_gradients(train(shard(model, *select(model.stack))), encoder(wiring))
            except Exception as error:
                raise AssertionError(f"{wiring}, {unit}: {error}") from error


@case(2)
def fsdp2_of_scalar_factors():
    """fully_shard takes no 0-d parameter: those of ReZero are left out of it."""
    model = encoder("rezero")
    scalars = {p for p in model.parameters() if p.dim() == 0}
    for layer in model.stack.layers:
        fully_shard(layer, mesh=mesh_of(), ignored_params=scalars)
    actual = train(model)
    for name, p in model.named_parameters():
        if p.dim() == 0:
            dist.all_reduce(actual[name])
            actual[name] /= 2
    check_gradients(actual, encoder("rezero"))


@case(2)
def fsdp2_with_checkpoints():
    for kind in (ResidualLayer, SublayerConnection):
        model = encoder("layer_scale")
        apply_activation_checkpointing(model, check_fn=lambda module, kind=kind: isinstance(module, kind))
        gradients = train(shard_layers(model)).items()
        named = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients}
        check_gradients(named, encoder("layer_scale"))
    model = encoder(checkpoint=True)
    check_gradients(train(shard_layers(model)), encoder())


@case(2)
def fsdp2_of_several_streams():
    """Their gradients, and their output with parameters in bfloat16."""
    x, policy = batch()[0].float(), MixedPrecisionPolicy(torch.bfloat16)
    for wiring in ("hyper_connections", addnorm.wirings.mhc(single_pass=True), "attention_residuals"):
        model = encoder(wiring)
        check_gradients(train(shard_layers(model)), encoder(wiring))
        half = encoder(wiring).float()
        y = shard(half, *half.stack.layers, mp_policy=policy)(x).float()
        assert_close(y, encoder(wiring).float()(x), rtol=0.05, atol=0.05)


@case(2)
def fsdp2_in_bfloat16():
    """The gradients of a model in bfloat16, which FSDP averages in float32."""
    model, plain = encoder().float(), encoder().bfloat16()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    shard(model, *(connection.sublayer for connection in model.stack.connections), mp_policy=policy)
    x, dy = batch().float()

    def differentiate(model, x, dy):
        model.zero_grad()
        (model(x) * dy).mean().backward()
        return gradients_of(model)

    halves = [differentiate(plain, *pair) for pair in zip(x.bfloat16().chunk(2), dy.chunk(2), strict=True)]
    for name, grad in differentiate(model, part(x), part(dy)).items():
        expected = sum(half[name].float() for half in halves) / 2
        assert_close(grad, expected, rtol=1e-6, atol=1e-9, msg=name)


@case(2)
def fsdp2_inference_keeps_the_bits():
    """Also for large inputs, and again with the parameters gathered anew."""
    model, x = encoder().float(), torch.randn(16, 16, D)
    expected = encoder().float()
    shard(model, *(connection.sublayer for connection in model.stack.connections))
    with torch.no_grad():
        for _ in range(2):
            assert model(x).equal(expected(x))


@case(2)
def saved_states_of_fsdp2_load_elsewhere():
    """Into a model of one process, and into a sharded one that was made on the meta device."""
    model, folder = encoder(), share_folder()
    dcp.save(get_model_state_dict(shard_layers(model)), checkpoint_id=folder)
    plain = addnorm.nn.Encoder(3, D, 2, dtype=DTYPE)
    with torch.device("meta"):
        meta = addnorm.nn.Encoder(3, D, 2, dtype=DTYPE)
    shard(meta, *(connection.sublayer for connection in meta.stack.connections)).to_empty(device="cpu")
    for other, select in ((plain, lambda t: t), (meta, part)):
        state = other.state_dict()
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state)
        check_gradients(train(other, select), encoder())


@case(2)
def tensor_parallel_with_torchs_styles():
    """Only the projections are sharded; Add & Norms compute on ordinary tensors."""
    model, plan = encoder(), {}
    for i in range(3):
        sublayer = f"stack.layers.{i}.connections.1.sublayer"
        plan |= {f"{sublayer}.up": ColwiseParallel(), f"{sublayer}.down": RowwiseParallel()}
    check_gradients(train(parallelize_module(model, mesh_of(), plan), lambda t: t), encoder())


@case(2)
def without_uses_gathered_parameters():
    """The factors and norms of the changed connection are parameters that FSDP replaces in each call."""
    x, _ = batch()
    for wiring in ("layer_scale", "sandwich"):
        stack = encoder(wiring).stack
        expected, all_writes = stack.without(1)(x), stack(x)
        shard(stack, *[m for m in stack.modules() if isinstance(m, ResidualLayer | SublayerConnection)][::-1])
        stack(x).sum().backward()
        assert_close(stack.without(1)(x), expected)
        assert_close(stack(x), all_writes)


@case(2, slow=True)
def without_under_tensor_parallelism():
    x, _ = batch()
    for sequence_parallel in (False, True):
        model = parallelize(encoder("layer_scale"), mesh_of(), sequence_parallel=sequence_parallel)
        assert_close(model.stack.without(2)(x), encoder("layer_scale").stack.without(2)(x))


@case(1)
def pipeline_splits_between_layers():
    """Also where several streams cross the split."""
    x, dy = batch()
    for wiring in ("layer_scale", "resi_dual"):
        pipe = pipeline(encoder(wiring), mb_args=(x,), split_spec={"stack.layers.2": SplitPoint.BEGINNING})
        stages = [pipe.get_stage_module(k) for k in range(2)]
        between = stages[0](x)
        y = stages[1](*between) if isinstance(between, tuple) else stages[1](between)
        (y * dy).mean().backward()
        check_gradients({name: p.grad for stage in stages for name, p in stage.named_parameters()}, encoder(wiring))


test_stack_trains_in_several_processes = make_test(globals())
