"""Tests of the fuzz target: a short run from fixed seeds passes, and planted errors are detected."""

import pytest
import torch

from support import cases, fuzz

SEEDS = range(250)


def test_random_calls_pass_the_fuzz_checks():
    failures = {seed: result for seed in SEEDS[:120] if (result := fuzz.run(seed))[1]}
    assert failures == {}


def last_element_off(results, **_):
    for t in results:
        if t.numel() > 1 and t.dtype == torch.float32:
            t.view(-1)[-1] *= 1 + 2e-4


def wrong_gradient(results, weight=None, **_):
    if weight is not None and weight.requires_grad:
        weight.register_hook(lambda grad: grad * 1.02)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (last_element_off, "y: 1 of"),
        (wrong_gradient, "weight: "),
    ],
)
def test_fuzz_detects_a_fault(fault, line, monkeypatch):
    def broken(function):
        def call(*args, **kwargs):
            answer = function(*args, **kwargs)
            with torch.no_grad():
                fault([t.detach() for t in (answer if isinstance(answer, tuple) else (answer,))], **kwargs)
            return answer

        return call

    monkeypatch.setattr(cases, "FUNCTIONS", {name: broken(f) for name, f in cases.FUNCTIONS.items()})
    assert any(line in text for seed in SEEDS for text in fuzz.run(seed)[1])
