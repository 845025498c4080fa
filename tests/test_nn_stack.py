"""ResidualStack: what is fused, which memory is used, what reaches the sublayers, and what it refuses."""

import copy
import gc
import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import addnorm
from addnorm import ResidualStack, Row, Wiring, wirings
from addnorm.nn import passing
from addnorm.nn.passing import Pass

D = 16
f64 = torch.float64


@pytest.fixture(autouse=True)
def every_stream_is_large(monkeypatch):
    """So that small tensors show which memory is written."""
    monkeypatch.setattr(passing, "SMALL", 0)


class Mlp(nn.Module):
    """A sublayer whose output is its own new tensor."""

    def __init__(self, d=D, dtype=None):
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d, dtype=dtype), nn.Linear(2 * d, d, dtype=dtype)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def stack_of(n, wiring="pre_ln", d=D, **options):
    dtype = options.get("dtype")
    return ResidualStack([Mlp(d, dtype) for _ in range(n)], d, wiring, **options)


def stand_in(name, **options):
    """Every wiring by name, those that need an option with one."""
    return wirings.get(name, **({"multiplier": 0.5} if name == "residual_multiplier" else {}), **options)


ALL = [stand_in(name) for name in wirings.CONSTRUCTORS]
each_wiring = pytest.mark.parametrize("wiring", ALL, ids=lambda wiring: wiring.name)


class Calls(TorchDispatchMode):
    """The calls of this library's operators: True where one adds a branch, and whether it normalizes."""

    def __init__(self):
        super().__init__()
        self.adds, self.norms, self.fused = 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "addnorm":
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            adds = given["branch"] is not None
            normalizes = given.get("norm", 0) != 2
            self.adds += adds and not normalizes
            self.norms += normalizes and not adds
            self.fused += adds and normalizes
        return func(*args, **(kwargs or {}))


# What is fused

COUNTS = {  # of 6 sublayers: adds alone, norms alone, both in one call
    "post_ln": (0, 0, 6),
    "pre_ln": (0, 1, 6),
    "sandwich": (0, 1 + 6, 6),
    "peri_ln": (0, 1 + 1 + 6, 6),
    "reordered": (5, 6, 1),
    "deepnorm": (0, 0, 6),
    "layer_scale": (0, 1, 6),
    "layernorm_scaling": (0, 1, 6),
    "no_norm": (6, 0, 0),
    "no_residual": (0, 0, 6),
    "parallel": (3, 1, 3),  # of each layer one add alone, the other with the next layer's norm
    "resi_dual": (6 + 1, 1, 6),  # the second stream's adds, the sum of both, its norm
    "b2t": (3, 0, 6),  # the layer's input once more
}


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", COUNTS)
def test_an_add_and_the_norm_after_it_are_one_call(name, grad):
    stack, x = stack_of(6, name), torch.randn(2, 3, D)
    with torch.set_grad_enabled(grad), Calls() as calls:
        stack(x)
    assert (calls.adds, calls.norms, calls.fused) == COUNTS[name]


@pytest.mark.parametrize("n", [1, 2, 7])
def test_pre_ln_of_s_sublayers_is_s_plus_1_norm_calls_all_but_the_first_fused_with_an_add(n):
    with Calls() as calls:
        stack_of(n)(torch.randn(3, D))
    assert (calls.adds, calls.norms, calls.fused) == (0, 1, n)


def test_a_norm_after_a_norm_is_a_call_of_its_own():  # where post-LN layers end and pre-LN layers begin
    with Calls() as calls:
        stack_of(6, wirings.mix_ln(k=1))(torch.randn(3, D))
    assert (calls.adds, calls.norms, calls.fused) == (0, 1, 6)


# The same bits, with gradients and without


@each_wiring
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_with_and_without_gradients_the_bits_are_the_same_and_x_is_left_alone(wiring, norm):
    stack = stack_of(6, wiring, norm=norm, dropout=0.2, stochastic_depth=0.3)
    for parameter in stack.parameters():
        nn.init.normal_(parameter, 0.3, 0.3)
    for training in (False, True):
        stack.train(training)
        for x in (torch.randn(2, 3, D), torch.randn(5, D), torch.randn(D)):
            before = x.clone()
            torch.manual_seed(7)
            expected = stack(x)
            for guard in (torch.no_grad(), torch.inference_mode()):
                torch.manual_seed(7)
                with guard:
                    assert torch.equal(stack(x), expected)
            assert torch.equal(x, before)


