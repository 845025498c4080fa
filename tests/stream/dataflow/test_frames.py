"""Tests that observing a model leaves other threads alone."""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch

import addnorm
from support.stacks import encoder
from support.stream_steps import X

LAYER = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
SERVED = {
    "torch's fast path": lambda: torch.nn.TransformerEncoder(LAYER, 2),
    "mhc": lambda: encoder("mhc"),
}


@pytest.mark.parametrize("make", SERVED.values(), ids=SERVED)
def test_other_threads_compute_the_same_bits(make):
    served, x = make().eval(), X
    results = SimpleQueue()  # whose content no tool restores

    def serve():
        with torch.no_grad():
            results.put(served(x))

    class Observed(torch.nn.Linear):
        def forward(self, x):
            other.submit(serve).result()
            return super().forward(x)

    model = addnorm.ResidualStack([Observed(16, 16) for _ in range(2)], 16)
    with ThreadPoolExecutor(1) as other:
        other.submit(serve).result()
        found = addnorm.inspect(model, x)
        with addnorm.record(model) as recording:
            model(x).sum().backward()
        addnorm.ablate_each(found, x)
    assert recording.table()
    computed = [results.get() for _ in range(results.qsize())]
    assert len(computed) > 10
    assert all(torch.equal(result, computed[0]) for result in computed)
