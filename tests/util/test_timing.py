"""Tests of the order of samples and of the interval of a median."""

import itertools
import math
import random
import statistics

import pytest

from addnorm._util.timing import interleave, median_interval


@pytest.mark.parametrize("count", range(6, 102))
def test_median_interval_has_the_places_of_the_sign_test(count):
    """From the k-th smallest to the k-th largest, for the largest k with which at least 95% of the intervals hold the median."""
    values = [*range(1, count + 1)]
    random.Random(0).shuffle(values)
    k, high = median_interval(values)
    assert high == count + 1 - k
    inside = sum(math.comb(count, below) for below in range(k, high))
    assert inside >= 0.95 * 2**count > inside - 2 * math.comb(count, k)


@pytest.mark.parametrize("count", range(6))
def test_few_values_have_no_interval(count):
    assert median_interval([1.0] * count) == (-math.inf, math.inf)


def test_median_interval_holds_a_skewed_median_in_95_percent():
    draw = random.Random(0).expovariate
    held = []
    for _ in range(2000):
        low, high = median_interval([draw(1.0) for _ in range(12)])
        held.append(low <= math.log(2) <= high)
    assert 0.95 <= statistics.mean(held) <= 0.975  # 0.961 for 12 values


@pytest.mark.parametrize("names", ["ab", "abc", "abcd", "abcde"])
def test_each_sampler_follows_every_other_equally_often(names):
    order, rounds = [], 2 * len(names)
    interleave({name: lambda name=name: order.append(name) for name in names}, range(rounds))
    each = [order[i : i + len(names)] for i in range(0, len(order), len(names))]
    assert all(sorted(one) == [*names] for one in each)
    pairs = [pair for one in each for pair in itertools.pairwise(one)]
    assert [pairs.count(pair) for pair in itertools.permutations(names, 2)] == [2] * len(names) * (len(names) - 1)