@each_wiring
def test_a_float32_stream_under_bfloat16_sublayers(wiring):
    stack = stack_of(6, wiring, stream_dtype=torch.float32, dtype=torch.bfloat16)
    x, streams = torch.randn(2, 3, D, dtype=torch.bfloat16), []
    with Calls(), torch.no_grad():
        without_grad = stack(x)
    for connection in stack.connections:
        assert {p.dtype for p in connection.parameters()} == {torch.bfloat16}
        connection.sublayer.register_forward_pre_hook(lambda module, args: streams.append(args[0].dtype))
    y = stack(x)
    assert torch.equal(y, without_grad)
    assert y.dtype == torch.bfloat16
    assert set(streams) == {torch.bfloat16}  # what is read is in the sublayers' dtype
    y.sum().backward()


def test_the_float32_stream_keeps_what_a_bfloat16_stream_rounds_away():
    class Tiny(nn.Module):
        def forward(self, x):
            return torch.full_like(x, 2.0**-10)

    x = torch.ones(1, D, dtype=torch.bfloat16)
    kwargs = {"dtype": torch.bfloat16, "final_norm": False}
    narrow = ResidualStack([Tiny() for _ in range(64)], D, **kwargs).unroll(x).x_L
    wide = ResidualStack([Tiny() for _ in range(64)], D, stream_dtype=torch.float32, **kwargs).unroll(x).x_L
    assert torch.equal(narrow, x)  # each add alone is less than half a rounding
    assert torch.equal(wide, torch.full((1, D), 1 + 64 * 2.0**-10))


def test_autocast_gives_the_same_with_and_without_gradients():
    stack, x = stack_of(4), torch.randn(2, 3, D)
    with torch.autocast("cpu", torch.bfloat16):
        y = stack(x)
        with torch.no_grad():
            assert torch.equal(stack(x), y)
    assert y.dtype == torch.float32  # that of F.layer_norm there


# Memory


class Seen(nn.Module):
    """Records where the memory of what it read and of what it returned is; keeps neither."""

    def __init__(self, log):
        super().__init__()
        self.inner, self.log = nn.Linear(D, D), log

    def forward(self, x):
        y = self.inner(x)
        self.log.append((x.data_ptr(), y.data_ptr()))
        return y


@pytest.mark.parametrize(
    "name", ["pre_ln", "post_ln", "sandwich", "deepnorm", "layernorm_scaling", "layer_scale", "rezero"]
)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_without_gradients_what_a_sublayer_returned_becomes_what_the_next_one_reads(name, norm):
    log = []
    stack = ResidualStack([Seen(log) for _ in range(5)], D, name, norm=norm)
    with torch.no_grad():
        y = stack(torch.randn(2, 3, D))
    assert [returned for _, returned in log] == [read for read, _ in log[1:]] + [y.data_ptr()]
    log.clear()
    stack(torch.randn(2, 3, D))  # autograd keeps the streams
    assert not {returned for _, returned in log} & {read for read, _ in log[1:]}


class Allocations(TorchDispatchMode):
    """How many tensors operators made that are neither a sublayer's nor views."""

    def __init__(self):
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "addnorm" and not func._schema.is_mutable:
            self.made += len(func._schema.returns)
        if func is torch.ops.aten.empty_like.default:
            self.made += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "made"), [("pre_ln", 2), ("post_ln", 0), ("sandwich", 2), ("no_norm", 0)])
def test_without_gradients_the_add_and_norms_allocate_at_most_the_first_read_and_the_stream(name, made):
    for n in (2, 12):
        stack = stack_of(n, name)
        with torch.no_grad(), Allocations() as allocations:
            stack(torch.randn(4, D))
        assert allocations.made == made


