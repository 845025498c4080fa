"""Tests of ResidualStack: dropout, stochastic depth, checkpoints, second derivatives."""

import pytest
import torch
from torch import nn

from addnorm import ResidualStack
from support.pairwise import rotate
from support.second_order import assert_second_order
from support.stacks import ALL, D, each_wiring, stack_of
from support.stream_stacks import WIRINGS, branches
from support.stream_stacks import D as SMALL
from support.stream_stacks import perturb as perturb_all

# Dropout and stochastic depth


def test_dropout_applies_to_writes_in_training():
    class Ones(nn.Module):
        def forward(self, x):
            return torch.ones_like(x)

    stack = ResidualStack([Ones()], 1000, dropout=0.25, final_norm=False)
    x = torch.zeros(50, 1000)
    y = stack(x)
    assert set(y.unique().tolist()) == {0.0, 1 / 0.75 * 1.0} or y.unique().numel() == 2
    assert abs(float((y == 0).double().mean()) - 0.25) < 5 * (0.25 * 0.75 / 50_000) ** 0.5
    assert torch.equal(stack.eval()(x), torch.ones(50, 1000))


def test_dropout_may_be_changed_later():
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
        assert torch.equal(whole, whole[:, :1].expand_as(whole))  # a sample keeps or loses its whole branch
        lost = float((whole[:, 0] == 0).double().mean())
        assert abs(lost - p) < 5 * (p * (1 - p) / samples) ** 0.5
        torch.testing.assert_close(whole[whole != 0], torch.full_like(whole[whole != 0], 1 / (1 - p)))
    assert torch.equal(stack.eval()(torch.zeros(3, 2)), torch.full((3, 2), 8.0))


def test_stochastic_depth_of_one_drops_the_last_layer():
    stack = stack_of(2, stochastic_depth=1.0, final_norm=False)
    x = torch.randn(3, D)
    assert torch.equal(stack(x), x)
    assert not torch.equal(stack.eval()(x), x)


# Checkpoints


@pytest.mark.parametrize("checkpoint", [True, 2])
@each_wiring
def test_checkpoints_change_only_memory(wiring, checkpoint):
    stack = stack_of(6, wiring, dropout=0.1, stochastic_depth=0.2)
    x, dy, results = torch.randn(2, 3, D, requires_grad=True), torch.randn(2, 3, D), []
    for stack.checkpoint in (False, checkpoint):
        torch.manual_seed(3)
        y = stack(x)
        results.append((y, *torch.autograd.grad(y, [x, *stack.parameters()], dy)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def saved_tensors(stack, x):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        y = stack(x)
    del y
    return sum(saved)


def test_checkpointed_layer_saves_only_its_input():
    x = torch.randn(64, D)
    assert saved_tensors(stack_of(8, checkpoint=True), x) <= 4 * 2 * x.nbytes  # the stream and the read of four layers
    assert saved_tensors(stack_of(8), x) > 3 * 4 * 2 * x.nbytes


# Second derivatives

OPTIONS = (
    {"norm": "rms", "dropout": 0.3},
    {"checkpoint": True},
    {"stochastic_depth": 0.5, "checkpoint": 2},
    {"frozen": "parameters"},
    {"residual_dtype": torch.float32},
    {"frozen": "input", "norm": "rms", "eps": 0.1},
    {"dropout": 0.2, "elementwise_affine": False},
)
ANY = {wiring.name: wiring for wiring in ALL} | WIRINGS


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(("name", "options"), rotate([*ANY], OPTIONS, 1))
def test_second_derivatives_of_every_wiring(name, options):
    frozen = options.get("frozen")
    options = {key: value for key, value in options.items() if key != "frozen"}
    stack = ResidualStack(branches(name, 4), SMALL, ANY[name], **options)
    perturb_all(stack)
    stack.double().requires_grad_(frozen != "parameters")
    x = torch.randn(2, 2, SMALL, dtype=torch.float64, requires_grad=frozen != "input")

    def loss(x=x):
        torch.manual_seed(5)
        return (stack(x).sin() * torch.linspace(-1, 1, SMALL, dtype=torch.float64)).sum()

    tolerance = 1e-5 if "residual_dtype" in options else 1e-10  # the arithmetic of a float32 stream is in float32
    assert_second_order(loss, [t for t in (x, *stack.parameters()) if t.requires_grad], tolerance)
    if frozen != "input" and "checkpoint" not in options:
        v = torch.randn_like(x)
        (grad,) = torch.autograd.grad(loss(), x, create_graph=True)
        (product,) = torch.autograd.grad((grad * v).sum(), x)
        expected = torch.func.jvp(torch.func.grad(loss), (x.detach(),), (v,))[1]  # of the formula
        assert (product - expected).norm() <= 10 * tolerance * expected.norm()
