"""Recordings with given numbers at the sites of two layers."""

import math

from addnorm.stream.record.recording import Recording
from addnorm.stream.record.schema import RecordedSite

NAN, INF = math.nan, math.inf


def sites(layers=2, stream="stream"):
    """Return x_0, attention and feed-forward of each layer, and the final norm."""
    under = "" if stream == "stream" else f"{stream}."
    kinds = {"attn": "attention", "mlp": "feed-forward"}
    return [
        RecordedSite(f"{under}x_0", "", "start", None, stream),
        *(
            RecordedSite(f"{under}{k}.{name}", f"{under}{k}.{name}", kind, k, stream)
            for k in range(layers)
            for name, kind in kinds.items()
        ),
        RecordedSite(f"{under}final", f"{under}norm", "final", None, stream),
    ]


def filled(*numbers, **options):
    """Return a recording of two layers with these numbers: (step, site, role, statistic, value)."""
    rec = Recording(sites(**options), {"model": "Toy", "torch": "2.13"})
    for number in numbers:
        rec.add(*number)
    return rec


def values(rec, *series, **options):
    """Return the values of a series by depth."""
    return [value for _, value in rec.series(*series, **options)]


WRITES = [(step, site, "write", "rms", 10.0 * step + site) for step in (0, 5) for site in (1, 2, 3, 4)]


def series_of(values):
    """Return a recording with one series, a value a step."""
    return filled(*((step, 1, "grad", "l2", value) for step, value in enumerate(values)))
