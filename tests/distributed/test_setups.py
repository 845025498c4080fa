"""Tests of more ways to set up training: options of DDP and FSDP2, saved checkpoints, plans by hand, `local_map`, torch's layers."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import addnorm
from support.distributed import case, make_test
from support.dtensors import close, mesh_of
from support.parallel_models import batch, check_gradients, encoder, part, randomize, shard, train, whole

D = 16


@case(2)
def ddp_options():
    for options in ({"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        check_gradients(train(DistributedDataParallel(encoder(), **options)), encoder())


@case(2)
def fsdp2_of_groups():
    for select in (
        lambda stack: [[*layer.connections] for layer in stack.layers],
        lambda stack: [stack.norm_final],
        lambda stack: [[*stack.layers[:2]], stack.layers[2]],
    ):
        model = encoder()
        check_gradients(train(shard(model, *select(model.stack))), encoder())


@case(2)
def fsdp2_in_bfloat16():
    """The gradients of a model in bfloat16, which FSDP averages in float32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, plain = encoder().float(), encoder().bfloat16()
    shard(model, *(connection.sublayer for connection in model.stack.connections), mp_policy=policy)
    x, dy = batch().float()
    (model(part(x)) * part(dy)).mean().backward()
    sums = dict.fromkeys(dict(plain.named_parameters()), 0.0)
    for half, cotangent in zip(x.chunk(2), dy.chunk(2), strict=True):
        plain.zero_grad()
        (plain(half.bfloat16()) * cotangent).mean().backward()
        sums = {name: sums[name] + p.grad.float() / 2 for name, p in plain.named_parameters()}
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(whole(p.grad), sums[name], rtol=1e-6, atol=1e-9, msg=name)


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
    model = encoder()
    shard(model, *model.stack.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model)
    optimizer.step()
    values = {name: whole(p.detach()) for name, p in model.named_parameters()}
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder[0])
    plain = encoder()
    with torch.device("meta"):
        meta = addnorm.nn.Encoder(3, D, 2, dtype=torch.float64)
    shard(meta, *(connection.sublayer for connection in meta.stack.connections)).to_empty(device="cpu")
    for other in (plain, meta):
        with torch.no_grad():
            for p in other.parameters():
                p.fill_(7.0)
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder[0])
        other.load_state_dict(state["model"])
        assert {name: whole(p.detach()) for name, p in other.named_parameters()}.keys() == values.keys()
        assert all(whole(p.detach()).equal(values[name]) for name, p in other.named_parameters())
    check_gradients(train(meta), plain)


class Block(nn.Module):
    """A feed-forward and an Add & Norm."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D).double(), nn.Linear(4 * D, D).double()
        self.norm = addnorm.AddNorm(D, dtype=torch.float64)

    def forward(self, x):
        return self.norm(x, self.down(torch.relu(self.up(x))))


@case(2)
def tensor_parallel_with_torchs_styles():
    """Only the projections are sharded; Add & Norms compute on ordinary tensors."""
    for make, prefixes in (
        (lambda: randomize(Block()), [""]),
        (encoder, [f"stack.layers.{i}.connections.1.sublayer." for i in range(3)]),
    ):
        torch.manual_seed(3)
        model = make()
        plan = {}
        for prefix in prefixes:
            plan |= {f"{prefix}up": ColwiseParallel(), f"{prefix}down": RowwiseParallel()}
        parallelize_module(model, mesh_of(), plan)
        actual = train(model, lambda t: t)
        torch.manual_seed(3)
        check_gradients(actual, make())


@case(2)
def calls_in_local_map_equal_one_process():
    mesh = mesh_of()
    generator = torch.Generator().manual_seed(4)
    shapes = ((4, 6, D), (4, 6, D), (D,), (D,))
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    dy, dz = torch.randn(2, 4, 6, D, dtype=torch.float64, generator=generator)
    rows, parameters = ([Shard(1)],) * 2, ([Replicate()],) * 2
    call = local_map(
        lambda *args: addnorm.add_layer_norm(*args, return_residual=True),
        out_placements=rows,
        in_placements=rows + parameters,
        in_grad_placements=(*rows, [Partial()], [Partial()]),
        device_mesh=mesh,
    )
    inputs = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip(tensors, rows + parameters, strict=True)]
    reference = [t.clone().requires_grad_() for t in tensors]
    outputs, expected = call(*inputs), addnorm.add_layer_norm(*reference, return_residual=True)
    torch.autograd.backward(outputs, [distribute_tensor(t, mesh, [Shard(1)]) for t in (dy, dz)])
    torch.autograd.backward(expected, [dy, dz])
    for name, actual, other in zip("yz", outputs, expected, strict=True):
        close(actual, other, name)
    for i, (actual, other) in enumerate(zip(inputs, reference, strict=True)):
        close(actual.grad, other.grad, f"gradient {i}")


@case(1, slow=True)
def records_of_torchs_sharded_layers():
    """In training with and without gradients, and in evaluation, where torch's layer may take its fast path."""

    def make():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(D, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        return nn.TransformerEncoder(layer, 2, nn.LayerNorm(D), enable_nested_tensor=False)

    x = torch.randn(2, 5, D)

    def record(model, grads, training):
        with addnorm.record(model, grads=grads) as rec, torch.set_grad_enabled(training):
            y = model.train(training)(x)
            if training:
                y.pow(2).sum().backward()
        return {(row.site, row.role, row.statistic): row.value for row in rec.table()}

    for grads, training in ((True, True), (False, True), (True, False)):
        model = make()
        actual = record(shard(model, *model.layers), grads, training)
        expected = record(make(), grads, training)
        assert actual.keys() == expected.keys()
        assert len(actual) > 80
        torch.testing.assert_close([*actual.values()], [*expected.values()], rtol=2e-5, atol=2e-5)
        assert addnorm.inspect(model, x).wiring == "pre_ln"
    model.eval()
    assert addnorm.decompose(model, x).closure < 1e-5
    with addnorm.ablate(addnorm.inspect(model, x).sites[0]), torch.no_grad():
        ablated = model(x)
    plain = make().eval()
    with addnorm.ablate(addnorm.inspect(plain, x).sites[0]), torch.no_grad():
        torch.testing.assert_close(ablated, plain(x))


test_setup = make_test(globals())
