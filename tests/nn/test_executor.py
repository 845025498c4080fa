"""One pass through a stack: whose memory is written, when a norm is called as a module, what a factor is made of."""

import numpy as np
import pytest
import torch
from torch import nn

import addnorm
from addnorm import Learned, ResidualStack, Row, Wiring, wirings
from addnorm.nn import executor

D = 16
bf16 = torch.bfloat16


@pytest.fixture(autouse=True)
def every_stream_is_large(monkeypatch):
    """So that small tensors show which memory is written."""
    monkeypatch.setattr(executor, "SMALL", 0)


WIRINGS = ["pre_ln", "post_ln", "sandwich", "no_norm", "deepnorm", "reordered", "b2t", "resi_dual", "parallel"]
each_wiring = pytest.mark.parametrize("name", WIRINGS)


class Under(nn.Module):
    """A sublayer that computes in a mode of its own."""

    def __init__(self, mode):
        super().__init__()
        self.mode, self.inner = mode, nn.Linear(D, D)

    def forward(self, x):
        with self.mode():
            return self.inner(x)


# Memory


@each_wiring
def test_a_sublayer_that_records_gradients_does_not_make_the_stack_do_so(name):
    stack, x = ResidualStack([Under(torch.enable_grad) for _ in range(4)], D, name), torch.randn(2, 3, D)
    expected = stack(x).detach()
    with torch.no_grad():
        y = stack(x)
    assert not y.requires_grad
    assert torch.equal(y, expected)


@each_wiring
def test_tensors_of_inference_mode_stay_inside(name):
    stack, x = ResidualStack([Under(torch.inference_mode) for _ in range(4)], D, name), torch.randn(2, 3, D)
    with torch.no_grad():
        y = stack(x)
    assert not y.is_inference()
    nn.Linear(D, D)(y).sum().backward()


class Keeps(nn.Module):
    """Keeps something of what it returned, which no tensor shows."""

    def __init__(self, what):
        super().__init__()
        self.inner, self.what, self.kept, self.then = nn.Linear(D, D), what, [], []

    def forward(self, x):
        y = self.inner(x)
        self.kept.append(self.what(y))
        self.then.append(y.clone())
        return y


KEPT = {
    "its storage": lambda y: y.untyped_storage(),
    "its typed storage": lambda y: y.storage().untyped(),
    "an array": lambda y: y.detach().numpy(),
    "a capsule": lambda y: torch.from_dlpack(y.detach()),
    "a slice": lambda y: y[:, :1],
    "a flat view": lambda y: y.view(-1),
    "a memoryview": lambda y: memoryview(y.detach().numpy()),
    "its base": lambda y: y._base,
}


def now(kept):
    if isinstance(kept, torch.UntypedStorage):
        return torch.empty(0).set_(kept)
    return torch.as_tensor(np.asarray(kept)).clone()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("kind", KEPT)
@each_wiring
def test_what_a_sublayer_keeps_of_its_output_is_never_written(name, kind):
    stack = ResidualStack([Keeps(KEPT[kind]) for _ in range(4)], D, name)
    with torch.no_grad():
        stack(torch.randn(2, 3, D))
    for here in stack.connections:
        (kept,), (then,) = here.sublayer.kept, here.sublayer.then
        if kept is not None:  # the base of what is no view
            assert torch.equal(now(kept).flatten(), (then[:, :1] if kind == "a slice" else then).flatten())


def test_a_scripted_sublayer_that_keeps_its_output():
    class Cell(nn.Module):
        cache: torch.Tensor

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(D, D)
            self.cache = torch.zeros(1)

        def forward(self, x):
            y = self.inner(x)
            self.cache = y
            return y

    script = pytest.importorskip("torch.jit").script
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        cell = script(Cell())
    stack, x = ResidualStack([cell], D), torch.randn(3, D)
    with torch.no_grad():
        stack(x)
    torch.testing.assert_close(cell.cache, cell.inner(stack.connections[0].norm_in(x)))


@pytest.mark.parametrize("name", ["sandwich", "reordered"])
def test_a_sublayer_may_return_another_dtype_under_a_stream_of_its_own(name):
    stack = ResidualStack([lambda x: x.float() * 2] * 4, D, name, residual_dtype=torch.float32, dtype=bf16)
    x = torch.randn(2, 3, D, dtype=bf16)
    expected = stack(x)
    with torch.no_grad():
        assert torch.equal(stack(x), expected)


# Norms that are more than their formula


class Tenfold(addnorm.LayerNorm):
    def forward(self, input):
        return 10 * super().forward(input)


