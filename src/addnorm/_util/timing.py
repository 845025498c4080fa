"""Interleaved timing: several variants measured in turns, so that a disturbance of the machine affects all of them alike."""

import gc
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TypeVar

import torch

T = TypeVar("T")


def interleave(
    samplers: Mapping[str, Callable[[], T]],
    rounds: Iterable[int],
    *,
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, list[T]]:
    """Call every sampler once a round, in an order that changes from round to round, and return the samples of each.

    Over the rounds each sampler follows every other one equally often: the order is a Williams square, reversed in every other
    cycle, which odd numbers of samplers require. A sampler that always followed the same one would find the caches as that
    one left them.

    Args:
        samplers: functions that take one sample each.
        rounds: the numbers of the rounds: a `range`, or a generator that ends when the time is up.
        failed: called with the name and the error of a sampler that raises, which ends its sampling. None: errors propagate.

    Example:
        >>> from addnorm._util.timing import interleave
        >>> order = []
        >>> samples = interleave({name: lambda name=name: order.append(name) for name in "abc"}, range(4))
        >>> "".join(order)
        'abcbcacabcba'
    """
    samples: dict[str, list[T]] = {name: [] for name in samplers}
    with without_collector():
        for turn in rounds:
            names, n = list(samples), len(samples)
            order = [names[(turn + (k + 1) // 2 * (1 if k % 2 else -1)) % n] for k in range(n)]
            for name in reversed(order) if n and turn // n % 2 else order:
                try:
                    samples[name].append(samplers[name]())
                except Exception as error:
                    if failed is None:
                        raise
                    del samples[name]
                    failed(name, error)
    return samples


@contextmanager
def without_collector() -> Iterator[None]:
    """Turn Python's garbage collector off in the block. Explicit collections there skip the objects that exist already."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # a collection then looks only at new objects, not at the 100,000 of torch
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile.

    Example:
        >>> from addnorm._util.timing import quartiles
        >>> quartiles([5, 1, 3, 2, 4]), quartiles([7])
        ((2.0, 3.0, 4.0), (7, 7, 7))
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, median, q3


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95% confidence interval of the median of the distribution that `values` are drawn from, whichever it is.

    A value is below the median with probability 1/2, so the number of values below it is binomial. The interval is from the k-th
    smallest to the k-th largest value, with the largest k for which it contains the median with a probability of at least 95%.
    Fewer than six values have no such k: the interval is from -inf to inf.

    Example:
        >>> from addnorm._util.timing import median_interval
        >>> median_interval([5, 1, 3, 2, 4, 6, 9, 7, 8]), median_interval([1, 2, 3, 4, 5])
        ((2, 8), (-inf, inf))
    """
    ordered, n = sorted(values), len(values)
    tails = accumulate(math.comb(n, below) for below in range(n))  # out of 2**n
    k = sum(2 * tail * 20 <= 2**n for tail in tails)
    return (ordered[k - 1], ordered[-k]) if k else (-math.inf, math.inf)


def synchronize() -> None:
    """Wait for the accelerator, if there is one, and raise its errors."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
