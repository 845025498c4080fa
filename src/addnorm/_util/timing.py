"""Interleaved timing: several variants measured in turns, so that a disturbance of the machine affects all of them alike."""

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def interleave(
    samplers: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, list[T]]:
    """Call every sampler once a round, rotate their order from round to round, and return the samples of each.

    Args:
        samplers: functions that take one sample each.
        rounds: number of rounds.
        failed: called with the name and the error of a sampler that raises, which ends its sampling. None: errors propagate.

    Example:
        >>> from addnorm._util.timing import interleave
        >>> order = []
        >>> samples = interleave({name: lambda name=name: order.append(name) for name in "abc"}, 2)
        >>> "".join(order)
        'abcbca'
    """
    samples: dict[str, list[T]] = {name: [] for name in samplers}
    with without_collector():
        for turn in range(rounds):
            names = list(samples)
            first = turn % len(names) if names else 0
            for name in names[first:] + names[:first]:
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


def synchronize() -> None:
    """Wait for the accelerator, if there is one, and raise its errors."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
