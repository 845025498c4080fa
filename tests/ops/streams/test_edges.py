"""Tests of the boundary of n streams at its edges: extreme logits, odd sizes, one stream, expanded inputs, no memory."""

import pytest
import torch

import addnorm
from addnorm.ops.streams.kinds import GATE_KINDS
from support.equality import assert_same
from support.marks import needs_kernels
from support.memory import need
from support.stream_calls import (
    bf16,
    f64,
    in_float64,
    make_call,
    make_cotangents,
    run,
)  # fmt: skip

GATED = [kind for kind in GATE_KINDS if kind != "given"]


@pytest.mark.parametrize("kind", GATED)
def test_logits_of_1e30_saturate_the_gates(kind):
    """The formula in float64 has the same limits: 0 and 1, and β + α and β - α."""
    call = make_call(4, 33, (6,), kind, mode="read", norm="none")
    call.tensors["project"] *= 1e30
    results = call()
    exact = call.formula(in_float64(call).tensors)
    for name, t in results.items():
        assert t.isfinite().all(), name
        torch.testing.assert_close(t.to(f64), exact[name], rtol=2e-5, atol=2e-5)
    if kind != "hyper":
        c = results["collapse"]
        assert ((c < 1e-5) | (c > 1 - 1e-5)).all()


@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_constants_of_1e30_have_finite_gradients(kind, sign):
    """Those of saturated gates are 0; of "hyper" the constants of the logits are meant, since the others are no gates."""
    call = make_call(3, 33, (5,), kind, mode="read", norm="none")
    call.tensors["base"][15 if kind == "hyper" else 0 :].fill_(sign * 1e30)
    cotangents = make_cotangents(call)
    results, exact = run(call, call.leaves(), cotangents), run(call.formula, call.leaves(f64), cotangents)
    for name, t in results.items():
        assert t.isfinite().all(), name
    for name in ("dscale", "dproject"):
        torch.testing.assert_close(results[name].to(f64), exact[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", GATE_KINDS)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_no_tokens_give_zero_gradients_of_parameters(kind, shape):
    for mode in ("write", "shared", "features", "read"):
        call = make_call(4, 16, shape, kind, mode=mode)
        results = run(call, call.leaves(), make_cotangents(call))
        for name, t in call.tensors.items():
            assert results[f"d{name}"].shape == t.shape
            assert not results[f"d{name}"].any(), name
        assert results["read"].shape == (*shape, 16)


def test_allocation_failure_raises_and_leaves_no_trace():
    """Expanded streams for whose result there is no memory: torch's error, and the next call computes as before."""
    call = make_call(4, 2**16, (2,), "manifold")
    huge = torch.zeros(1, 4, 1).expand(2**35, 4, 2**16)
    gates = addnorm.StreamGates("manifold", *(call.tensors[name] for name in ("project", "scale", "base")))
    expected = call()
    for arguments in (
        {"branch": huge[:, 0], "inject": torch.ones(4), "gates": gates},
        {"collapse": torch.ones(4)},
        {"gates": gates},
    ):
        for grad in (False, True):
            collapse = arguments.get("collapse", torch.ones(4)).requires_grad_(grad)
            with pytest.raises(RuntimeError):  # torch's own; its message depends on which tensor is allocated first
                addnorm.add_norm_streams(huge, **arguments | {"collapse": collapse})
    assert_same(call(), expected)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("kind", ["given", "manifold"])
def test_streams_beyond_2_to_the_31_elements_are_exact(kind):
    """X and X' in bfloat16 are 4.3 GB each. The last rows have the bits that they have alone."""
    n, d = 4, 1024
    rows = 2**31 // (n * d) + 5
    need(5 * n * d * rows)
    call = make_call(n, d, (1009,), kind, dtype=bf16, mode="shared")
    times = -(-rows // 1009)
    streams = torch.empty(times * 1009, n, d, dtype=bf16)
    streams.view(times, 1009, n, d).copy_(call.tensors["streams"])
    branch = call.tensors["branch"].repeat(times, 1)
    with torch.no_grad():
        results = call({**call.tensors, "streams": streams, "branch": branch})
    for place in (slice(0, 7), slice(2**31 // (n * d) - 4, 2**31 // (n * d) + 2), slice(rows - 3, rows)):
        alone = call({**call.tensors, "streams": streams[place], "branch": branch[place]})
        assert all(t[place].equal(alone[name]) for name, t in results.items())
    assert not results["read"][rows - 3 : rows].equal(results["read"][:3])  # distinguishable rows
