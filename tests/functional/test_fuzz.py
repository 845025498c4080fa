"""Tests of the fuzz target: a short run from fixed seeds passes, and planted errors are detected."""

import signal

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


def not_a_number_lost(results, **_):
    for t in results:
        t.nan_to_num_()


def infinity_lost(results, **_):
    results[-1].nan_to_num_(nan=torch.nan)


def nudge(t):
    t.copy_(t.nextafter(torch.tensor(9.0).to(t.dtype)))


def bits_without_gradients(results, grad, **_):
    if not grad and results[0].dtype == torch.float32:
        nudge(results[0])


def bits_by_threads(results, **_):
    if torch.get_num_threads() == 1 and results[0].dtype == torch.float32:
        nudge(results[0])


def bits_by_batch(results, residual, **_):
    if residual.numel() > residual.shape[-1] and residual.dtype == torch.float32:
        nudge(results[-1])


def wrong_gradient(results, weight=None, **_):
    if weight is not None and weight.requires_grad:
        weight.register_hook(lambda grad: grad * 1.02)


def not_contiguous(results, **_):
    return [torch.stack([t, t], -1)[..., 0] for t in results]


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (last_element_off, "y: 1 of"),
        (not_a_number_lost, "is 0.0, expected nan"),
        (infinity_lost, "expected inf"),
        (bits_without_gradients, "without gradients: other bits of"),
        (bits_by_threads, "another number of threads: other bits of"),
        (bits_by_batch, "some rows alone: other bits of"),
        (wrong_gradient, "weight: "),
        (not_contiguous, "is not contiguous"),
    ],
)
def test_fuzz_detects_a_fault(fault, line, monkeypatch):
    def broken(function):
        def call(*args, **kwargs):
            answer = function(*args, **kwargs)
            results, grad = (answer if isinstance(answer, tuple) else (answer,)), torch.is_grad_enabled()
            with torch.no_grad():
                results = fault([t.detach() for t in results], grad=grad, **kwargs) or results
            return results if isinstance(answer, tuple) else results[0]

        return call

    monkeypatch.setattr(cases, "FUNCTIONS", {name: broken(f) for name, f in cases.FUNCTIONS.items()})
    assert any(line in text for seed in SEEDS for text in fuzz.run(seed)[1])


def test_fuzz_continues_after_a_dead_process(capfd):
    # The next seed is SIGUSR2, which ends a process too.
    assert fuzz.run_many(signal.SIGSEGV, 2, 60.0, signal.raise_signal) == 2
    output = capfd.readouterr().out
    assert f"seed {int(signal.SIGSEGV)}: the process died" in output
    assert f"seed {int(signal.SIGUSR2)}: the process died" in output
    assert "2 cases" in output
