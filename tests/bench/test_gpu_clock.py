"""Tests of the GPU benchmark's clock on a simulated device."""

import pytest
import torch

from addnorm.bench.gpu import clock, device

HERTZ = 1e9  # clock rate of the simulated device


class FakeCuda:
    """Simulated device with a queue: each test sets the host's time, and the device executes the enqueued work."""

    def __init__(self, monkeypatch, hertz=HERTZ):
        self.host, self.device, self.hertz, self.slept = 0.0, 0.0, hertz, []
        for name in ("_sleep", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(clock, "_event", lambda: Event(self))
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.host)

    def enqueue(self, seconds):
        """Enqueue work, which starts when the device is free, but not before now."""
        self.device = max(self.device, self.host) + seconds

    def _sleep(self, cycles):
        self.slept.append(cycles / self.hertz)
        self.enqueue(cycles / self.hertz)

    def synchronize(self):
        self.host = max(self.host, self.device)


class Event:
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
    return FakeCuda(monkeypatch)


def call(cuda, host, work, seen=None):
    """Return a call that takes this much host time and enqueues this much device work."""

    def made(i):
        cuda.host += host
        cuda.enqueue(work)
        if seen is not None:
            seen.append(i)

    return made


def test_sleep_is_calibrated_by_the_device(monkeypatch):
    cuda = FakeCuda(monkeypatch, hertz=1.5e9)
    found = clock.CudaClock()
    assert found.hertz == pytest.approx(1.5e9)
    found.sleep(0.003)
    assert cuda.slept[-1] == pytest.approx(0.003)


@pytest.mark.parametrize(("host", "work"), [(5e-6, 50e-6), (50e-6, 5e-6)])
def test_device_host_and_call_time_are_separate(cuda, host, work):
    found = clock.CudaClock().timer(call(cuda, host, work), sets=2).sample(20)
    assert found.device == pytest.approx(work)  # though the host of the second case is ten times slower
    assert found.host == pytest.approx(host)
    assert found.call == pytest.approx(max(host, work) + min(host, work) / 20)  # the longer one hides the other
    assert found.queued


def test_short_sleep_is_made_longer(cuda):
    timer = clock.CudaClock().timer(call(cuda, 1e-3, 10e-6), sets=2)
    cuda.slept.clear()
    found = timer.sample(20)  # the host takes 20 ms: ten times the first sleep
    assert cuda.slept[0] == pytest.approx(clock.FIRST_SLEEP)
    assert cuda.slept[-1] > 20e-3
    assert found.queued
    assert found.device == pytest.approx(10e-6)
    cuda.slept.clear()
    timer.sample(20)
    assert len(cuda.slept) == 1  # the length of the sleep is remembered


def test_synchronizing_call_is_marked(cuda):
    def waits(i):
        cuda.host += 1e-6
        cuda.enqueue(10e-6)
        cuda.synchronize()

    timer = clock.CudaClock().timer(waits, sets=1)
    cuda.slept.clear()
    found = timer.sample(4)
    assert not found.queued
    assert len(cuda.slept) <= clock.TRIES
    assert max(cuda.slept) <= clock.LONGEST_SLEEP
    assert found.device >= 10e-6


def test_sets_rotate_through_all_segments(cuda):
    seen = []
    timer = clock.CudaClock().timer(call(cuda, 1e-6, 1e-6, seen), sets=3)
    timer.sample(4)  # a segment of device time, one of call time
    assert seen == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize(("memcpy", "kernel"), [(0.01, 0.02), (0.02, 0.01)])
def test_copy_bandwidth_is_that_of_the_faster_method(memcpy, kernel, monkeypatch):
    seconds = iter([memcpy, kernel])

    class Seconds:
        """Clock with a fixed time for each variant."""

        def __init__(self, each=0.0):
            self.each = each

        def timer(self, call, sets):
            call(0)
            return Seconds(next(seconds))

        def sample(self, repeats):
            return clock.Sample(self.each, 0.0, self.each, True)

    monkeypatch.setitem(device.COPY_BYTES, "cpu", 1000)
    copies = device.Copies(torch.device("cpu"), Seconds(), found=[3e5])
    copies.measure()
    copies.measure()
    assert copies.document() == {
        "bytes": 1000, "median": 2e5, "bytes_per_second": [3e5, 2e5, 2e5],
        "last": {"memcpy": 2000 / memcpy, "kernel": 2000 / kernel},
    }  # fmt: skip


@pytest.mark.parametrize("way", device.COPIES)
def test_each_copy_method_reads_and_writes_everything(way):
    source, target = torch.arange(-5, 5, dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    device.COPIES[way](source, target)
    assert torch.equal(target, source if way == "memcpy" else -1 - source)


class Steady:
    """Timer that always returns the same time and records its calls."""

    def __init__(self, name, device=1e-4, told=None):
        self.name, self.seconds, self.told = name, device, [] if told is None else told

    def sample(self, repeats):
        self.told.append((self.name, repeats))
        return clock.Sample(self.seconds, 1e-6, self.seconds, True)


def test_segment_has_as_many_calls_as_fit():
    assert clock.repeats_for(Steady("", 1.0)) == clock.FEWEST
    assert clock.repeats_for(Steady("", 1e-9)) == clock.MOST
    assert clock.repeats_for(Steady("", clock.SEGMENT_SECONDS / 10)) == 10


def test_times_have_medians_quartiles_and_queued():
    samples = [clock.Sample(k * 1e-6, 2e-6, 3e-6, k != 3) for k in (5, 1, 3, 2, 4)]
    found = clock.times(samples)
    assert [found[f"device_{part}"] for part in ("q1_us", "us", "q3_us")] == pytest.approx([2.0, 3.0, 4.0])
    assert (found["host_us"], found["call_us"]) == pytest.approx((2.0, 3.0))
    assert (found["rounds"], found["queued"]) == (5, False)
    assert clock.times(samples[:1])["device_q3_us"] == pytest.approx(5.0)


def test_warm_calls_each_set_once_and_waits():
    seen, waited = [], []

    class Host(clock.HostClock):
        def wait(self):
            waited.append(len(seen))

    clock.warm(seen.append, 3, Host())
    assert (seen, waited) == ([0, 1, 2], [3])


def test_on_a_cpu_all_times_are_equal():
    seen = []
    timer = clock.HostClock().timer(seen.append, 2)
    found = timer.sample(3)
    assert found.device == found.host == found.call > 0
    assert seen == [0, 1, 0]


def test_driver_version_is_read_from_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "DRIVER", tmp_path / "version")
    assert device.driver() is None
    text = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x)\nGCC version: 13.2.0\n"
    )
    device.DRIVER.write_text(text)
    assert device.driver() == "580.159.04"


def test_gpu_is_described_by_its_properties(monkeypatch):
    class Properties:
        name, major, minor, multi_processor_count, total_memory, L2_cache_size = (
            "Some GPU",
            9,
            0,
            132,
            10**11,
            6 * 10**7,
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    found = device.describe(torch.device("cuda"))
    assert (found["name"], found["capability"], found["multiprocessors"]) == ("Some GPU", "9.0", 132)
    assert found["l2_bytes"] == 6 * 10**7
    Properties.L2_cache_size = 0
    assert device.describe(torch.device("cuda"))["l2_bytes"] == device.ASSUMED_L2
