"""Tests of the clock of a GPU: device, host and call time, on a simulated device."""

import pytest
import torch

from addnorm.bench.gpu import clock
from support.gpu_benchmark import Fixed
from support.loading import ROOT

PEERS = ("liger", "flash_attn", "quack")
UNCOMPILED = ["eager", "addnorm"]
SCRIPT = ROOT / "benchmarks" / "bench_gpu.py"

HERTZ = 1.5e9  # clock rate of the simulated device


class SimulatedCuda:
    """Device with a queue: each test sets the host's time, and the device executes the enqueued work."""

    def __init__(self, monkeypatch):
        self.host, self.device, self.sleeps = 0.0, 0.0, []
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(clock, "_event", lambda: Event(self))
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.host)

    def enqueue(self, seconds):
        """Enqueue work, which starts when the device is free, but not before now."""
        self.device = max(self.device, self.host) + seconds

    def sleep(self, cycles):
        self.sleeps.append(cycles / HERTZ)
        self.enqueue(cycles / HERTZ)

    def synchronize(self):
        self.host = max(self.host, self.device)


class Event:
    """Event of the simulated device."""

    def __init__(self, cuda):
        self.cuda = cuda

    def record(self):
        self.at = max(self.cuda.device, self.cuda.host)

    def query(self):
        return self.cuda.host >= self.at

    def synchronize(self):
        self.cuda.host = max(self.cuda.host, self.at)

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


@pytest.fixture
def cuda(monkeypatch):
    return SimulatedCuda(monkeypatch)


@pytest.fixture
def timer_of(cuda):
    """Return a function that returns a timer of calls with this host time and device work, and the sets of its calls."""

    def make(host, work, sets=2, synchronizes=False):
        order = []

        def call(i):
            order.append(i)
            cuda.host += host
            cuda.enqueue(work)
            if synchronizes:
                cuda.synchronize()

        clock._cycles_per_second.cache_clear()
        clock._cycles_per_second()
        timer = clock.CudaTimer(call, sets)
        cuda.sleeps.clear()  # those of the calibration
        return timer, order

    yield make
    clock._cycles_per_second.cache_clear()


@pytest.mark.parametrize(("host", "work"), [(5e-6, 50e-6), (50e-6, 5e-6)])
def test_device_host_and_call_time_are_separate(timer_of, host, work):
    timer, _ = timer_of(host, work)
    sample = timer.sample(20)
    assert sample.device == pytest.approx(work)  # also where the host is ten times slower
    assert sample.host == pytest.approx(host)
    assert sample.call == pytest.approx(max(host, work) + min(host, work) / 20)  # the longer one hides the other
    assert sample.queued


def test_short_sleep_is_made_longer(cuda, timer_of):
    timer, _ = timer_of(1e-3, 10e-6)
    sample = timer.sample(20)  # the host takes 20 ms: ten times the first sleep
    assert cuda.sleeps[0] == pytest.approx(clock.FIRST_SLEEP)
    assert cuda.sleeps[-1] > 20e-3
    assert (sample.queued, sample.device) == (True, pytest.approx(10e-6))
    cuda.sleeps.clear()
    timer.sample(20)
    assert len(cuda.sleeps) == 1  # the length of the sleep is remembered


def test_synchronizing_call_is_marked(cuda, timer_of):
    timer, _ = timer_of(1e-6, 10e-6, synchronizes=True)
    sample = timer.sample(4)
    assert len(cuda.sleeps) <= clock.TRIES
    assert max(cuda.sleeps) <= clock.LONGEST_SLEEP
    assert (sample.queued, clock.times([sample])["queued"]) == (False, False)
    assert sample.device >= 10e-6


def test_sets_rotate_through_all_segments(timer_of):
    timer, order = timer_of(1e-6, 1e-6, sets=3)
    timer.sample(4)  # a segment of device time, and one of call time
    assert order == [0, 1, 2, 0, 1, 2, 0, 1]


def test_copy_bandwidth_counts_reads_and_writes(monkeypatch):
    monkeypatch.setattr(clock, "_copies", lambda device: {"memcpy": Fixed(0.01), "kernel": Fixed(0.02)})
    monkeypatch.setitem(clock.COPY_BYTES, "cpu", 1000)
    assert clock.copy_rates("cpu") == {"memcpy": 2e5, "kernel": 1e5}