def test_a_small_stream_gets_new_memory_and_a_large_one_does_not(monkeypatch):
    monkeypatch.undo()
    stack = stack_of(6)
    for rows, made in ((2, 2 * 6), (2000, 2)):  # 64 KB are 1024 rows
        x = torch.randn(rows, D)
        expected = stack(x)
        with torch.no_grad(), Allocations() as allocations:
            assert torch.equal(stack(x), expected)
        assert allocations.made == made


class Cached(nn.Module):
    """Returns memory that it keeps."""

    def __init__(self, kind):
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.randn(2, 3, D)), kind
        self.kept = torch.randn(2, 3, D)
        self.array = torch.randn(2, 3, D).numpy()

    def forward(self, x):
        return {
            "a parameter": self.weight,
            "a view of a parameter": self.weight.view(2, 3, D),
            "a tensor it keeps": self.kept,
            "a tensor without memory of its own": self.kept[:1, :1].expand(2, 3, D),
            "what it read": x,
            "a view of what it read": x.view(2, 3, D),
            "memory of numpy": torch.from_numpy(self.array),
            "a transposed tensor": (x.mT * 2.0).mT,
        }[self.kind]


KINDS = [
    "a parameter", "a view of a parameter", "a tensor it keeps", "a tensor without memory of its own", "what it read",
    "a view of what it read", "memory of numpy", "a transposed tensor",
]  # fmt: skip


@each_wiring
@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_somebody_else_holds_is_never_written(wiring, kind):
    sublayers = [Cached(kind) for _ in range(4)]
    stack, x = ResidualStack(sublayers, D, wiring), torch.randn(2, 3, D)
    expected, before = stack(x), copy.deepcopy((x, sublayers[0].state_dict(), sublayers[0].kept, sublayers[0].array))
    with torch.no_grad():
        assert torch.equal(stack(x), expected)
    assert torch.equal(x, before[0])
    assert torch.equal(sublayers[0].weight, before[1]["weight"])
    assert torch.equal(sublayers[0].kept, before[2])
    assert (sublayers[0].array == before[3]).all()


@pytest.mark.parametrize("name", ["pre_ln", "post_ln", "sandwich", "no_norm"])
def test_what_a_hook_keeps_is_never_written(name):
    stack, x = stack_of(4, name), torch.randn(2, 3, D)
    kept = []

    def keep(module, args, output):
        kept.extend((t, t.clone()) for t in (*args, output))

    for connection in stack.connections:
        connection.sublayer.register_forward_hook(keep)
        connection.sublayer.down.register_forward_hook(keep)  # the same tensor, from inside
    with torch.no_grad():
        stack(x)
    assert len(kept) == 16
    assert all(torch.equal(t, then) for t, then in kept)


def test_what_is_kept_for_the_backward_is_the_stream_and_8_bytes_a_token():
    class Free(nn.Module):  # keeps nothing itself
        def forward(self, x):
            return x.detach() * 0.5

    rows, saved = 64, {}
    stack = ResidualStack([Free() for _ in range(5)], D, "pre_ln")
    x = torch.randn(rows, D, requires_grad=True)

    def pack(t):
        saved[t.data_ptr()] = t  # alive, so that no other tensor gets its address
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = stack(x)
    parameters = {p.data_ptr() for p in stack.parameters()}
    kept = sum(t.nbytes for pointer, t in saved.items() if pointer not in parameters)
    assert kept == 6 * (4 * rows * D + 8 * rows)  # x_0 to x_5, and their statistics
    del y


# What reaches the sublayers


class Masked(nn.Module):
    def forward(self, x, mask=None, *, scale=1.0):
        self.got = (mask, scale)
        return x * scale


def test_a_keyword_goes_to_the_sublayers_whose_signature_names_it():
    masked, plain, got = Masked(), Mlp(), {}

    def anything(x, **keywords):
        got.update(keywords)
        return x

    stack = ResidualStack([masked, plain, anything], D)
    mask = torch.ones(3)
    stack(torch.randn(3, D), mask=mask, scale=0.5, whatever=1)
    assert masked.got == (mask, 0.5)
    assert got == {"mask": mask, "scale": 0.5, "whatever": 1}


