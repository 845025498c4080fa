"""Statistics of tensors: few passes, float32 or wider arithmetic, no tensor kept.

Per-token statistics reduce over the features of one token. Means are over the tokens that the mask selects (`TokenMask`).
Each function yields the statistics of one role that `STATISTICS` in schema.py declares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from addnorm.stream.dataflow.memory import is_in_memory
from addnorm.stream.dataflow.wrappers import gather, is_sharded, is_wrapper, local_part
from addnorm.stream.tokens import Statistics, Tokens, upcast

MEDIAN_SAMPLE = 16_384  # number of elements from which the median is computed
MASSIVE, TIMES_MEDIAN = 100.0, 1000.0  # Sun et al. 2024, "Massive Activations in Large Language Models"


def write_statistics(x: Tokens, write: Tokens) -> Statistics:
    """Yield ratio, cosine: the write compared with the stream it is added to, token by token in the same order."""
    dots = (upcast(x.counted) * upcast(write.counted)).sum(-1)
    yield "ratio", float((write.lengths / x.lengths).mean())
    yield "cosine", float((dots / (x.lengths * write.lengths).clamp_min(torch.finfo(dots.dtype).tiny)).mean())


def unchanged_share(x: Tokens, write: Tokens) -> float:
    """Return the share of the stream's elements that adding the write does not change."""
    before, added = x.counted, write.counted
    return float(((before + added).to(before.dtype) == before).float().mean(-1).mean())


def state_statistics(tokens: Tokens) -> Statistics:
    """Yield statistics of the stream after a sublayer: similarity, and of its large elements massive and top.

    "massive" is the number of elements above max(100, 1000 × median |x|), "top" the largest |x| / median |x|. The median is that
    of a sample.
    """
    similarity = _similarity(tokens)
    if similarity is not None:
        yield "similarity", similarity
    t = tokens.t if tokens.mask is None else tokens.counted
    flat = t.reshape(-1)
    step = max(1, flat.numel() // MEDIAN_SAMPLE) | 1  # odd: an even step would select the same features of each token
    sample = upcast(flat[::step]).abs()
    # torch's median of an even number of elements is the lower one of the two in the middle.
    median = float(sample.median() / 2 - (-sample).median() / 2) if flat.numel() else math.nan
    largest = tokens.statistics["max"]
    bound = max(MASSIVE, TIMES_MEDIAN * median)
    # Half precision would round the bound.
    yield "massive", float((upcast(t).abs() > bound).sum()) if largest > bound else 0.0
    yield "top", largest / median if median else math.inf if largest else math.nan


def _similarity(tokens: Tokens) -> float | None:
    """Return the mean cosine between two tokens of a sequence; NaN where no sequence has two tokens.

    None if it is not known which tokens are those of one sequence.
    """
    t, rows = tokens.t, tokens.sort()
    sizes = tokens.layout.measure(t.shape[:-1])
    if sizes is None or rows is None:
        return None
    if not t.numel():
        return math.nan
    sequences = upcast(rows.t).reshape(*sizes, t.shape[-1])
    lengths = torch.linalg.vector_norm(sequences, dim=-1)
    counted = lengths != 0  # a token of zeros has no direction; NaN counts
    if rows.mask is not None:
        counted &= rows.mask.reshape(sizes)
        sequences = sequences.masked_fill(~counted[..., None], 0.0)  # it may be NaN, as attention that sees no token
    weights = torch.where(counted, 1.0 / lengths, 0.0)
    counts = counted.sum(-1).to(sequences.dtype)
    total = torch.bmm(weights[:, None], sequences).square().sum((1, 2))
    several = counts > 1
    pairs = (counts * (counts - 1))[several]
    return float(((total - counts)[several] / pairs).mean())


def rstd_statistics(rstd: Tensor) -> Statistics:
    """Yield rstd, rstd_min, rstd_max from the reciprocal denominators of a norm, `(n,)`; nothing if there are none."""
    if rstd.numel():
        yield "rstd", float(rstd.mean())
        yield "rstd_min", float(rstd.min())
        yield "rstd_max", float(rstd.max())


def parameter_norm(parameters: Iterable[Tensor], gathered: bool) -> float | None:
    """Return the L2 norm of all elements of some parameters; None if there are none.

    Args:
        parameters: the parameters.
        gathered: of sharded ones the whole, not the part of this process.
    """
    norms = [vector_norm(parameter, gathered) for parameter in parameters]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else None


def vector_norm(t: Tensor, gathered: bool) -> Tensor:
    """Return the L2 norm of all elements, 0-d; NaN for a tensor without readable memory."""
    if is_sharded(t):
        t = gather(torch.linalg.vector_norm(upcast(t))) if gathered else local_part(t)
    elif not is_in_memory(t, tuple(t.shape)):
        return torch.tensor(math.nan)
    elif is_wrapper(t):
        try:
            t = t.dequantize()
        except Exception:  # a wrapper may refuse an operator with any error
            return torch.tensor(math.nan)
    norm: Tensor = torch.linalg.vector_norm(upcast(t))
    return norm
