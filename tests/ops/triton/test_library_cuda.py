"""Tests of the whole library on a GPU: wirings, tools for existing models, compiled graphs, autocast, one parallel process."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import addnorm
from addnorm.nn import Encoder
from support.fused_model import QUIET
from support.graph_capture import relative_difference
from support.stream_stacks import every, make, tokens

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytestmark = QUIET
CUDA = torch.device("cuda")
bf16 = torch.bfloat16


@pytest.fixture(autouse=True)
def settings():
    """Let no product of float32 matrices round to TF32, since the CPU's do not; restore the compile mode."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    addnorm.set_compile_mode(None)


def train(model, x, target):
    """Return output and gradients of one step."""
    y = model(x)
    loss = (y.float() - target).square().mean()
    return [y, *torch.autograd.grad(loss, [x, *model.parameters()])]


def inputs(*shape):
    generator = torch.Generator().manual_seed(3)
    x, target = (torch.randn(shape, generator=generator) for _ in range(2))
    return x, target


def assert_near(actual, expected, most=2e-4):
    """Compare the norms of the differences; a gradient that is zero but for round-off is compared with the largest tensor."""
    pairs = [
        (ours.detach().cpu().double(), theirs.detach().cpu().double())
        for ours, theirs in zip(actual, expected, strict=True)
    ]
    largest = max(theirs.norm() for _, theirs in pairs)
    for ours, theirs in pairs:
        assert (ours - theirs).norm() <= most * max(theirs.norm(), 1e-2 * largest)


def transformer(kind, layers=3, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=kind == "pre_ln")
    final = nn.LayerNorm(64) if kind == "pre_ln" else None
    return nn.TransformerEncoder(layer, layers, final, enable_nested_tensor=False)


@every
def test_every_wiring_equals_the_cpu(name):
    stack = make(name)
    x = tokens()
    target = torch.randn_like(x)
    here = train(stack, x.clone().requires_grad_(), target)
    there = train(copy.deepcopy(stack).to(CUDA), x.to(CUDA).requires_grad_(), target.to(CUDA))
    assert_near(there, here)


@pytest.mark.parametrize("wiring", ["post_ln", "pre_ln", "mhc", "layer_scale"])
def test_autocast_trains_an_encoder(wiring):
    model = Encoder(2, 64, nhead=4, wiring=wiring, device=CUDA)
    x, target = (t.to(CUDA) for t in inputs(2, 16, 64))
    expected = train(model, x.requires_grad_(), target)
    with torch.autocast("cuda", dtype=bf16):
        actual = train(model, x, target)
    assert_near(actual[:1], expected[:1], 0.05)
    assert all(t.isfinite().all() for t in actual)


@pytest.mark.parametrize("form", ["op", "formula", None])
@pytest.mark.parametrize("compile_mode", ["default", "reduce-overhead"])  # the second one replays CUDA graphs
@pytest.mark.parametrize("wiring", ["post_ln", "pre_ln", "mhc"])
def test_compiled_encoder_equals_eager(wiring, compile_mode, form):
    model = Encoder(2, 64, nhead=4, wiring=wiring, device=CUDA)
    addnorm.set_compile_mode(form)
    compiled = torch.compile(model, mode=compile_mode)
    for seed in range(4):
        x, target = (t.to(CUDA) + seed for t in inputs(2, 16, 64))
        expected = train(model, x.requires_grad_(), target)
        torch.compiler.cudagraph_mark_step_begin()
        assert_near(train(compiled, x, target), expected, 1e-3)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_call_has_the_bits_of_eager(mode):
    args = [torch.randn(shape, device=CUDA, dtype=bf16) for shape in ((64, 256), (64, 256), (256,), (256,))]
    call = functools.partial(addnorm.add_layer_norm, return_residual=True)
    addnorm.set_compile_mode("op")
    compiled = torch.compile(call, fullgraph=True, mode=mode)
    for _ in range(3):
        assert all(map(torch.equal, compiled(*args), call(*args)))


