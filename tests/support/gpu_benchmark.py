"""Cases, variants and times for the tests of the benchmark on a GPU, which run without one."""

from addnorm.bench.case import Case
from addnorm.bench.gpu import clock, variants


def case(norm="rms", job="forward_stream", dtype="bfloat16", rows=16, d=64, device="cpu"):
    return Case(norm=norm, job=job, rows=rows, d=d, dtype=dtype, device=device)


def plant(monkeypatch, make, name="eager"):
    """Replace a variant by another implementation."""
    monkeypatch.setitem(variants.VARIANTS, name, variants.Variant(name, make))


class Fixed:
    def __init__(self, seconds):
        self.seconds = seconds

    def sample(self, repeats):
        return clock.Sample(self.seconds, 0.0, self.seconds, True)
