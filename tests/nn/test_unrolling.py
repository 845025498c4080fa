"""The frozen expansion of several streams, against stacks whose coefficients and writes are replaced by recorded ones."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from addnorm import ResidualStack, wirings

D = 4
WIRINGS = {
    "hyper_connections": wirings.hyper_connections(3),
    "mhc": wirings.mhc(3, iterations=3),
    "single_pass_mhc": wirings.mhc(3, single_pass=True, iterations=3),
    "independent_hc": wirings.independent_hc(3),
    "gated_residual": wirings.gated_residual(3, rank=2),
    "attention_residuals": wirings.attention_residuals(),
    "attention_residuals_by_block": wirings.attention_residuals(1, normed_values=True),
    "denseformer": wirings.denseformer(),
    "muddformer": wirings.muddformer(),
    "x0_residual": wirings.x0_residual(),
    "residual_scaling": wirings.residual_scaling(),
    "reversible": wirings.reversible(),
}


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


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
    stack = ResidualStack([nn.Linear(D, D) for _ in range(6)], D, WIRINGS[name], final_norm=False).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
        for key, parameter in stack.named_parameters():
            if key.endswith(("residual_bias", "branch_bias")):  # they count with the write of their sublayer
                parameter.zero_()
    stack.norm_embedding = None
    x, seen, outputs = torch.randn(3, 2, D, dtype=torch.float64), {}, {}
    for i, connection in enumerate(stack.connections):
        connection.sublayer.register_forward_hook(lambda module, args, output, i=i: outputs.setdefault(i, output))
    for module in stack.modules():
        if hasattr(module, "computes"):
            module.register_forward_hook(lambda module, args, output: seen.setdefault(module, output))
    terms = stack.unroll(x)
    path = stack.direct_path(x)
    owners = [*stack.connections, *([] if stack.head is None else [stack.head])]

    def run(x, outputs):
        for connection, output in zip(stack.connections, outputs, strict=True):
            connection.sublayer = Constant(output)
        for owner in owners:
            if owner.coefficients is not None:
                owner.coefficients = Constant(seen.get(owner.coefficients, getattr(owner.coefficients, "output", None)))
        return stack(x), stack.unroll(x).x_L

    return x, outputs, terms, path, run


@pytest.mark.parametrize("name", WIRINGS)
@torch.no_grad()
def test_direct_path_is_the_change_of_the_last_read(name):
    x, _, _, path, run = make_frozen(name)
    none, one = torch.zeros_like(x), torch.ones_like(x)
    rest, _ = run(none, [none] * 6)
    changes = [run(one, [none] * 6)[0] - rest]
    changes += [run(none, [one if i == j else none for i in range(6)])[0] - rest for j in range(6)]
    expected = torch.stack([change.mean() for change in changes])
    torch.testing.assert_close(path.double(), expected, rtol=1e-5, atol=1e-6)
    assert expected.unique().numel() > 3 or name == "reversible", "equal factors would hide a wrong order"


@pytest.mark.parametrize("name", WIRINGS)
@torch.no_grad()
def test_unroll_returns_what_each_write_contributes(name):
    x, outputs, terms, _, run = make_frozen(name)
    torch.testing.assert_close(terms.x_0 + sum(terms.writes), terms.x_L, rtol=1e-12, atol=1e-12)
    none = torch.zeros_like(x)
    _, rest = run(none, [none] * 6)
    torch.testing.assert_close(run(x, [none] * 6)[1] - rest, terms.x_0, rtol=1e-10, atol=1e-10)
    for j in (0, 3, 5):
        alone = run(none, [outputs[j] if i == j else none for i in range(6)])[1] - rest
        torch.testing.assert_close(alone, terms.writes[j], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["pre_ln", "gated_mix", "x0_residual", "attention_residuals", "mhc"])
def test_terms_share_no_memory_with_the_input(name):
    """A caller may change the terms in place, and the input afterwards."""
    stack, x = ResidualStack([nn.Linear(D, D) for _ in range(2)], D, name), torch.randn(3, D)
    terms = stack.unroll(x)
    starts = {t.untyped_storage().data_ptr() for t in (x, terms.x_0, *terms.writes)}
    assert len(starts) == 4


class CountOperators(TorchDispatchMode):
    """Count the operators that run."""

    def __enter__(self):
        self.calls = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["unroll", "direct_path"])
def test_expansion_skips_streams_that_a_write_does_not_reach(method):
    """Of n writes each in its own stream, n^2 operators are needed: four times as many for twice as many sublayers, not eight."""
    counts = []
    for n in (16, 32):
        stack = ResidualStack([nn.Linear(D, D) for _ in range(n)], D, wirings.attention_residuals())
        with CountOperators() as counter:
            getattr(stack, method)(torch.randn(3, D))
        counts.append(counter.calls)
    assert counts[1] < 4.5 * counts[0]
