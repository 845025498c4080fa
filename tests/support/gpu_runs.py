"""Helpers of the tests of the GPU benchmark, for tiny runs and interrupted runs."""

from addnorm.bench.gpu import cases, device, running

UNCOMPILED = ["eager", "addnorm"]


def shrink(monkeypatch):
    """Shrink the copy and the sets."""
    monkeypatch.setitem(device.COPY_BYTES, "cpu", 4096)
    monkeypatch.setattr(cases, "MOST_SETS", 3)


def interrupting(monkeypatch, at, error=KeyboardInterrupt):
    """Interrupt the run at one case."""
    real = running.measure

    def measure(cell, *args, **options):
        if cell == at:
            raise error
        return real(cell, *args, **options)

    monkeypatch.setattr(running, "measure", measure)
    return real
