"""ResidualStack: the same bits with gradients and without, and which memory is written."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from addnorm import ResidualStack
from addnorm.nn import executor
from support.stacks import D, each_wiring, stack_of


@pytest.fixture(autouse=True)
def every_stream_is_large(monkeypatch):
    """So that small tensors show which memory is written."""
    monkeypatch.setattr(executor, "SMALL", 0)


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
    stack = stack_of(6, wiring, residual_dtype=torch.float32, dtype=torch.bfloat16)
    x, streams = torch.randn(2, 3, D, dtype=torch.bfloat16), []
    with torch.no_grad():
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
    wide = ResidualStack([Tiny() for _ in range(64)], D, residual_dtype=torch.float32, **kwargs).unroll(x).x_L
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
