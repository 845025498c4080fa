"""Models with sums, functions and factors that are easily taken for something else; the functions are forwards of `Steps`."""

import torch
from torch.nn import functional as F

from support.stream_steps import D, normalize, repeat, run_layers


def stale_reads(m, x):
    """Read the state before the last one."""
    before = x
    for k in range(4):
        before, x = x, x + m.branch(k, before)
    return m.last(x)


# Add the output of one sublayer to a projection of the stream.
projected_shortcut = repeat(lambda m, k, x: (m.gates[0](x) if k == 2 else x) + m.branch(k, x), end=normalize)


def function_of_the_end(m, x):
    """Cap the end of the stream before the last norm."""
    return m.last(30 * torch.tanh(run_layers(m, x, last=3) / 30))


def attention_over_depth(m, x):
    """Read a mean of all outputs before, with weights computed from them."""
    outputs = [x]
    for k in range(4):
        states = torch.stack(outputs)
        weights = (states * m.gammas[k]).sum(-1, keepdim=True).softmax(0)
        outputs.append(m.mlps[k](m.norms[k]((weights * states).sum(0))))
    return m.last(sum(outputs))


# Write to some of the features, by a vector of constants.
KEEP = (torch.arange(D) % 3 > 0).float()
masked_features = repeat(lambda m, k, x: x + KEEP * m.branch(k, x), count=3, end=normalize)


# Average the stream and the output.
means_of_pairs = repeat(lambda m, k, x: torch.stack([x, m.branch(k, x)]).mean(0), count=3, end=normalize)


# Add the mean of the outputs to each token; the last norm reads half of the stream.
means_of_tokens = repeat(
    lambda m, k, x: x + m.branch(k, x).mean(1, keepdim=True), count=3, end=lambda m, x: m.last(0.5 * x)
)


def unused_norm(m, x):
    """Normalize the end of the stream and return its mean without the norm."""
    x = run_layers(m, x, last=3)
    m.last(x)
    return x.mean(1)


def first_state_again(m, x):
    """Add x_0 to half of the stream between the layers."""
    first = x
    for k in range(3):
        x = 0.5 * x + 0.3 * first if k else x
        x = x + m.branch(k, x)
    return m.last(x)


def scaled_ends(m, x):
    x = run_layers(m, 2 * m.others[0](x), last=3)
    order = x[..., :1].argsort(1).expand_as(x)
    return m.last(m.others[1](x.gather(1, order)))


def dropout_of_the_stream(m, x):
    for k in range(3):
        x = F.dropout(x, 0.2, m.training) if k else x
        x = x + m.branch(k, x)
    return m.last(x)


def smeared(m, x):
    """Average neighbouring tokens between two layers."""
    x = run_layers(m, x, last=2)
    return m.last(run_layers(m, 0.5 * x + 0.5 * x.roll(1, 1), 2, 3))


def residual_of_the_norm(first):
    """Return the forward whose sublayers `first`, `first` + 2, ... take the residual from their norm, the others from the stream."""

    def step(m, k, x):
        y = m.norms[k](x)
        return (y if k % 2 == first else x) + m.mlps[k](y)

    return repeat(step, end=normalize if first else None)