def test_a_norm_of_another_class_is_called():
    stack, x = ResidualStack([torch.tanh] * 4, D, "pre_ln"), torch.randn(2, 3, D)
    z = stack.unroll(x).x_L
    for norm in (Tenfold(D), nn.RMSNorm(D), nn.Identity(), nn.LayerNorm(D, eps=1.0)):
        stack.norm_final = norm
        torch.testing.assert_close(stack(x), norm(z))
        with torch.no_grad():
            torch.testing.assert_close(stack(x), norm(z))


@pytest.mark.parametrize("where", ["norm_in", "norm_branch", "norm_out"])
def test_it_may_stand_in_any_place(where):
    row = Row(norm_in=True, norm_branch=True, norm_out=True, a=0.5, b=2.0, c=0.25)
    stack = ResidualStack([nn.Linear(D, D) for _ in range(3)], D, row)
    norm = Tenfold(D)
    setattr(stack.connections[1], where, norm)
    x = torch.randn(2, 3, D)
    h = x
    for here in stack.connections:
        h = here.norm_out(0.5 * h + 2.0 * here.norm_branch(here.sublayer(0.25 * here.norm_in(h))))
    torch.testing.assert_close(stack(x), h)
    with torch.no_grad():
        torch.testing.assert_close(stack(x), h)


@pytest.mark.parametrize("name", ["pre_ln", "post_ln", "sandwich"])
def test_hooks_of_norms_fire(name):
    stack, x = ResidualStack([torch.tanh] * 4, D, name), torch.randn(2, 3, D)
    y, seen = stack(x), []
    norms = [m for m in stack.modules() if isinstance(m, nn.LayerNorm)]
    handles = [norm.register_forward_hook(lambda m, args, out: seen.append(out.clone())) for norm in norms]
    for guard in (torch.enable_grad(), torch.no_grad()):
        seen.clear()
        with guard:
            torch.testing.assert_close(stack(x), y)
        assert len(seen) == len(norms)
    for handle in handles:
        handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(m))
    seen.clear()
    stack(x)
    handle.remove()
    assert {id(norm) for norm in norms} <= {id(m) for m in seen}


def test_a_hook_may_change_what_a_norm_returns():
    stack, x = ResidualStack([torch.tanh] * 2, D, "pre_ln"), torch.randn(2, 3, D)
    stack.norm_final.register_forward_hook(lambda m, args, out: out * 0)
    assert not stack(x).any()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parametrized_norm(name):
    class More(nn.Module):
        def forward(self, value):
            return value + 1

    stack, x = ResidualStack([torch.tanh] * 2, D, "pre_ln"), torch.randn(2, 3, D)
    z = stack.unroll(x).x_L
    nn.utils.parametrize.register_parametrization(stack.norm_final, name, More())
    expected = nn.functional.layer_norm(z, (D,), stack.norm_final.weight, stack.norm_final.bias)
    torch.testing.assert_close(stack(x), expected)


# Factors


def test_a_constant_may_be_changed_afterwards():
    stack, x = (
        ResidualStack([torch.tanh] * 2, D, wirings.residual_multiplier(0.5), final_norm=False),
        torch.randn(2, 3, D),
    )
    for here in stack.connections:
        here.b = 2.0
    h = x
    for _ in range(2):
        h = h + 2 * torch.tanh(nn.functional.layer_norm(h, (D,)))
    torch.testing.assert_close(stack(x), h)


def test_c_is_multiplied_with_the_weight_in_float32():
    wiring = Wiring("third", Row(norm_in=True, c=1 / 3))
    seen = []

    def keep(x):
        seen.append(x.detach())
        return torch.zeros_like(x)

    stack = ResidualStack([keep], D, wiring, dtype=bf16)
    norm = stack.connections[0].norm_in
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(64, D, dtype=bf16)
    stack(x)
    norm = norm.requires_grad_(False)
    exact = nn.functional.layer_norm(x.double(), (D,), norm.weight.double(), norm.bias.double()) / 3
    assert float(((seen[0].double() - exact).abs() / exact.abs().clamp(min=0.01)).max()) < 1.01 * 2**-8  # one rounding


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("c", [0.5, Learned(0.5), Learned(0.5, per_feature=True)])
def test_what_is_read_has_the_dtype_of_x_whatever_c_has(c, affine):
    seen = []

    def keep(x):
        seen.append(x)
        return x * 0.5

    for row in (Row(norm_in=True, c=c), Row(c=c)):
        stack = ResidualStack([keep] * 3, D, row, elementwise_affine=affine)  # factors in float32
        x = torch.randn(2, 3, D, dtype=bf16)
        y = stack(x)
        with torch.no_grad():
            assert torch.equal(stack(x), y)
    assert {t.dtype for t in seen} == {bf16}


