"""Helpers of the tests of the GPU benchmark: tiny runs, and interrupted ones."""

from addnorm.bench.gpu import cases, device, running

UNCOMPILED = ["eager", "addnorm"]


def shrink(monkeypatch):
    """Make the copy and the sets small."""
    monkeypatch.setitem(device.COPY_BYTES, "cpu", 4096)
    monkeypatch.setattr(cases, "MOST_SETS", 3)


def interrupting(monkeypatch, at, error=KeyboardInterrupt):
    """Interrupt the run when it reaches a case."""
    real = running.measure

    def measure(cell, *args, **options):
        if cell == at:
            raise error
        return real(cell, *args, **options)

    monkeypatch.setattr(running, "measure", measure)
    return real
