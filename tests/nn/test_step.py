"""Tests of the steps of a stack's call: gradient modes, norms called as modules, factors, writes, dtypes, dropout, saved memory."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from addnorm import Learned, ResidualStack, Row, Wiring, wirings
from support.memory import record_saved
from support.stacks import D, stack_of

bf16 = torch.bfloat16


class Under(nn.Module):
    """Sublayer that runs in its own gradient mode."""

    def __init__(self, mode):
        super().__init__()
        self.mode, self.inner = mode, nn.Linear(D, D)

    def forward(self, x):
        with self.mode():
            return self.inner(x)


# Gradient modes


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["pre_ln", "post_ln", "resi_dual"])
def test_gradient_mode_of_sublayers_stays_inside(name, mode, x):
    stack = ResidualStack([Under(mode) for _ in range(4)], D, name)
    expected = stack(x).detach()
    with torch.no_grad():
        y = stack(x)
    assert not y.requires_grad
    assert not y.is_inference()
    assert torch.equal(y, expected)
    nn.Linear(D, D)(y).sum().backward()


@pytest.mark.parametrize("name", ["sandwich", "reordered"])
def test_sublayer_may_return_another_dtype_than_the_stream(name):
    stack = ResidualStack([lambda x: x.float() * 2] * 4, D, name, residual_dtype=torch.float32, dtype=bf16)
    x = torch.randn(2, 3, D, dtype=bf16)
    expected = stack(x)
    with torch.no_grad():
        assert torch.equal(stack(x), expected)


# Factors


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
def test_read_has_dtype_of_x_for_any_c(c, affine):
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


def test_each_call_and_sublayer_draws_its_own_mask():
    stack = ResidualStack([torch.ones_like] * 2, 1000, Row(), dropout=0.5)
    x = torch.zeros(1, 1000)
    first, second = stack.unroll(x).writes
    assert not torch.equal(first, second)
    assert not torch.equal(stack(x), stack(x))
    again = stack.unroll(x).writes
    assert not torch.equal(first, again[0])


# Writes


def test_writes_of_bfloat16_stream_are_float32():
    stack = ResidualStack([torch.ones_like], D, Wiring("third", Row(b=1 / 3)), dtype=bf16)
    (write,) = stack.unroll(torch.zeros(1, D, dtype=bf16)).writes
    assert torch.equal(write, torch.full((1, D), 1 / 3))


@pytest.mark.parametrize(("dtype", "wide"), [(bf16, torch.float32), (torch.float64, torch.float64)])
@pytest.mark.parametrize("option", ["dropout", "stochastic_depth"])
@pytest.mark.parametrize("wiring", [Row(), "reversible", wirings.hyper_connections(2, dynamic=False)], ids=str)
def test_kept_writes_are_divided_in_the_dtype_of_the_stream(wiring, option, dtype, wide):
    options = {option: 0.3, "final_norm": False, "sublayers_per_layer": 1}
    stack = ResidualStack([torch.ones_like], D, wiring, residual_dtype=wide, dtype=dtype, **options)
    x = torch.zeros(50, D, dtype=dtype)
    for t in (stack.unroll(x).x_L, *stack.unroll(x).writes, stack._trace(x, {})[1].x):
        values = torch.stack(t).unique() if isinstance(t, tuple) else t.unique()
        assert values.tolist() == [0.0, float(1.0 / (1.0 - torch.tensor(0.3, dtype=wide)))]


def test_norm_over_other_dimensions_is_called():
    x = torch.randn(4, 3, D)
    stack = ResidualStack([torch.tanh] * 2, D, "pre_ln")
    norm = nn.LayerNorm((3, D), elementwise_affine=False)
    stack.connections[0].norm_in = norm
    h = x + torch.tanh(norm(x))
    h = h + torch.tanh(nn.functional.layer_norm(h, (D,)))
    assert_close(stack(x), nn.functional.layer_norm(h, (D,)))
    stack.connections[0].norm_in = nn.LayerNorm(D // 2, elementwise_affine=False)
    with pytest.raises(RuntimeError, match="normalized_shape"):  # torch's own error
        stack(x)


def test_backward_saves_the_stream_and_8_bytes_a_token():
    rows = 64
    stack = ResidualStack([lambda x: x.detach() * 0.5] * 5, D, "pre_ln")  # of sublayers that save nothing
    x = torch.randn(rows, D, requires_grad=True)

    _, saved = record_saved(lambda: stack(x))
    kept = {t.data_ptr(): t.nbytes for t in saved}
    for p in stack.parameters():
        kept.pop(p.data_ptr(), None)
    assert sum(kept.values()) == 6 * (4 * rows * D + 8 * rows)  # x_0 to x_5, and their statistics


# Dropout and stochastic depth


@pytest.mark.parametrize("option", ["dropout", "stochastic_depth"])
def test_dropout_may_be_changed_later(option, x):
    stack = stack_of(2, final_norm=False)
    y = stack(x)
    for here in stack.connections:
        setattr(here, option, 1.0)
    assert torch.equal(stack(x), x)
    assert torch.equal(stack.eval()(x), y)


def test_stochastic_depth_rises_linearly_and_keeps_the_mean():
    stack = ResidualStack([torch.ones_like] * 8, 2, stochastic_depth=0.4, final_norm=False)
    rates = [0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4]
    assert [here.stochastic_depth for here in stack.connections] == pytest.approx(rates)
    samples = 20_000
    writes = stack.unroll(torch.zeros(samples, 3, 2)).writes
    for write, p in zip(writes, rates, strict=True):
        whole = write.flatten(1)
        assert torch.equal(whole, whole[:, :1].expand_as(whole))  # a sample keeps or loses its whole branch
        lost = float((whole[:, 0] == 0).double().mean())
        assert abs(lost - p) < 5 * (p * (1 - p) / samples) ** 0.5
        assert_close(whole[whole != 0], torch.full_like(whole[whole != 0], 1 / (1 - p)))
    assert torch.equal(stack.eval()(torch.zeros(3, 2)), torch.full((3, 2), 8.0))


# Checkpoints


def test_checkpointed_layer_saves_only_its_input():
    x, saved = torch.randn(64, D), {}
    for checkpoint in (True, False):
        stack = stack_of(8, checkpoint=checkpoint)
        saved[checkpoint] = sum(t.nbytes for t in record_saved(lambda stack=stack: stack(x))[1])
    assert saved[True] <= 4 * 2 * x.nbytes  # the stream and the read of four layers
    assert saved[False] > 3 * 4 * 2 * x.nbytes