def test_stochastic_depth_divides_in_float64_where_the_stream_is():
    stack = ResidualStack([torch.ones_like], 2, Row(), stochastic_depth=0.3, sublayers_per_layer=1)
    y = stack(torch.zeros(100, 1, 2, dtype=torch.float64))
    assert set(y.unique().tolist()) == {0.0, 1 / 0.7}


def test_the_two_streams_of_resi_dual_get_the_same_dropout():
    stack = ResidualStack([torch.ones_like], 1000, "resi_dual", dropout=0.5)
    x = torch.zeros(1, 1000)
    y = stack(x)  # N(w) + N(w), of one write
    assert y.unique().numel() == 2


def test_each_call_and_each_sublayer_draw_a_mask_of_their_own():
    stack = ResidualStack([torch.ones_like] * 2, 1000, Row(), dropout=0.5)
    x = torch.zeros(1, 1000)
    first, second = stack.unroll(x).writes
    assert not torch.equal(first, second)
    assert not torch.equal(stack(x), stack(x))
    again = stack.unroll(x).writes
    assert not torch.equal(first, again[0])


# What a write is


def test_writes_of_a_bfloat16_stream_are_kept_in_float32():
    def third(x):
        return torch.full_like(x, 1.0)

    stack = ResidualStack([third], D, Wiring("third", Row(b=1 / 3)), dtype=bf16)
    (write,) = stack.unroll(torch.zeros(1, D, dtype=bf16)).writes
    assert torch.equal(write, torch.full((1, D), 1 / 3))


def test_unroll_compares_the_sum_with_the_stream():
    shift = torch.zeros(())

    def creeping(x):  # changes the stream behind the sum's back: it reads x itself
        x += shift
        return torch.zeros_like(x)

    stack, x = ResidualStack([creeping] * 2, D, "no_norm"), torch.randn(2, 3, D)
    stack.unroll(x.clone())
    shift += 1e-3
    with pytest.raises(RuntimeError, match="differs from x_0"):
        stack.unroll(x.clone())


def test_unroll_under_checkpoints_and_autocast():
    stack, x = ResidualStack([nn.Linear(D, D) for _ in range(4)], D, checkpoint=True), torch.randn(2, 3, D)
    assert len(stack.unroll(x).writes) == 4
    with torch.autocast("cpu", bf16):
        assert len(stack.unroll(x).writes) == 4


# Norms of another shape, patched, without parameters of their own


def test_a_norm_over_other_dimensions_is_called_as_a_module():
    x = torch.randn(4, 3, D)
    stack = ResidualStack([torch.tanh] * 2, D, "pre_ln")
    norm = nn.LayerNorm((3, D), elementwise_affine=False)
    stack.connections[0].norm_in = norm
    h = x + torch.tanh(norm(x))
    h = h + torch.tanh(nn.functional.layer_norm(h, (D,)))
    torch.testing.assert_close(stack(x), nn.functional.layer_norm(h, (D,)))
    stack.connections[0].norm_in = nn.LayerNorm(D // 2, elementwise_affine=False)
    with pytest.raises(RuntimeError, match="normalized_shape"):  # torch's own refusal
        stack(x)


def test_a_patched_forward_is_called():
    stack, x = ResidualStack([torch.tanh] * 2, D, "pre_ln"), torch.randn(2, 3, D)
    stack.norm_final.forward = lambda z: z * 0
    assert not stack(x).any()


def test_a_norm_whose_weight_is_no_parameter():
    stack, x = ResidualStack([torch.tanh] * 2, D, "pre_ln"), torch.randn(2, 3, D)
    expected = 2 * stack(x)
    weight = 2 * stack.norm_final.weight.detach()
    del stack.norm_final.weight
    stack.norm_final.weight = weight
    torch.testing.assert_close(stack(x), expected)


def test_a_tensor_that_another_process_has_is_never_written():
    shared = []

    class Sends(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.share_memory_()
            shared.append((y.untyped_storage().data_ptr(), y.clone()))
            return y

    stack = ResidualStack([Sends(D, D), torch.tanh], D, "post_ln")
    with torch.no_grad():
        read = []
        stack.connections[1].sublayer = lambda x: read.append(x.data_ptr()) or torch.tanh(x)
        stack(torch.randn(2, 3, D))
    assert shared[0][0] not in read  # N_out went elsewhere
