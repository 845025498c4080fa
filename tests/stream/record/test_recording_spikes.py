"""Spikes of a recording: by the rule, value by value, and each tells what came before it."""

import math

import pytest

from support.recordings import INF, NAN, series_of


def by_hand(values, window, sd, least):
    """The rule, value by value."""
    before, found = [], []
    for step, value in enumerate(values):
        last = before[-window:]
        if not math.isfinite(value):
            found.append(step)
            continue
        mean = sum(last) / max(len(last), 1)
        deviation = math.sqrt(sum((one - mean) ** 2 for one in last) / max(len(last), 1))
        if len(last) >= least and value > mean + sd * max(deviation, 1e-6 * abs(mean)):
            found.append(step)
        before.append(value)
    return found


@pytest.mark.parametrize(("window", "least"), [(128, 32), (8, 8), (5, 2)])
def test_spikes_follow_the_rule(window, least):
    noise = [1.0 + 0.1 * math.sin(12.9898 * k * k) for k in range(5000)]
    for at, value in ((40, 5.0), (41, 5.0), (700, NAN), (701, 3.0), (4095, 4.0), (4097, 4.0), (4999, INF)):
        noise[at] = value
    found = [spike.step for spike in series_of(noise).spikes(window, min_count=least)]
    assert found == by_hand(noise, window, 6.0, least)
    assert {40, 700, 701, 4095, 4999} <= set(found)


def test_a_spike_tells_what_came_before_it():
    (spike,) = series_of([1.0, 3.0] * 32 + [50.0]).spikes()
    assert spike[:5] == (64, "0.attn", 0, "grad", "l2")
    assert (spike.value, spike.mean, spike.sd) == (50.0, 2.0, 1.0)
    assert str(spike) == "step 64, 0.attn: grad l2 is 50, after 2 ± 1"
    (nan,) = series_of([NAN]).spikes()
    assert str(nan) == "step 0, 0.attn: grad l2 is nan"


def test_rounding_and_few_values_are_no_spikes():
    assert series_of([1.0] * 100 + [1.0 + 1e-7]).spikes() == []
    assert series_of([1.0, 1.1] * 10 + [100.0]).spikes() == []
    assert series_of([0.0] * 40 + [1.0]).spikes()[0].step == 40
    with pytest.raises(ValueError, match="min_count is 200 and window 128"):
        series_of([1.0]).spikes(min_count=200)
