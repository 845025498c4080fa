"""Models with sums, functions and factors that are easily taken for something else; the functions are forwards of `Steps`."""

import torch
from torch.nn import functional as F

from support.stream_steps import D


def stale_reads(m, x):
    """Read the state before the last one."""
    before = x
    for k in range(4):
        before, x = x, x + m.mlps[k](m.norms[k](before))
    return m.last(x)


def projected_shortcut(m, x):
    """Add the output of one sublayer to a projection of the stream."""
    for k in range(4):
        x = (m.gates[0](x) if k == 2 else x) + m.mlps[k](m.norms[k](x))
    return m.last(x)


def function_of_the_end(m, x):
    """Cap the end of the stream before the last norm."""
    for k in range(3):
        x = x + m.mlps[k](m.norms[k](x))
    return m.last(30 * torch.tanh(x / 30))


def clamped_end(m, x):
    """Clamp the end of the stream before the last norm."""
    for k in range(3):
        x = x + m.mlps[k](m.norms[k](x))
    return m.last(x.clamp(-0.5, 0.5))


def attention_over_depth(m, x):
    """Read a mean of all outputs before, with weights computed from them."""
    outputs = [x]
    for k in range(4):
        states = torch.stack(outputs)
        weights = (states * m.gammas[k]).sum(-1, keepdim=True).softmax(0)
        outputs.append(m.mlps[k](m.norms[k]((weights * states).sum(0))))
    return m.last(sum(outputs))


def masked_features(m, x):
    """Write to some of the features, by a vector of constants."""
    keep = (torch.arange(D) % 3 > 0).float()
    for k in range(3):
        x = x + keep * m.mlps[k](m.norms[k](x))
    return m.last(x)


def means_of_pairs(m, x):
    """Average the stream and the output."""
    for k in range(3):
        x = torch.stack([x, m.mlps[k](m.norms[k](x))]).mean(0)
    return m.last(x)


def means_of_tokens(m, x):
    """Add the mean of the outputs to each token; the last norm reads half of the stream."""
    for k in range(3):
        x = x + m.mlps[k](m.norms[k](x)).mean(1, keepdim=True)
    return m.last(0.5 * x)


def unused_norm(m, x):
    """Normalize the end of the stream and return its mean without the norm."""
    for k in range(3):
        x = x + m.mlps[k](m.norms[k](x))
    m.last(x)
    return x.mean(1)


def first_state_again(m, x):
    """Add x_0 to half of the stream between the layers."""
    first = x
    for k in range(3):
        x = 0.5 * x + 0.3 * first if k else x
        x = x + m.mlps[k](m.norms[k](x))
    return m.last(x)


def mean_magnitudes(m, x):
    """Divide the read by mean(|x|), which is no norm that `inspect` knows."""
    for k in range(3):
        x = x + m.mlps[k](x / x.abs().mean(-1, keepdim=True))
    return x


def sorted_features(m, x):
    """Sort the features of each token between two layers."""
    for k in range(3):
        x = x + m.mlps[k](m.norms[k](x))
        x = x.sort(-1).values if k == 1 else x
    return m.last(x)


def scaled_ends(m, x):
    x = 2 * m.others[0](x)
    for k in range(3):
        x = x + m.mlps[k](m.norms[k](x))
    order = x[..., :1].argsort(1).expand_as(x)
    return m.last(m.others[1](x.gather(1, order)))


def dropout_of_the_stream(m, x):
    for k in range(3):
        x = F.dropout(x, 0.2, m.training) if k else x
        x = x + m.mlps[k](m.norms[k](x))
    return m.last(x)


def smeared(m, x):
    """Average neighbouring tokens between two layers."""
    for k in range(3):
        x = x + m.mlps[k](m.norms[k](x))
        x = 0.5 * x + 0.5 * x.roll(1, 1) if k == 1 else x
    return m.last(x)
