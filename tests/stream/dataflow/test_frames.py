"""Tests that observing a model leaves other threads alone."""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch

import addnorm
from support.stacks import encoder, torch_encoder
from support.stream_steps import X

SERVED = {
    "torch's fast path": torch_encoder,
    "mhc": lambda: encoder("mhc"),
}


@pytest.mark.parametrize("make", SERVED.values(), ids=SERVED)
def test_other_threads_compute_the_same_bits(make):
    served = make()
    results = SimpleQueue()  # whose content no tool restores

    def serve():
        with torch.no_grad():
            results.put(served(X))

    class Observed(torch.nn.Linear):
        def forward(self, x):
            other.submit(serve).result()
            return super().forward(x)

    model = addnorm.ResidualStack([Observed(16, 16) for _ in range(2)], 16)
    with ThreadPoolExecutor(1) as other:
        other.submit(serve).result()
        found = addnorm.inspect(model, X)
        with addnorm.record(model) as recording:
            model(X).sum().backward()
        addnorm.ablate_each(found, X)
    assert recording.table()
    computed = [results.get() for _ in range(results.qsize())]
    assert len(computed) > 10
    assert all(torch.equal(result, computed[0]) for result in computed)
