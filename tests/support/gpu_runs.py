"""What the tests of the GPU benchmark share: runs so small that they are over at once, or cut short."""

from addnorm.bench.gpu import calls, device, running

UNCOMPILED = ["eager", "addnorm"]


def shrink(monkeypatch):
    """A copy of a few bytes, and few sets: what is tested here is no time."""
    monkeypatch.setitem(device.COPY_BYTES, "cpu", 4096)
    monkeypatch.setattr(calls, "MOST_SETS", 3)


def interrupting(monkeypatch, at, error=KeyboardInterrupt):
    """The run is interrupted when it comes to a cell."""
    real = running.measure

    def measure(cell, *args, **options):
        if cell == at:
            raise error
        return real(cell, *args, **options)

    monkeypatch.setattr(running, "measure", measure)
    return real