def test_a_keyword_that_no_sublayer_takes_is_an_error():
    stack = ResidualStack([Masked(), Mlp()], D)
    with pytest.raises(TypeError, match="no sublayer takes the keyword argument 'maks', expected 'mask', 'scale'"):
        stack(torch.randn(3, D), maks=None)
    with pytest.raises(TypeError, match="'mask', expected none"):
        stack_of(2)(torch.randn(3, D), mask=None)


@pytest.mark.filterwarnings("ignore")  # of torch.compile about itself
def test_a_keyword_finds_its_way_through_nested_stacks_and_compiled_modules():
    x, mask = torch.randn(3, D), torch.ones(3)
    plain = stack_of(2)
    inner = ResidualStack([Masked(), Mlp()], D)
    assert inner.takes == {"mask", "scale"}
    outer = ResidualStack(
        [plain, inner, Mlp(), torch.compile(Mlp(), backend="eager"), addnorm.SublayerConnection(Masked(), D)], D
    )
    outer(x, mask=mask)
    assert inner.connections[0].sublayer.got[0] is mask
    assert outer.connections[4].sublayer.sublayer.got[0] is mask


def test_a_sublayer_that_is_replaced_gets_its_own_keywords():
    stack, x, mask = stack_of(2), torch.randn(3, D), torch.ones(3)
    stack.connections[0].sublayer = Masked()
    stack(x, mask=mask)
    assert stack.connections[0].sublayer.got[0] is mask
    stack.connections[0].sublayer = Mlp()
    with pytest.raises(TypeError, match="'mask', expected none"):
        stack(x, mask=mask)


def test_sublayers_may_be_functions():
    stack = ResidualStack([torch.tanh, torch.nn.functional.gelu], D, "post_ln", dtype=f64)
    x = torch.randn(3, D, dtype=f64)
    z = nn.functional.layer_norm(x + x.tanh(), (D,))
    torch.testing.assert_close(stack(x), nn.functional.layer_norm(z + nn.functional.gelu(z), (D,)))


# Dropout and stochastic depth


def test_dropout_is_of_what_is_added_and_only_while_training():
    class Ones(nn.Module):
        def forward(self, x):
            return torch.ones_like(x)

    stack = ResidualStack([Ones()], 1000, dropout=0.25, final_norm=False)
    x = torch.zeros(50, 1000)
    y = stack(x)
    assert set(y.unique().tolist()) == {0.0, 1 / 0.75 * 1.0} or y.unique().numel() == 2
    assert abs(float((y == 0).double().mean()) - 0.25) < 5 * (0.25 * 0.75 / 50_000) ** 0.5
    assert torch.equal(stack.eval()(x), torch.ones(50, 1000))


def test_dropout_may_be_changed_afterwards():
    stack, x = stack_of(2, final_norm=False), torch.randn(3, D)
    y = stack(x)
    for here in stack.connections:
        here.dropout = 1.0
    assert torch.equal(stack(x), x)
    assert torch.equal(stack.eval()(x), y)


def test_stochastic_depth_rises_linearly_and_keeps_the_mean():
    class Ones(nn.Module):
        def forward(self, x):
            return torch.ones_like(x)

    stack = ResidualStack([Ones() for _ in range(8)], 2, stochastic_depth=0.4, final_norm=False)
    assert [here.stochastic_depth for here in stack.connections] == pytest.approx(
        [0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4]
    )
    samples = 20_000
    writes = stack.unroll(torch.zeros(samples, 3, 2)).writes
    for write, p in zip(writes, [0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4], strict=True):
        whole = write.flatten(1)
        assert torch.equal(whole, whole[:, :1].expand_as(whole))  # a sample keeps its branch, or loses it, as a whole
        lost = float((whole[:, 0] == 0).double().mean())
        assert abs(lost - p) < 5 * (p * (1 - p) / samples) ** 0.5
        torch.testing.assert_close(whole[whole != 0], torch.full_like(whole[whole != 0], 1 / (1 - p)))
    assert torch.equal(stack.eval()(torch.zeros(3, 2)), torch.full((3, 2), 8.0))


def test_stochastic_depth_of_one_loses_the_last_layer():
    stack = stack_of(2, stochastic_depth=1.0, final_norm=False)
    x = torch.randn(3, D)
    assert torch.equal(stack(x), x)
    assert not torch.equal(stack.eval()(x), x)