def test_functions_never_wait_for_the_device():
    x, s = (torch.randn(8, 256, device=CUDA, dtype=bf16, requires_grad=True) for _ in range(2))
    w = torch.randn(256, device=CUDA, requires_grad=True)
    addnorm.add_rms_norm(x, s, w, dropout_p=0.1).sum().backward()  # compiled once
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, z = addnorm.add_layer_norm(x, s, w, dropout_p=0.1, layer_scale=w, return_residual=True)
        (y.sum() + z.sum()).backward()
        addnorm.add_rms_norm(x, s, w, dropout_p=0.1).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["pre_ln", "post_ln"])
def test_tools_say_the_same_as_on_the_cpu(kind):
    model = transformer(kind).eval()
    x, target = inputs(2, 8, 64)
    results = []
    for m, device in ((model, "cpu"), (copy.deepcopy(model).to(CUDA), CUDA)):
        at, goal = x.to(device), target.to(device)
        inspection = addnorm.inspect(m, at)
        assert inspection.closes
        ablations = addnorm.ablate_each(inspection, at, loss=lambda y, goal=goal: (y - goal).square().mean())
        decomposition = addnorm.decompose(m, at)
        assert decomposition.closure < 1e-5
        with addnorm.record(m) as recording:
            for _ in range(2):
                (m(at) - goal).square().mean().backward()
        recorded = recording.to_pandas()
        names = [str(site.row) for site in inspection.sites], [*ablations.to_dict()]
        shares = torch.tensor([*decomposition.mean_shares().values()])
        results.append(
            (
                names,
                recorded[["step", "site", "role", "statistic"]],
                shares,
                torch.tensor(recorded["value"].to_numpy(float)),
            )
        )
    (names, rows, shares, values), (other_names, other_rows, other_shares, other_values) = results
    assert names == other_names
    assert names[1]
    assert rows.equals(other_rows)
    torch.testing.assert_close(other_shares, shares, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(other_values, values, rtol=2e-3, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, bf16])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["pre_ln", "post_ln"])
def test_fuse_proves_a_model_on_the_device(kind, training, dtype):
    model = transformer(kind).to(CUDA, dtype).train(training)
    x = inputs(2, 8, 64)[0].to(CUDA, dtype)
    expected = model(x)
    fusion = addnorm.fuse(model, x, benchmark=False)
    assert fusion.proof.holds
    assert fusion.fused
    assert relative_difference(model(x), expected) < (1e-5 if dtype is torch.float32 else 2e-2)
    model(x).float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_fuse_proves_a_language_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    model = transformers.LlamaForCausalLM(config).eval().to(CUDA, bf16)
    ids = torch.randint(0, 97, (2, 9), device=CUDA)
    with torch.no_grad():
        fusion = addnorm.fuse(model, ids, benchmark=False)
        assert fusion.fused
        assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (2, 13)


@pytest.fixture
def one_process():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wiring", ["post_ln", "mhc"])
def test_ddp_and_fsdp_in_one_process(one_process, wiring):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x, target = (t.to(CUDA) for t in inputs(2, 16, 64))
    model = Encoder(2, 64, nhead=4, wiring=wiring, device=CUDA)
    expected = train(model, x.requires_grad_(), target)
    assert_near(train(DistributedDataParallel(copy.deepcopy(model)), x, target), expected)
    sharded = copy.deepcopy(model)
    for layer in sharded.stack.layers:
        fully_shard(layer, mesh=init_device_mesh("cuda", (1,)))
    fully_shard(sharded, mesh=init_device_mesh("cuda", (1,)))
    y = sharded(x)
    (y - target).square().mean().backward()
    assert_near([y, *(p.grad.full_tensor() for p in sharded.parameters())], [expected[0], *expected[2:]])


def test_checkpoints_and_dropout_recompute_the_same_bits():
    results = []
    for checkpoint in (False, True):
        torch.manual_seed(5)
        model = Encoder(2, 64, nhead=4, dropout=0.1, checkpoint=checkpoint, device=CUDA)
        x, target = (t.to(CUDA) for t in inputs(2, 16, 64))
        torch.manual_seed(6)
        results.append(train(model, x.requires_grad_(), target))
    assert_near(results[1], results[0], 1e-6)
