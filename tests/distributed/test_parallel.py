"""Tests of parallel styles and plans against one process: outputs, gradients, communication, compiled models, FSDP."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

import addnorm
from addnorm.distributed import SequenceParallel, parallelize, split_projections, tensor_parallel_plan
from support.distributed import case, make_test
from support.dtensors import TOLERANCE, communication, mesh_of
from support.parallel_models import (
    SIZES,
    check_gradients,
    compare,
    encoder,
    gradients_of,
    inputs,
    parallel_copy,
    share_folder,
    train,
)
from support.torch_transformers import randomize

ENCODERS = (
    {"batch_first": False},
    {"wiring": "post_ln", "norm": "rms", "activation": "swiglu"},
    {},
    {"bias": False, "activation": "gelu"},
    {"checkpoint": True},
    {"residual_dtype": torch.float64},
)
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


def compare_encoders(*encoders):
    for options in encoders:
        torch.manual_seed(0)
        compare(randomize(addnorm.nn.Encoder(2, **SIZES, **options)), *inputs())


@case(2)
def encoders_equal_one_process():
    compare_encoders(*ENCODERS[:2])


@case(2, 4, slow=True)
def all_encoders_equal_one_process():
    compare_encoders(*ENCODERS, *({"wiring": wiring} for wiring in WIRINGS))


@case(2, 4)
def decoders_equal_one_process():
    """With and without memory and masks."""
    compare(randomize(addnorm.nn.Decoder(2, **SIZES, cross_attention=False)), *inputs())
    model = randomize(addnorm.nn.Decoder(2, **SIZES))
    for masks in ({}, {"mask": torch.rand(2, 4, 6, 6) > 0.3, "memory_key_mask": torch.rand(2, 5) > 0.3}):
        compare(model, *inputs((2, 6, 16), (2, 5, 16)), **masks)


@case(2)
def stream_dropout_equals_one_process():
    for wiring in ("pre_ln", "post_ln"):
        model = randomize(addnorm.nn.Encoder(2, **SIZES, wiring=wiring, stochastic_depth=0.3))
        for module in model.modules():
            if isinstance(module, addnorm.SublayerConnection):
                module.dropout = 0.25
        compare(model, *inputs((4, 6, 16)))


@case(2)
def admin_and_masks_of_heads_equal_one_process():
    mask = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    compare(randomize(addnorm.nn.Encoder(1, **SIZES)), *inputs(), mask=mask)
    stack = addnorm.ResidualStack(
        [*addnorm.nn.block(**SIZES), nn.Linear(16, 16).double()], 16, dtype=torch.float64, sublayers_per_layer=3
    )
    compare(randomize(stack), *inputs(), key_mask=torch.rand(2, 6) > 0.3)


@case(2)
def transformers_equal_one_process():
    compare(randomize(addnorm.nn.Transformer(1, 1, **SIZES)), *inputs((2, 6, 16), (2, 5, 16)))


@case(2)
def plans_communicate_once_a_sublayer():
    model = addnorm.nn.Encoder(2, **SIZES)
    (x,) = inputs()
    x.requires_grad_()
    for sequence_parallel, forward, both in (
        (False, {"all_reduce": 4}, {"all_reduce": 8}),
        (
            True,
            {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 4},  # one gathers the output
            {"all_gather_into_tensor": 10, "reduce_scatter_tensor": 8},  # one the gradient of the input
        ),
    ):
        ours = parallel_copy(model, sequence_parallel)
        with torch.no_grad():
            assert communication(lambda ours=ours: ours(x)) == forward
        assert communication(lambda ours=ours: ours(x).sum().backward()) == both


@case(2)
def incremental_decoding_equals_one_process():
    model = randomize(addnorm.nn.Decoder(2, **SIZES)).eval()
    x, memory = inputs((2, 5, 16), (2, 4, 16))
    for sequence_parallel in (False, True):
        ours = parallel_copy(model, sequence_parallel)
        cache = addnorm.nn.KeyValueCache()
        with torch.no_grad():
            steps = [ours(token, memory, cache=cache) for token in x.split(1, dim=1)]
            assert_close(torch.cat(steps, dim=1), model(x, memory), **TOLERANCE)


@case(2)
def states_load_into_sharded_models_and_back():
    model, other, filled, back = (randomize(addnorm.nn.Decoder(1, **SIZES)) for _ in range(4))
    x, memory = inputs((2, 5, 16), (2, 4, 16))
    ours = parallelize(other, mesh_of())
    full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(ours, split_projections(model) if dist.get_rank() == 0 else {}, options=full)
    assert_close(ours(x, memory), model(x, memory), **TOLERANCE)
    back.load_state_dict(get_model_state_dict(ours, options=StateDictOptions(full_state_dict=True)))
    assert_close(back(x, memory), model(x, memory), **TOLERANCE)
    folder = share_folder()
    checkpoint.save(get_model_state_dict(ours), checkpoint_id=folder)
    checkpoint.load(split_projections(filled), checkpoint_id=folder)
    assert_close(filled(x, memory), model(x, memory), **TOLERANCE)
    packed = {name: 0 * t for name, t in model.state_dict().items() if ".in_proj." in name}
    ours.load_state_dict(packed, strict=False)
    query = ours.state_dict()["stack.layers.0.connections.0.sublayer.in_proj.q.weight"]
    assert query.placements == (Shard(0),)
    assert not query.full_tensor().any()


@case(2)
def optimizers_step_as_one_process():
    own = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).double() for _ in range(2)]
    stack = addnorm.ResidualStack(own, 16, "post_ln", dtype=torch.float64)
    (x,) = inputs()
    for model in map(randomize, (addnorm.nn.Encoder(1, **SIZES), stack)):
        ours = parallel_copy(model, True)
        for m in (ours, model):
            optimizer = torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True)
            for _ in range(2):
                optimizer.zero_grad()
                m(x).square().sum().backward()
                torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
                optimizer.step()
        assert_close(ours(x), model(x), **TOLERANCE)


@case(2)
def uneven_and_empty_shards_equal_one_process():
    for wiring in ("resi_dual", "mhc", "hyper_connections", "attention_residuals", "muddformer", "gated_residual"):
        for tokens in (5, 1):
            torch.manual_seed(0)
            compare(randomize(addnorm.nn.Encoder(1, **SIZES, wiring=wiring)), *inputs((2, tokens, 16)), plans=(True,))


class Block(nn.Module):
    """A post-LN feed-forward and a pre-LN one."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64).double(), nn.Linear(64, 16).double()
        self.norm = addnorm.AddNorm(16, layer_scale=0.5, dtype=torch.float64)
        self.read, self.rms = addnorm.LayerNorm(16, dtype=torch.float64), addnorm.RMSNorm(16, dtype=torch.float64)

    def forward(self, x):
        y, z = self.norm(x, branch=self.down(self.up(self.read(x)).relu()), return_residual=True)
        return y + self.rms(z)


