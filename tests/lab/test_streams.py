"""Tests of the measurements of several streams: against numbers taken by hand, and the counted cost."""

import copy

import pytest
import torch

import addnorm
from addnorm import ResidualStack, wirings
from addnorm.lab.cost import count_cost
from addnorm.lab.streams import StreamsRecorder, amax_gains
from addnorm.lab.theory import STREAM_WIRINGS, measure_streams_init
from support.instrumented_model import REFERENCE
from support.stacks import D, Mlp, f64, stack_of
from support.stream_stacks import perturb

rms = REFERENCE["rms"]


@pytest.mark.parametrize("wiring", wirings.list_all(), ids=lambda wiring: wiring.name)
def test_recorder_leaves_output_and_gradients_as_they_are(wiring):
    stack, x = stack_of(4, wiring, dtype=f64), torch.randn(2, 5, D, dtype=f64)
    perturb(stack)
    expected = copy.deepcopy(stack)
    expected(x).square().mean().backward()
    with StreamsRecorder(stack) as recorder:
        stack(x).square().mean().backward()
    for (name, own), other in zip(stack.named_parameters(), expected.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(own.grad, other.grad, msg=name)
    assert len(recorder.states) == 5
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in stack.modules())


def compute_streams(stack, streams):
    """Return the streams before each sublayer and at the end, the reads and the writes, by hand."""
    states, reads, writes = [streams], [], []
    for connection in stack.connections:
        c, a, b, _ = connection.coefficients(states[-1])
        reads.append((c.unsqueeze(-1) * states[-1]).sum(-2))
        writes.append(connection.sublayer(connection.norm_in(reads[-1])))
        states.append(a @ states[-1] + b.unsqueeze(-1) * writes[-1].unsqueeze(-2))
    return states, reads, writes


def test_recorded_numbers_are_those_of_the_equation():
    """States, reads, writes and gradients of every stream of mHC, and the means of its coefficients over the tokens."""
    stack, x = stack_of(2, "mhc", dtype=f64).double(), torch.randn(2, 5, D, dtype=f64)
    perturb(stack)
    states, reads, writes = compute_streams(stack, x.unsqueeze(-2).expand(2, 5, 4, D).clone().requires_grad_())
    c = stack.head.coefficients(states[-1]).collapse
    reads.append((c.unsqueeze(-1) * states[-1]).sum(-2))
    loss = stack.norm_final(reads[-1]).square().mean()
    gradients = torch.autograd.grad(loss, states)
    with StreamsRecorder(stack) as recorder:
        stack(x.requires_grad_()).square().mean().backward()
    measured = recorder.statistics()
    for k, (state, gradient) in enumerate(zip(states, gradients, strict=True)):
        for j in range(4):
            assert measured["streams"][k][j] == pytest.approx(rms(state[..., j, :]))
            assert measured["gradients"][k][j] == pytest.approx(float(gradient[..., j, :].norm()))
    assert measured["reads"] == pytest.approx([rms(read) for read in reads])
    ratios = [rms(write) / rms(state) for write, state in zip(writes, states, strict=False)]
    assert measured["ratio"] == [None, *map(pytest.approx, ratios)]
    first, (c, a, b, _) = recorder.coefficients()["sites"][0], stack.connections[0].coefficients(states[0])
    assert first["mix"] == [pytest.approx(row) for row in a.mean((0, 1)).tolist()]
    assert first["inject"] == pytest.approx(b.mean((0, 1)).tolist())
    assert first["collapse"] == [pytest.approx(c.mean((0, 1)).tolist())]


def test_gains_of_products_are_in_their_order():
    """Forward from the first site, backward from the last; by hand, for matrices that do not commute."""
    first, last = torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [-4.0, 1.0]])
    product = last @ first
    gains = amax_gains([first, last])
    assert gains["site"] == [3.0, 3.0]
    assert gains["forward"] == [3.0, float(product.sum(1).abs().max())]
    assert gains["backward"] == [float(product.sum(0).abs().max()), 3.0]
    assert amax_gains([first, None]) is None


# The largest difference of the weights of a read from their mean and from the newest source alone, before training.
WEIGHTS = {
    "attention_residuals": (pytest.approx(0, abs=1e-6), pytest.approx(8 / 9)),
    "denseformer": (pytest.approx(4), 0),
    "muddformer": (pytest.approx(4), 0),
}


@pytest.mark.parametrize("name", STREAM_WIRINGS)
def test_untrained_stacks_are_compared_with_pre_ln(name):
    row = measure_streams_init(wirings.get(name), 4, 1)
    assert row["difference"] < 1e-3
    assert row["pre_read"][0] == 1.0
    assert (row["from_mean"], row["from_newest"]) == WEIGHTS.get(name, (None, None))
    assert (row["gain"] is None) == (name in WEIGHTS)


def test_largest_difference_of_weights_is_found(monkeypatch):
    """Planted weights: one read of four sources and one entry of the head's nine, each the largest by one measure."""
    measure = StreamsRecorder.coefficients

    def unequal(self):
        found = measure(self)
        found["sites"][3]["collapse"][0] = [0.4, 0.3, 0.2, 0.1]
        found["head"][0] = 0.05
        return found

    monkeypatch.setattr(StreamsRecorder, "coefficients", unequal)
    row = measure_streams_init(wirings.attention_residuals(), 4, 1)
    assert row["from_mean"] == pytest.approx(0.6)
    assert row["from_newest"] == pytest.approx(0.9)


def test_cost_of_mhc_is_that_of_the_paper():
    """n d (n^2 + 2n) + n^2 + 2n + 3 parameters a sublayer and (2n + 2) d elements, at n = 4."""
    stack = ResidualStack([Mlp() for _ in range(6)], D, wirings.mhc(head="mean"), norm="rms")
    cost = count_cost(stack)
    assert cost.parameters == 6 * (4 * D * 24 + 24 + 3) + 7 * D  # and the norms
    assert cost.elements == 6 * 10 * D + 5 * D  # and the head's read


@pytest.mark.parametrize(
    ("wiring", "elements"),
    [("pre_ln", 4), ("post_ln", 3), (wirings.x0_residual(backout=0.0), 4.5), (addnorm.Row(a=0.0, norm_out=True), 3)],
)
def test_elements_of_simple_wirings(wiring, elements):
    """x0_residual reads the embedding in the first sublayer of a layer too."""
    stack = ResidualStack([Mlp() for _ in range(4)], D, wiring)
    head = 3 * D if stack.has_streams else 0
    assert count_cost(stack).elements == 4 * elements * D + head
