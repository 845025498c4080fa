"""Tests of concurrent threads, each with torch's own parallelism, and of calls inside a backward: the bits of a single thread."""

import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

import addnorm
from support.cases import bf16, make
from support.equality import assert_same
from support.fuzz_bits import compute_results
from support.fuzz_calls import take
from support.stream_calls import make_call, make_cotangents, run

THREADS, ROUNDS = 8, 9
# Above the grain size, so that every call uses several threads; options and another dtype for the other code paths.
CALLS = [
    ("LayerNorm", "float32", (300, 257)),
    ("RMSNorm", "bfloat16", (300, 257)),
    ("LayerNorm", "float32 stream, bfloat16 branch", (70, 1030)),
    ("everything, LayerNorm", "float32", (40, 65)),
    ("RMSNorm with bias", "float16", (300, 257)),
]
STREAMS = [("given", bf16), ("manifold", torch.float32), ("hyper", torch.float32), ("independent", torch.float16)]


@pytest.fixture(autouse=True)
def switch_often(threads):
    """Make Python switch threads a hundred times as often as by default."""
    threads(2)
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def run_streams(call, cotangents):
    return run(call, call.leaves(), cotangents)


def list_uses():
    """Return functions without arguments that compute the results of a call by name."""
    calls = [make(*arguments) for arguments in CALLS]
    uses = [functools.partial(compute_results, take(call)) for call in calls]
    for kind, dtype in STREAMS:
        call = make_call(4, 130, (150,), kind, dtype=dtype)
        uses.append(functools.partial(run_streams, call, make_cotangents(call)))
    return uses


def test_calls_of_many_threads_at_once_have_the_bits_of_one():
    uses = list_uses()
    expected = [use() for use in uses]
    together = Barrier(THREADS)

    def work(thread):
        together.wait()
        wrong = []
        for turn in range(ROUNDS):
            i = (thread + turn) % len(uses)
            actual = uses[i]()
            wrong += [(i, name) for name, t in expected[i].items() if not t.equal(actual[name])]
        return wrong

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(work, range(THREADS))) == [[]] * THREADS


@pytest.mark.parametrize("dtype", [torch.float32, bf16])
def test_backward_hook_may_call_the_function_again(dtype):
    """The inner call runs in the middle of the outer one, on the thread of its backward."""
    x, branch = torch.randn(300, 257).to(dtype), torch.randn(300, 257).to(dtype)
    weight = torch.randn(257)

    def once(hook):
        residual, gamma = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y, z = addnorm.add_layer_norm(residual, branch, gamma, return_residual=True)
        again = addnorm.add_rms_norm(z, y, gamma)
        if hook is not None:
            for t in (y, z, gamma):
                t.register_hook(hook)
        again.backward(branch)
        return again, residual.grad, gamma.grad

    expected, inner = once(None), []

    def hook(grad):
        with torch.enable_grad():
            inner.append(once(None))

    actual = once(hook)
    assert len(inner) == 3
    for results in (actual, *inner):
        assert_same(results, expected)