@case(2)
def sequence_parallel_norms_equal_one_process():
    model, mesh = randomize(Block()), mesh_of()
    (x,) = inputs()
    for output, local in ((Shard(1), False), (Replicate(), False), (Partial(), False), (Shard(1), True)):
        ours = copy.deepcopy(model)
        plan = {
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=output, use_local_output=local),
            "norm": SequenceParallel(use_local_output=True),
            "read": SequenceParallel(),
            "rms": SequenceParallel(use_local_output=True),
        }
        parallelize_module(ours, mesh, plan)
        y = ours(distribute_tensor(x, mesh, [Shard(1)]))
        expected = model(x)
        assert_close(y, expected.chunk(2, dim=1)[dist.get_rank()], **TOLERANCE)
        model.zero_grad()
        expected.square().sum().backward()
        y.square().sum().backward()
        assert_close(gradients_of(ours), gradients_of(model), **TOLERANCE)


@case(2)
def meta_models_are_parallelized_before_they_have_values():
    model = randomize(addnorm.nn.Encoder(1, **SIZES))
    with torch.device("meta"):
        ours = parallelize(addnorm.nn.Encoder(1, **SIZES), mesh_of())
    ours.to_empty(device="cpu")
    state = parallel_copy(model, False).state_dict()
    ours.load_state_dict(state)
    (x,) = inputs()
    assert_close(ours(x), model(x), **TOLERANCE)


@case(4, slow=True)
def fsdp_and_tensor_parallel_equal_one_process():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = fully_shard(parallelize(encoder(), mesh["tp"], sequence_parallel=True), mesh=mesh["dp"])
    actual = train(ours, lambda t: t.chunk(2)[mesh.get_local_rank("dp")])
    check_gradients(actual, encoder())


@case(2, slow=True)
def compiled_models_equal_one_process():
    model = randomize(addnorm.nn.Encoder(1, **SIZES))
    compare(model, *inputs(), prepare=lambda ours: ours.compile(backend="aot_eager"))


@case(2)
def heads_that_cannot_be_divided_are_refused():
    with pytest.raises(ValueError, match="nhead is 1 and the mesh has 2 processes"):
        parallelize(addnorm.nn.Encoder(1, 16, 1), mesh_of())
    with pytest.raises(ValueError, match="dim_feedforward is 7"):
        parallelize(addnorm.nn.Encoder(1, 16, 2, 7), mesh_of())


def test_projections_of_other_sublayers_are_not_split():
    other = nn.ModuleDict({"in_proj": nn.Linear(16, 48)})  # as of Mamba
    stack = addnorm.ResidualStack([addnorm.nn.SelfAttention(16, 2), other], 16)
    names = [name for name in split_projections(stack) if ".in_proj." in name and name.endswith("weight")]
    assert [name.partition("sublayer.")[2] for name in names] == [
        "in_proj.q.weight", "in_proj.k.weight", "in_proj.v.weight", "in_proj.weight",
    ]  # fmt: skip


def test_plan_leaves_functions_out():
    stack = addnorm.ResidualStack([nn.Linear(4, 4), torch.relu], 4)
    assert [type(style).__name__ for style in tensor_parallel_plan(stack).values()] == [
        "StackParallel",
        "ReplicatedSublayer",
    ]


test_parallel = make_test(globals())
