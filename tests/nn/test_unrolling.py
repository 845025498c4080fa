"""Tests of `unroll` and `direct_path`: the sum, frozen coefficients and norms, rounding, memory."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from addnorm import ResidualStack, Row, Wiring, wirings
from support.stacks import stack_of
from support.stream_stacks import EVERY, D, every, make, perturb, tokens
from support.transformer_inputs import compute_gradients

f64, bf16 = torch.float64, torch.bfloat16
SCALED = {"scaled": Wiring("scaled", Row(norm_in=True, a=0.5))}
WITHOUT_NORMS_OF_STREAMS = (
    "hyper_connections", "mhc", "single_pass_mhc", "independent_hc", "gated_residual", "attention_residuals",
    "attention_residuals_by_block", "denseformer", "muddformer", "x0_residual", "residual_scaling", "reversible", "scaled",
)  # fmt: skip
linear = pytest.mark.parametrize("name", WITHOUT_NORMS_OF_STREAMS)


@every
@torch.no_grad()
def test_unroll_returns_terms_whose_sum_is_the_stream(name):
    """The terms are carried through later mixes and norms; learned coefficients are away from their initial values."""
    stack, x = make(name, f64, dropout=0.3, stochastic_depth=0.3), tokens(dtype=f64)
    torch.manual_seed(5)
    x_0, writes, x_L, y = stack.unroll(x)
    assert len(writes) == 6
    assert float((x_L - x_0 - sum(writes)).norm() / x_L.norm()) < 1e-14
    torch.manual_seed(5)
    assert_close(y, stack(x))


def test_unroll_carries_gradients():
    stack, x = make("pre_ln", f64), tokens(dtype=f64)
    calls = stack, lambda x: stack.unroll(x).y
    assert_close(*(compute_gradients(call, stack.parameters(), [x]) for call in calls))


def test_unroll_carries_writes_through_later_norms():
    """Post-LN by hand: with its statistics frozen a norm is linear, and its bias counts with the write before it."""
    stack, x = stack_of(2, "post_ln", D, dtype=f64), tokens(dtype=f64)
    perturb(stack)
    first, second = stack.connections
    z = x + first.sublayer(x)
    h = first.norm_out(z)
    s = h + second.sublayer(h)

    def carried(t, total, norm):
        return (
            (t - t.mean(-1, keepdim=True)) / (total.var(-1, keepdim=True, correction=0) + norm.eps).sqrt() * norm.weight
        )

    x_0, (w_1, w_2), _, _ = stack.unroll(x)
    assert_close(x_0, carried(carried(x, z, first.norm_out), s, second.norm_out))
    own = carried(first.sublayer(x), z, first.norm_out) + first.norm_out.bias
    assert_close(w_1, carried(own, s, second.norm_out))
    assert_close(w_2, carried(second.sublayer(h), s, second.norm_out) + second.norm_out.bias)


def test_unroll_checks_the_sum_against_the_stream():
    shift = torch.zeros(())

    def creeping(x):  # changes the stream in place: it reads x itself
        x += shift
        return torch.zeros_like(x)

    stack, x = ResidualStack([creeping] * 2, D, "no_norm"), tokens()
    stack.unroll(x.clone())
    shift += 1e-3
    with pytest.raises(RuntimeError, match="differs from x_0"):
        stack.unroll(x.clone())


def test_unroll_uses_the_eps_of_the_arithmetic():
    stack = ResidualStack([lambda x: x * 0.5] * 3, D, "post_ln", norm="rms", dtype=bf16)
    stack.unroll(tokens(dtype=bf16) * 0.01)  # whose mean square is far below bfloat16's epsilon


def test_unroll_works_with_checkpoints_and_autocast():
    stack, x = make("pre_ln", number=4, checkpoint=True), tokens()
    assert len(stack.unroll(x).writes) == 4
    with torch.autocast("cpu", bf16):
        assert len(stack.unroll(x).writes) == 4


# Frozen coefficients, against stacks whose coefficients and writes are replaced by recorded ones


class Constant(nn.Module):
    """A module with a constant output."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, *inputs):
        return self.output


def make_frozen(name):
    """Return a float64 stack's input, the outputs of its sublayers, its expansion, and a run with frozen coefficients.

    `run(x, outputs)` returns the stack's output and its streams with other outputs of the sublayers.
    """
    stack = ResidualStack([nn.Linear(D, D) for _ in range(6)], D, (EVERY | SCALED)[name], final_norm=False).double()
    perturb(stack)
    with torch.no_grad():
        for key, parameter in stack.named_parameters():
            if key.endswith(("residual_bias", "branch_bias")):  # they count with the write of their sublayer
                parameter.zero_()
    stack.norm_embedding = None
    x, seen, outputs = torch.randn(3, 2, D, dtype=f64), {}, {}
    for i, connection in enumerate(stack.connections):
        connection.sublayer.register_forward_hook(lambda module, args, output, i=i: outputs.setdefault(i, output))
    for module in stack.modules():
        if hasattr(module, "computes"):
            module.register_forward_hook(lambda module, args, output: seen.setdefault(module, output))
    terms = stack.unroll(x)
    path = stack.direct_path(x)
    owners = [owner for owner in (*stack.connections, stack.head) if getattr(owner, "coefficients", None) is not None]

    def run(x, outputs):
        for connection, output in zip(stack.connections, outputs, strict=True):
            connection.sublayer = Constant(output)
        for owner in owners:
            owner.coefficients = Constant(seen.get(owner.coefficients, getattr(owner.coefficients, "output", None)))
        return stack(x), stack.unroll(x).x_L

    return x, outputs, terms, path, run


@linear
@torch.no_grad()
def test_each_write_contributes_and_reaches_the_last_read_alone(name):
    x, outputs, terms, path, run = make_frozen(name)
    none, one = torch.zeros_like(x), torch.ones_like(x)
    rest, last = run(none, [none] * 6)
    changes = [run(one, [none] * 6)[0] - rest]
    changes += [run(none, [one if i == j else none for i in range(6)])[0] - rest for j in range(6)]
    expected = torch.stack([change.mean() for change in changes])
    assert_close(path.double(), expected, rtol=1e-5, atol=1e-6)
    assert expected.unique().numel() > 3 or name == "reversible", "equal factors would hide a wrong order"
    assert_close(run(x, [none] * 6)[1] - last, terms.x_0, rtol=1e-10, atol=1e-10)
    for j in (0, 3, 5):
        alone = run(none, [outputs[j] if i == j else none for i in range(6)])[1] - last
        assert_close(alone, terms.writes[j], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["pre_ln", "gated_mix", "x0_residual", "attention_residuals", "mhc"])
def test_terms_share_no_memory_with_the_input(name):
    """A caller may change the terms in place, and the input afterwards."""
    stack, x = make(name, number=2), tokens()
    terms = stack.unroll(x)
    starts = {t.untyped_storage().data_ptr() for t in (x, terms.x_0, *terms.writes)}
    assert len(starts) == 4


@pytest.mark.parametrize("method", ["unroll", "direct_path"])
def test_expansion_skips_streams_that_a_write_does_not_reach(method):
    """Of n writes each in its own stream, n^2 operators are needed: four times as many for twice as many sublayers, not eight."""
    counts = []
    for n in (16, 32):
        stack = ResidualStack([nn.Linear(D, D) for _ in range(n)], D, wirings.attention_residuals())
        with torch.profiler.profile() as profile:
            getattr(stack, method)(tokens(3))
        counts.append(len(profile.events()))
    assert counts[1] < 4.5 * counts[0]