# Checkpoints


@each_wiring
def test_checkpoints_change_nothing_but_the_memory(wiring):
    stack = stack_of(6, wiring, dropout=0.1, stochastic_depth=0.2)
    thrifty = copy.deepcopy(stack)
    thrifty.checkpoint = True
    x, dy = torch.randn(2, 3, D, requires_grad=True), torch.randn(2, 3, D)
    results = []
    for one in (stack, thrifty):
        torch.manual_seed(3)
        y = one(x)
        results.append((y, *torch.autograd.grad(y, [x, *one.parameters()], dy)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def saved_tensors(stack, x):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        y = stack(x)
    del y
    return sum(saved)


def test_a_checkpointed_layer_keeps_only_what_enters_it():
    x = torch.randn(64, D)
    assert saved_tensors(stack_of(8, checkpoint=True), x) <= 4 * 2 * x.nbytes  # the stream and the read of four layers
    assert saved_tensors(stack_of(8), x) > 3 * 4 * 2 * x.nbytes


# The sum


@pytest.mark.parametrize(
    "name", ["pre_ln", "sandwich", "reordered", "layer_scale", "layernorm_scaling", "rezero", "no_norm", "parallel"]
)
@pytest.mark.parametrize("training", [True, False])
def test_the_stream_unrolls_into_x_0_and_the_writes(name, training):
    stack = stack_of(6, name, dtype=f64, dropout=0.3, stochastic_depth=0.3).train(training)
    for parameter in stack.parameters():
        nn.init.normal_(parameter, 0.3, 0.3)
    x = torch.randn(4, 3, D, dtype=f64)
    torch.manual_seed(5)
    x_0, writes, x_L, y = stack.unroll(x)
    assert len(writes) == 6
    torch.testing.assert_close(x_L, x_0 + sum(writes), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(y, x_L if stack.norm_final is None else stack.norm_final(x_L))
    torch.manual_seed(5)
    if name != "rezero" or not training:  # (seeds are drawn apart, so a training pass has other masks)
        stack.eval()
        torch.testing.assert_close(stack.unroll(x).y, stack(x))


def test_unroll_carries_gradients():
    stack, x = stack_of(4, dtype=f64), torch.randn(3, D, dtype=f64, requires_grad=True)
    dy = torch.randn(3, D, dtype=f64)
    expected = torch.autograd.grad(stack(x), [x, *stack.parameters()], dy)
    found = torch.autograd.grad(stack.unroll(x).y, [x, *stack.parameters()], dy)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["post_ln", "deepnorm", "mix_ln", "resi_dual", "b2t", "no_residual", "admin"])
def test_a_stream_that_is_no_sum_is_not_unrolled(name):
    with pytest.raises(ValueError, match=f"the stream of {name} is no plain sum of writes"):
        stack_of(8, name).unroll(torch.randn(3, D))


def test_unroll_says_when_the_sum_does_not_close():
    def spoil(x):
        return torch.full_like(x, float("inf"))

    with pytest.raises(RuntimeError, match="not finite"):
        ResidualStack([spoil, spoil], D).unroll(torch.randn(3, D))


@pytest.mark.parametrize("i", [0, 2, 5, -1])
def test_without_leaves_one_write_out(i):
    stack, x = stack_of(6, dtype=f64), torch.randn(3, D, dtype=f64)
    called = []
    for k, connection in enumerate(stack.connections):
        connection.sublayer.register_forward_hook(lambda *_, k=k: called.append(k))
    less = stack.without(i)
    writes = less.unroll(x).writes
    assert called == [k for k in range(6) if k != i % 6]
    assert not writes[i].any()
    before = stack.unroll(x)
    for k in range(i % 6):
        assert torch.equal(writes[k], before.writes[k])
    assert {id(p) for p in less.parameters()} < {id(p) for p in stack.parameters()}
    assert len(stack.unroll(x).writes) == 6
    assert stack.unroll(x).writes[i].any()


@each_wiring
def test_without_works_under_every_wiring(wiring):
    stack, x = stack_of(6, wiring), torch.randn(2, 3, D)
    for parameter in stack.parameters():
        nn.init.normal_(parameter, 0.3, 0.3)
    y = stack.without(3)(x)
    with torch.no_grad():
        assert torch.equal(stack.without(3)(x), y)
    assert not torch.equal(stack(x), y)


def test_a_sandwich_without_a_sublayer_adds_no_bias_of_its_norm():
    stack = stack_of(2, "sandwich", final_norm=False)
    nn.init.normal_(stack.connections[1].norm_branch.bias)
    x = torch.randn(3, D)
    x_0, writes, x_L, _ = stack.without(1).unroll(x)
    assert torch.equal(x_L, x_0 + writes[0])


def test_hooks_of_a_copy_are_its_own():
    stack = stack_of(2)
    less = stack.without(0)
    less.register_forward_hook(lambda module, args, out: out * 0)
    x = torch.randn(3, D)
    assert not less(x).any()
    assert stack(x).any()


def test_the_keywords_of_a_removed_sublayer_are_still_known():
    stack = ResidualStack([Masked(), Mlp()], D)
    stack.without(0)(torch.randn(3, D), mask=None)


# Torch's own tools


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile about itself
@pytest.mark.parametrize(
    "name", ["pre_ln", "post_ln", "layer_scale", "layernorm_scaling", "parallel", "resi_dual", "b2t"]
)
def test_it_compiles_without_a_break(name):
    stack, x = stack_of(4, name, checkpoint=name == "pre_ln"), torch.randn(2, 3, D, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    dy = torch.randn(2, 3, D)
    expected = torch.autograd.grad(stack(x), [x, *stack.parameters()], dy, allow_unused=True)
    found = torch.autograd.grad(compiled(x), [x, *stack.parameters()], dy, allow_unused=True)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), stack(x))


def test_copies_state_dicts_and_functional_calls():
    stack, x = stack_of(6, "rezero"), torch.randn(3, D)
    stack.connections[0].b.data.fill_(0.7)
    assert stack.connections[1].b is stack.connections[0].b  # one for both sublayers of a layer
    other = copy.deepcopy(stack)
    assert other.connections[1].b is other.connections[0].b
    assert torch.equal(other(x), stack(x))
    fresh = stack_of(6, "rezero")
    fresh.load_state_dict(stack.state_dict())
    assert torch.equal(fresh(x), stack(x))
    state = {name: 2 * value for name, value in stack.named_parameters()}
    doubled = torch.func.functional_call(stack, state, (x,))
    fresh.load_state_dict(state, strict=False)  # the second name of a shared parameter is not among them
    assert torch.equal(doubled, fresh(x))


def test_a_shared_factor_stays_one_parameter_through_moves_and_loads():
    def one(stack):
        return all(layer[0].b is here.b for layer in stack.layers() for here in layer)

    stack = stack_of(4, "rezero")
    assert one(stack)
    assert one(copy.deepcopy(stack))
    assert one(stack.double().to("cpu"))
    model = nn.Sequential(stack_of(4, "rezero", device="meta"))  # (the sublayers are not)
    assert one(model.to_empty(device="cpu")[0])
    model[0].reset_parameters()
    assert [float(here.b.detach()) for here in model[0].connections] == [0.0] * 4
    state = {name: value.clone() for name, value in stack.state_dict().items()}
    stack.load_state_dict(state, assign=True)
    assert one(stack)
    assert sum(name.endswith(".b") for name, _ in stack.named_parameters()) == 2


def test_per_sample_gradients_by_torch_func():
    stack, x = stack_of(4, dtype=f64), torch.randn(5, 3, D, dtype=f64)
    parameters = dict(stack.named_parameters())

    def loss(parameters, sample):
        return torch.func.functional_call(stack, parameters, (sample,)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for k in range(5):
        one = torch.autograd.grad(stack(x[k]).square().sum(), list(parameters.values()))
        for name, gradient in zip(parameters, one, strict=True):
            torch.testing.assert_close(found[name][k], gradient)


def test_a_parametrized_norm_is_used_as_it_is():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    stack, x = stack_of(2), torch.randn(3, D)
    y = stack(x)
    nn.utils.parametrize.register_parametrization(stack.norm_final, "weight", Doubled())
    torch.testing.assert_close(stack(x), 2 * y)


def test_a_replaced_norm_or_sublayer_is_used():
    stack, x = stack_of(2), torch.randn(3, D)
    stack.connections[1].norm_in = addnorm.LayerNorm(D, eps=1.0)
    stack.connections[0].sublayer = nn.Identity()
    h = x + nn.functional.layer_norm(x, (D,))
    h = h + stack.connections[1].sublayer(nn.functional.layer_norm(h, (D,), eps=1.0))
    torch.testing.assert_close(stack(x), nn.functional.layer_norm(h, (D,)))


def test_one_pass_leaves_nothing_behind():
    stack, x = stack_of(4), torch.randn(3, D)
    stack(x)
    gc.collect()
    before = [type(o) for o in gc.get_objects()].count(Pass)
    stack(x)
    gc.collect()
    assert [type(o) for o in gc.get_objects()].count(Pass) == before


# What it refuses


def test_a_sublayer_that_returns_no_tensor_or_another_shape_is_refused_with_its_place():
    x = torch.randn(2, 3, D)
    with pytest.raises(
        ValueError, match=r"sublayers\[1\] \(Linear\) returned shape \(2, 3, 7\), expected \(2, 3, 16\), the shape it"
    ):
        ResidualStack([Mlp(), nn.Linear(D, 7)], D)(x)
    for wiring in ("resi_dual", "b2t", "parallel", "mix_ln"):
        with pytest.raises(ValueError, match=r"sublayers\[1\] \(Linear\) returned shape \(2, 3, 7\)"):
            ResidualStack([Mlp(), nn.Linear(D, 7)], D, wiring)(x)
    with pytest.raises(TypeError, match=r"sublayers\[0\] \(LSTM\) returned a tuple of 2, expected one tensor: wrap it"):
        ResidualStack([nn.LSTM(D, D)], D)(x)
    for wiring in ("pre_ln", "sandwich", "post_ln", "no_norm"):
        with torch.no_grad(), pytest.raises(TypeError, match=r"sublayers\[0\] \(nothing\) returned NoneType"):
            ResidualStack([nothing, Mlp()], D, wiring)(x)
        with pytest.raises(ValueError, match=r"sublayers\[0\] \(narrow\) returned shape \(2, 3, 1\)"):
            ResidualStack([narrow], D, wiring)(x)  # and is not broadcast


def nothing(x):
    return None


def narrow(x):
    return x[..., :1]


def test_a_sublayers_own_error_is_its_own():
    def broken(x):
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match=r"^out of luck$"):
        ResidualStack([broken], D)(torch.randn(3, D))


REFUSED = {
    "has the row Row(norm_in=True), expected a = c = 1, N_out and no N_in": lambda: stack_of(
        2, Wiring("odd", Row(norm_in=True), flow="two_streams")
    ),
    "has the row Row(a=2.0), expected a = 1, no N_out, and c = 1 without N_in": lambda: stack_of(
        2, Wiring("odd", Row(a=2.0), flow="parallel")
    ),
    "b is Learned(init=0.5, shared=True), Learned(init=1.5, shared=True) in the rows of one layer": lambda: stack_of(
        2, Wiring("odd", lambda at: Row(b=addnorm.Learned(0.5 + at.sublayer, shared=True)))
    ),
    "b is 1.0, Learned(init=0.5, shared=True) in the rows of one layer": lambda: stack_of(
        2, Wiring("odd", lambda at: Row(b=addnorm.Learned(0.5, shared=True) if at.sublayer else 1.0))
    ),
    "has the row Row(norm_out=True, c=0.5), expected a = c = 1": lambda: stack_of(
        2, Wiring("odd", Row(norm_out=True, c=0.5), flow="bottom_to_top")
    ),
    "has the row Row(c=3.0), expected a = 1, no N_out, and c = 1 without N_in": lambda: stack_of(
        2, Wiring("odd", Row(c=3.0), flow="parallel")
    ),
    "wiring is 'resi_dual', expected one whose sublayers each have a row": lambda: addnorm.SublayerConnection(
        Mlp(), D, "resi_dual"
    ),
    "d is 0, expected a whole number from 1": lambda: ResidualStack([Mlp()], 0),
    "d is 16.5, expected a whole number": lambda: addnorm.SublayerConnection(Mlp(), 16.5, "no_norm"),
    "eps is -1, expected None or a number": lambda: stack_of(2, eps=-1),
    "final_norm is 'no', expected True or False, or None": lambda: stack_of(2, final_norm="no"),
    "checkpoint is 'no', expected True or False": lambda: stack_of(2, checkpoint="no"),
    "stream_dtype is torch.int64, expected None (that of x) or one of torch.float32": lambda: stack_of(
        2, stream_dtype=torch.int64
    ),
    "i is True, expected the number of a sublayer": lambda: stack_of(2).without(True),
    "sublayers is empty": lambda: ResidualStack([], D),
    "sublayer is 3, expected a module": lambda: ResidualStack([3], D),
    "wiring is 'pre-ln', expected 'pre_ln'": lambda: ResidualStack([Mlp()], D, "pre-ln"),
    "wiring is 7, expected a Wiring": lambda: ResidualStack([Mlp()], D, 7),
    "residual_multiplier needs its option 'multiplier'": lambda: ResidualStack([Mlp()], D, "residual_multiplier"),
    "sublayers_per_layer is 4 for 6 sublayers": lambda: stack_of(6, sublayers_per_layer=4),
    "sublayers_per_layer is 0": lambda: stack_of(6, sublayers_per_layer=0),
    "norm is 'batch', expected one of 'layer', 'rms'": lambda: stack_of(2, norm="batch"),
    "bias is True with norm 'rms'": lambda: stack_of(2, norm="rms", bias=True),
    "dropout is 1.5, expected a probability": lambda: stack_of(2, dropout=1.5),
    "stochastic_depth is True, expected a probability": lambda: stack_of(2, stochastic_depth=True),
    "i is 2, expected the number of a sublayer, 0 to 1": lambda: stack_of(2).without(2),
    "x is list, expected a tensor": lambda: stack_of(2)([1.0]),
    "weight has shape (16,)": lambda: stack_of(2)(torch.randn(3, 8)),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_nonsense_is_refused_with_a_sentence(sentence):
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
        REFUSED[sentence]()


# Its place


def test_sublayers_are_two_a_layer_and_the_last_layer_may_be_shorter():
    stack = stack_of(5, wirings.layernorm_scaling())
    assert [here.c for here in stack.connections] == pytest.approx([1, 1, 2**-0.5, 2**-0.5, 3**-0.5])
    assert stack.n_layers == 3
    decoder = stack_of(6, wirings.layernorm_scaling(), sublayers_per_layer=3)
    assert [here.c for here in decoder.connections] == pytest.approx([1, 1, 1, 2**-0.5, 2**-0.5, 2**-0.5])


def test_a_wiring_may_be_a_row_a_name_or_ones_own():
    x = torch.randn(3, D)
    by_name = stack_of(4, "pre_ln", final_norm=False)
    for wiring in (Row(norm_in=True), wirings.pre_ln(), Wiring("mine", lambda at: Row(norm_in=True), final_norm=True)):
        other = stack_of(4, wiring, final_norm=False)
        other.load_state_dict(by_name.state_dict())
        assert torch.equal(other(x), by_name(x))


def test_the_final_norm_is_the_wirings_unless_it_is_told():
    assert stack_of(2, "pre_ln").norm_final is not None
    assert stack_of(2, "post_ln").norm_final is None
    assert stack_of(2, "pre_ln", final_norm=False).norm_final is None
    x = torch.randn(3, D)
    twice = stack_of(2, "post_ln", final_norm=True)
    once = stack_of(2, "post_ln")
    once.load_state_dict(twice.state_dict(), strict=False)
    torch.testing.assert_close(twice(x), nn.functional.layer_norm(once(x), (D,)))


def test_it_prints_the_equation_it_has():
    assert "x' = N(x + f(x)),   y = N(x_L)" in repr(stack_of(2, "post_ln", final_norm=True))
    assert "y = N(x_L)" not in repr(stack_of(2, "pre_ln", final_norm=False))
    assert "x' = x + f(N(x))" in repr(stack_of(2, "pre_ln").connections[0])
