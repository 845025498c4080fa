"""Stacks of several streams in the hands of users: shapes, dtypes, copies, transforms, compilation, sharding, regularization."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call, jacrev, jvp, vmap

from addnorm import Learned, ResidualStack, Wiring, wirings
from addnorm.nn import Decoder, KeyValueCache
from addnorm.wirings import Computed, Head, Stage, coefficients, identity

D = 8
WIRINGS = {
    "hyper_connections": wirings.hyper_connections(3),
    "static_hyper_connections": wirings.hyper_connections(3, dynamic=False),
    "mhc": wirings.mhc(3, iterations=5),
    "mhc_with_mean": wirings.mhc(3, head="mean", iterations=5),
    "single_pass_mhc": wirings.mhc(3, single_pass=True, iterations=5),
    "independent_hc": wirings.independent_hc(3),
    "gated_residual": wirings.gated_residual(3, rank=4),
    "attention_residuals": wirings.attention_residuals(),
    "attention_residuals_by_block": wirings.attention_residuals(1),
    "attention_residuals_three_reads": wirings.attention_residuals(normed_values=True, reads=3),
    "denseformer": wirings.denseformer(),
    "muddformer": wirings.muddformer(),
    "muddformer_three_reads": wirings.muddformer(reads=3),
    "x0_residual": wirings.x0_residual(),
    "gated_mix": wirings.gated_mix(),
    "residual_scaling": wirings.residual_scaling(),
    "reversible": wirings.reversible(),
    "ngpt": wirings.ngpt(),
    "siamese_norm": wirings.siamese_norm(),
    "resi_dual": wirings.resi_dual(),
    "b2t": wirings.b2t(),
}
each = pytest.mark.parametrize("name", WIRINGS)
one_of_each_module = pytest.mark.parametrize(
    "name",
    ["hyper_connections", "single_pass_mhc", "independent_hc", "gated_residual", "attention_residuals_three_reads",
     "muddformer_three_reads", "x0_residual", "residual_scaling"],
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


class Branch(nn.Module):
    """A sublayer of one or several inputs that is not homogeneous."""

    def __init__(self, reads=1):
        super().__init__()
        self.linear, self.reads = nn.Linear(D, D), reads

    def forward(self, x, *others):
        assert len(others) == self.reads - 1
        for k, read in enumerate(others):
            x = x + (k + 2) * read
        return torch.tanh(self.linear(x)) + 0.3


def branches(name, number=6):
    return [Branch(3 if name.endswith("three_reads") and i % 2 == 0 else 1) for i in range(number)]


def make(name, dtype=torch.float32, number=6, **options):
    """Return a stack whose parameters are away from their initial values."""
    stack = ResidualStack(branches(name, number), D, WIRINGS[name], **options)
    perturb(stack)
    return stack.to(dtype)


@torch.no_grad()
def perturb(model):
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))


def tokens(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (4, 5)), D, dtype=dtype)


def distance(actual, expected):
    return float((actual.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


# Shapes and layouts


@each
def test_layout_of_x_does_not_matter(name):
    stack, x = make(name, torch.float64), tokens(dtype=torch.float64)
    y = stack(x)
    for same, expected in (
        (stack(x.mT.contiguous().mT), y),
        (stack(x.transpose(0, 1)), y.transpose(0, 1)),
        (stack(x[:1].expand(3, 5, D)), y[:1].expand(3, 5, D)),
        (stack(x.repeat_interleave(2, -1)[..., ::2]), y),
        (stack(x[1:2, 2:3]), y[1:2, 2:3]),
        (stack(x[1, 2]), y[1, 2]),
    ):
        torch.testing.assert_close(same, expected, rtol=1e-12, atol=1e-12)


@each
def test_no_token_gives_no_output_and_zero_gradients(name):
    stack = make(name)
    for shape in ((0,), (2, 0), (0, 5)):
        x = tokens(*shape).requires_grad_()
        y = stack(x)
        assert y.shape == x.shape
        gradients = torch.autograd.grad(y.sum(), [x, *stack.parameters()])
        assert not any(bool(gradient.any()) for gradient in gradients)


@pytest.mark.parametrize("name", ["static_hyper_connections", "mhc", "attention_residuals", "reversible", "gated_mix"])
def test_wrong_input_is_refused_in_one_sentence(name):
    stack = make(name)
    for x, error, message in (
        (torch.randn(2, D - 1), ValueError, r"^x has shape \(2, 7\), expected \(\*, 8\)[^.]*\.$"),
        (torch.randn(()), ValueError, r"^x has shape \(\), expected \(\*, 8\)[^.]*\.$"),
        (
            torch.zeros(2, D, dtype=torch.long),
            TypeError,
            r"^x has dtype torch\.int64, expected [^.]*: convert it with x\.float\(\)\.$",
        ),
        (None, TypeError, r"^x is NoneType, expected a tensor of shape \(\*, d_model\)\.$"),
    ):
        with pytest.raises(error, match=message):
            stack(x)


def test_single_sublayer_is_called_with_a_tensor_of_one_stream():
    connection, x = make("gated_mix").connections[1], tokens()
    a, b = (t[0][0] if isinstance(t[0], tuple) else t[0] for t in connection.coefficients((x,))[1:3])
    write = connection.norm_branch(connection.sublayer(connection.norm_in(x)))
    torch.testing.assert_close(connection(x), a * x + b * write)
    for name in ("mhc", "reversible", "attention_residuals"):
        with pytest.raises(
            ValueError, match=r"^x is a tensor and the sublayer has \d streams, expected a StreamState: [^.]*\.$"
        ):
            make(name).connections[0](x)


# Dtypes


def own_parameters(stack):
    """Return the learned coefficients of a stack."""
    modules = [*stack.connections, stack.head]
    return [
        p for m in modules for p in (*m._parameters.values(), *(m.coefficients.parameters() if m.coefficients else ()))
    ]


@each
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_half_precision_keeps_coefficients_in_float32(name, dtype, limit):
    stack = make(name, dtype)
    assert all(p.dtype == torch.float32 for p in own_parameters(stack))
    built = ResidualStack(branches(name), D, WIRINGS[name], dtype=dtype)
    assert all(p.dtype == torch.float32 for p in own_parameters(built))
    exact, x = copy.deepcopy(stack).double(), tokens(dtype=dtype).requires_grad_()
    assert all(p.dtype == torch.float64 for p in exact.parameters())
    states = []
    for layer in stack.layers:
        layer.register_forward_hook(lambda layer, args, state: states.append(state.x))
    y = stack(x)
    assert y.dtype == dtype
    assert {t.dtype for state in states for t in (state if isinstance(state, tuple) else (state,))} == {dtype}
    assert distance(y, exact(x.double())) < limit
    for gradient in torch.autograd.grad(y.float().square().sum(), [x, *stack.parameters()]):
        assert gradient.isfinite().all()


@each
def test_residual_dtype_is_that_of_every_stream(name):
    stack, x = make(name, torch.bfloat16, residual_dtype=torch.float32), tokens(dtype=torch.bfloat16)
    states, reads = [], []
    for layer in stack.layers:
        layer.register_forward_hook(lambda layer, args, state: states.append(state.x))
    for connection in stack.connections:
        connection.sublayer.register_forward_pre_hook(lambda module, args: reads.extend(args))
    assert stack(x).dtype == torch.bfloat16
    assert {t.dtype for state in states for t in (state if isinstance(state, tuple) else (state,))} == {torch.float32}
    assert {read.dtype for read in reads} == {torch.bfloat16}


@each
def test_autocast_computes_coefficients_in_float32(name):
    stack, x = make(name), tokens()
    seen = []
    for connection in stack.connections:
        if connection.coefficients is not None:
            connection.coefficients.register_forward_hook(lambda module, args, output: seen.append(output))
    expected = stack(x)
    exact, seen[:] = [*seen], []
    with torch.autocast("cpu", torch.bfloat16):
        y, plain = stack(x), ResidualStack([Branch(), Branch()], D)(x)
    assert y.dtype == plain.dtype
    assert distance(y, expected) < 0.03
    if exact:  # those of the first computed site but for its streams' rounding
        assert all(t.dtype == torch.float32 for t in find_tensors(tuple(seen)))
    gradients = torch.autograd.grad(y.float().square().sum(), [*stack.parameters()])
    assert all(g.dtype == p.dtype for g, p in zip(gradients, stack.parameters(), strict=True))


def find_tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for each in value for t in find_tensors(each)] if isinstance(value, tuple) else []


@each
def test_x_may_be_wider_than_the_parameters(name):
    stack, x = make(name), tokens(dtype=torch.float64)
    exact = copy.deepcopy(stack).double()
    for connection in stack.connections:
        connection.sublayer.double()
    assert distance(stack(x), exact(x)) < 1e-6


# Parameters


@each
def test_reset_parameters_sets_what_the_constructor_sets(name):
    stack = ResidualStack(branches(name), D, WIRINGS[name])
    with torch.device("meta"):
        other = ResidualStack(branches(name), D, WIRINGS[name])
    assert all(p.is_meta for p in other.parameters())
    other = other.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(float("nan"))
    other.reset_parameters()
    for (key, expected), (same, actual) in zip(stack.named_parameters(), other.named_parameters(), strict=True):
        assert key == same
        assert actual.dtype == expected.dtype
        if ".sublayer." not in key:
            assert actual.isfinite().all(), key
            if len(expected.unique()) <= 2:  # not drawn
                assert torch.equal(actual, expected), key
            elif not torch.equal(actual, expected):
                torch.testing.assert_close(actual.std(), expected.std(), rtol=0.8, atol=0)


@each
def test_copies_and_checkpoints_compute_the_same(name):
    stack, x = make(name), tokens()
    y = stack(x)
    assert torch.equal(copy.deepcopy(stack)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(stack))(x), y)
    file = io.BytesIO()
    torch.save(stack.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    with torch.device("meta"):
        assigned = ResidualStack(branches(name), D, WIRINGS[name])
    for other, assign in ((ResidualStack(branches(name), D, WIRINGS[name]), False), (assigned, True)):
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other(x), y)
    key = next(key for key in reversed(state) if ".sublayer." not in key)
    del state[key]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{key}"'):
        stack.load_state_dict(state)


def test_equal_learned_entries_are_separate_parameters():
    stage = Stage(
        2, (Learned(0.5), Learned(0.5)), ((Learned(1.0), 0.0), (0.0, Learned(1.0))), (Learned(1.0), Learned(1.0))
    )
    head = Head(2, (Learned(0.5), Learned(0.5)))
    stack = ResidualStack([Branch()], D, Wiring("mine", stage, embedding=(1.0, -2.0), head=head), sublayers_per_layer=1)
    stack = stack.double()
    x, f = tokens(dtype=torch.float64), stack.connections[0].sublayer
    table = {
        key.rpartition(".")[2]: p for key, p in stack.named_parameters() if "sublayer" not in key and "head" not in key
    }
    assert [*table] == ["collapse_0_0", "collapse_0_1", "mix_0_0", "mix_1_1", "inject_0", "inject_1"]
    with torch.no_grad():
        for parameter in [*table.values(), *stack.head.parameters()]:
            parameter.normal_()
    c = stack.head.collapse_0_0, stack.head.collapse_0_1
    streams = x, -2 * x
    write = f(table["collapse_0_0"] * streams[0] + table["collapse_0_1"] * streams[1])
    expected = c[0] * (table["mix_0_0"] * streams[0] + table["inject_0"] * write) + c[1] * (
        table["mix_1_1"] * streams[1] + table["inject_1"] * write
    )
    torch.testing.assert_close(stack(x), expected, rtol=1e-12, atol=1e-12)


def test_entries_of_one_name_are_one_parameter():
    pair = (Learned(0.7, name="share"), Learned(0.7, name="share"))
    wiring = Wiring("mine", Stage(2, pair, inject=(1, 0)), embedding=(1.0, 1.0), head=Head(2, (1, 0)))
    stack = ResidualStack([Branch()], D, wiring)
    assert [key for key, _ in stack.named_parameters() if "sublayer" not in key] == ["layers.0.connections.0.share"]


@pytest.mark.parametrize("per_feature", [False, True])
def test_constant_writes_beside_computed_reads(per_feature):
    inject = (Learned(0.5, per_feature=per_feature), -2.0, Learned(1.5, per_feature=per_feature))
    stage = Stage(3, inject=inject, coefficients=Computed(coefficients.SigmoidRead))
    wiring = Wiring("mine", stage, embedding=(1.0, 0.5, 2.0), head=Head(3, (0.2, 0.3, 0.5)))
    stack = ResidualStack([Branch()], D, wiring, sublayers_per_layer=1).double()
    with torch.no_grad():
        for parameter in stack.connections[0].parameters():
            parameter.add_(torch.randn_like(parameter))
    x, at = tokens(dtype=torch.float64), stack.connections[0]
    streams = torch.stack([x, 0.5 * x, 2 * x], -2)
    write = at.sublayer((at.coefficients(streams).collapse.unsqueeze(-1) * streams).sum(-2))
    expected = [s + b * write for s, b in zip(streams.unbind(-2), (at.inject_0, -2.0, at.inject_2), strict=True)]
    torch.testing.assert_close(
        stack(x), 0.2 * expected[0] + 0.3 * expected[1] + 0.5 * expected[2], rtol=1e-12, atol=1e-12
    )


# Transforms and compilation


@each
def test_modes_without_gradients_give_the_same_bits(name):
    stack, x = make(name), tokens()
    y = stack(x)
    with torch.no_grad():
        assert torch.equal(stack(x), y)
    with torch.inference_mode():
        assert torch.equal(stack(x), y)


@one_of_each_module
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_function_transforms(name):
    stack, x, v = make(name, torch.float64), tokens(dtype=torch.float64), tokens(dtype=torch.float64)
    y, step = stack(x), 1e-6
    torch.testing.assert_close(vmap(stack.forward)(x), y, rtol=1e-12, atol=1e-12)
    slope = (stack(x + step * v) - stack(x - step * v)) / (2 * step)
    torch.testing.assert_close(jvp(stack.forward, (x,), (v,))[1], slope, rtol=1e-5, atol=1e-6)
    jacobian = jacrev(stack.forward)(x[0, 0])
    torch.testing.assert_close(jacobian @ v[0, 0], slope[0, 0], rtol=1e-5, atol=1e-6)
    parameters = {key: 1.1 * p.detach() for key, p in stack.named_parameters()}
    other = copy.deepcopy(stack)
    other.load_state_dict(parameters)
    torch.testing.assert_close(functional_call(stack, parameters, (x,)), other(x), rtol=1e-12, atol=1e-12)


def check_compiled(name, number=6):
    torch._dynamo.reset()
    stack, x = make(name, number=number), tokens().requires_grad_()
    results = []
    for call in (stack, torch.compile(stack, fullgraph=True, backend="aot_eager")):
        y = call(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *stack.parameters()])))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def check_exported(name, number=6):
    stack, x = make(name, number=number).eval(), tokens()
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    program = torch.export.export(stack, (x,), dynamic_shapes=(sizes,))
    longer = tokens(7, 3)
    torch.testing.assert_close(program.module()(longer), stack(longer))


def test_compiles_without_graph_breaks():
    check_compiled("single_pass_mhc", 2)


@pytest.mark.slow
@each
def test_every_wiring_compiles_and_exports(name):
    check_compiled(name)
    check_exported(name)


def test_exports_with_dynamic_shapes():
    check_exported("attention_residuals_three_reads", 4)


# Dropout, stochastic depth, checkpoints


@pytest.mark.parametrize(
    "options", [{"dropout": 0.5}, {"stochastic_depth": 0.5}, {"dropout": 0.3, "stochastic_depth": 0.3}]
)
@pytest.mark.parametrize("stacked", [False, True])
def test_all_streams_drop_the_same_elements(options, stacked):
    computed = Computed(coefficients.SigmoidRead) if stacked else None
    stage = Stage(3, None if stacked else (1, 0, 0), None if stacked else identity(3), (1, 3, -2), computed)
    wiring = Wiring("mine", stage, embedding=(1.0, 3.0, -2.0), head=Head(3, (1, -1, -1)))  # 1 - 3 + 2 = 0
    stack = ResidualStack([Branch() for _ in range(3)], D, wiring, sublayers_per_layer=1, **options).double()
    x = tokens(20, 5, dtype=torch.float64)
    assert stack(x).abs().max() < 1e-12
    assert (stack.unroll(x).writes[2] == 0).any()
    assert stack.eval()(x).abs().max() < 1e-12


@each
def test_checkpoints_compute_the_same_bits(name):
    stack = make(name, dropout=0.2, stochastic_depth=0.2)
    x, dy, results = tokens().requires_grad_(), tokens(), []
    for checkpoint in (False, True, 2):
        stack.checkpoint = checkpoint
        torch.manual_seed(3)
        y = stack(x)
        results.append((y, *torch.autograd.grad(y, [x, *stack.parameters()], dy)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# Decoders, hooks, removal, sharding


@one_of_each_module
def test_decoder_with_cache_equals_the_decoder_without(name):
    decoder = Decoder(3, D, 2, 16, WIRINGS[name], cross_attention=False).eval()
    perturb(decoder)
    x, cache = tokens(2, 6), KeyValueCache()
    y = decoder(x)
    steps = [decoder(x[:, a:b], cache=cache) for a, b in ((0, 3), (3, 4), (4, 6))]
    torch.testing.assert_close(torch.cat(steps, 1), y, rtol=1e-4, atol=1e-5)
    other = x.clone()
    other[:, 4:] += 1.0
    assert torch.equal(decoder(other)[:, :4], y[:, :4])  # causal


@each
def test_every_module_is_called_when_it_has_hooks(name):
    stack, x, called = make(name), tokens(), []
    y = stack(x)
    modules = {key: m for key, m in stack.named_modules() if key and not isinstance(m, nn.ModuleList | nn.ModuleDict)}
    for key, module in modules.items():
        module.register_forward_hook(lambda module, args, output, key=key: called.append(key))
    torch.testing.assert_close(stack(x), y)
    assert {*called} == {*modules}


@each
def test_without_leaves_the_other_writes(name):
    stack, x = make(name), tokens()
    for i in (0, 3, 5):
        expected = copy.deepcopy(stack)
        expected.connections[i].sublayer.forward = lambda x, *others: torch.zeros_like(x)
        expected.connections[i].norm_branch = None
        torch.testing.assert_close(stack.without(i)(x), expected(x))
        assert not torch.equal(stack(x), expected(x))


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch's own
@pytest.mark.parametrize(
    ("unit", "names"),
    [
        ("layers", ["static_hyper_connections", "single_pass_mhc", "x0_residual"]),
        pytest.param("layers", WIRINGS, marks=pytest.mark.slow),
        pytest.param("connections", WIRINGS, marks=pytest.mark.slow),
    ],
    ids=["layers", "layers_of_all", "connections_of_all"],
)
def test_sharded_stacks_have_the_same_gradients(unit, names, mesh):
    for name in names:
        stack, x = make(name), tokens()
        plain, half = copy.deepcopy(stack), copy.deepcopy(stack)
        expected = plain(x)
        expected.square().sum().backward()
        for model, options in ((stack, {}), (half, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)})):
            scalars = {p for p in model.parameters() if p.dim() == 0}
            for module in getattr(model, unit):
                fully_shard(module, mesh=mesh, ignored_params=scalars, **options)
            fully_shard(model, mesh=mesh, ignored_params=scalars, **options)
        y = stack(x)
        torch.testing.assert_close(y, expected)
        y.square().sum().backward()
        for (key, p), q in zip(stack.named_parameters(), plain.parameters(), strict=True):
            gradient = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(
                gradient, q.grad, rtol=1e-4, atol=1e-4, msg=lambda m, k=key, n=name: f"{n} {k}: {m}"
            )
        assert distance(half(x), expected) < 0.05
