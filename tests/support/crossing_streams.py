"""Two streams that read each other in turn, and sums that look like streams: positions, values of the first layer.

Each function is the forward of a `Steps` model; its inputs are two streams and the positions of the second.
"""


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
