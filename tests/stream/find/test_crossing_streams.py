"""Tests of two streams that read each other: both are found. A sum that only a sublayer reads is no stream."""

import pytest

from support.stream_steps import D, inspect_steps, noise

INPUTS = (noise(2, 6, D), noise(2, 5, D, seed=1), noise(2, 5, D, seed=2))


def attend(m, k, q, keys, values):
    return m.mlps[k]((m.gates[k](q) @ keys.mT).softmax(-1) @ values)


def in_turn_once(m, x, other, p):
    """The last sublayer of the first stream reads the second one, which nothing else does."""
    for k in (0, 2):
        x = x + attend(m, k, m.norms[k](x), m.context(other), m.context(other))
        other = other + m.mlps[k + 1](m.norms[k + 1](other) + attend(m, k + 1, m.context(other), x, x))
    return m.last(x + attend(m, 4, m.norms[4](x), other, other))


def positions_of_memory(m, x, other, p):
    """Encoder and decoder; each decoder layer adds the positions, which the encoder read too, to its keys, as DETR."""
    for k in (0, 1):
        y = m.norms[k](other)
        other = other + attend(m, k, y + p, y + p, y)
    other = m.context(other)
    for k in (2, 3):
        x = x + attend(m, k, m.norms[k](x), other + p, other)
    return m.last(x)


def value_residual(m, x, other, p):
    """Add the values of the first layer to those of the others."""
    first = None
    for k in range(4):
        y = m.norms[k](x)
        v = m.gates[k](y)
        first = v if first is None else first
        x = x + m.mlps[k]((y @ y.mT).softmax(-1) @ (v + first))
    return m.last(x)


# forward, name, and the kinds of the sublayers of each stream by their first letters: c is cross-attention
STREAMS = {
    in_turn_once: ("pre_ln", "ccc", "cc"),
    positions_of_memory: ("pre_ln", "aa", "cc"),
    value_residual: ("pre_ln", "aaaa"),
}


@pytest.mark.parametrize("run", STREAMS)
def test_inspect_tells_crossing_streams_apart(run):
    wiring, *letters = STREAMS[run]
    inspection = inspect_steps(run, *INPUTS)
    assert inspection.closes, inspection.unknown
    assert inspection.wiring == wiring
    kinds = ["".join(site.kind[0] for site in stream.sites) for stream in inspection.streams]
    assert sorted(kinds) == sorted(letters)


def test_stream_closes_without_the_other():
    """One stream of two is in rows; the other has a gate."""

    def run(m, x, other, p):
        for k in (0, 2):
            x = x + m.branch(k, x)
            gate = m.gates[k](other).sigmoid()
            other = gate * other + (1 - gate) * m.mlps[k + 1](other)
            other = other + m.branch(k + 1, other)
        return m.last(x), other

    inspection = inspect_steps(run, *INPUTS)
    right, *gated = inspection.streams
    assert right.wiring is not None
    assert right.closes
    assert gated
    assert all(stream.wiring is None and stream.unknown and not stream.closes for stream in gated)
    assert not inspection.closes
