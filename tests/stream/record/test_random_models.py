"""`record`, `decompose` and `ablate` on random models, compared with numbers of a forward by hand in float64."""

from functools import cache

import pytest

import addnorm
from support.random_models import CHAINS, NAMES, random_model, seeds_of
from support.random_models.judgement import judge
from support.random_models.numbers import compare_ablations, compare_components, compare_recording, trace_by_hand

NUM_CHAINS = 18
TRACED = [name for name in NAMES if random_model(seeds_of(name, 1)[0]).trace is not None]

# Constructs with wrong numbers, by tool: the seed of a model, and what is wrong. Each is a strict xfail.
FAULTS = {
    "record": {
        "add: residual bias": (206, "the balance sheet is refused"),
    },
    "decompose": {},
    "ablate": {},
}
COMPARISONS = {
    "record": lambda case, inspection: [*compare_recording(case, inspection, trace_by_hand(case))],
    "decompose": lambda case, inspection: [*compare_components(case, inspection, trace_by_hand(case))],
    "ablate": lambda case, inspection: [*compare_ablations(case, inspection, every=2)],
}


@cache
def inspected(seed):
    """Return the model of a seed, its inspection, and whether the inspection is right."""
    case = random_model(seed)
    inspection = addnorm.inspect(case.model, *case.inputs)
    return case, inspection, judge(inspection, case.answer).status == "right"


def list_differences(tool, seeds, constructs=None, without=()):
    """Return the differences of a tool's numbers, and the number of models."""
    differences, count = [], 0
    for seed in seeds:
        case, inspection, is_right = inspected(seed)
        own = case.answer.constructs
        if (
            case.trace is not None
            and is_right
            and own.isdisjoint(without)
            and (constructs is None or not own.isdisjoint(constructs))
        ):
            count += 1
            try:
                found = COMPARISONS[tool](case, inspection)
            except (RuntimeError, ValueError) as error:
                found = [str(error)]
            differences += [f"{case.describe()}: {text}" for text in found]
    return differences, count


@pytest.mark.parametrize("tool", COMPARISONS)
def test_numbers_equal_those_by_hand_on_chains(tool):
    differences, count = list_differences(tool, seeds_of(CHAINS, NUM_CHAINS), without=FAULTS[tool])
    assert differences == []
    assert count >= 5


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize("tool", ["record", "ablate"])
def test_numbers_equal_those_by_hand_on_construct(tool, name):
    if name not in FAULTS[tool]:
        assert list_differences(tool, seeds_of(name, 1), without=FAULTS[tool])[0] == []


@pytest.mark.parametrize(("tool", "name"), [
    pytest.param(tool, name, marks=pytest.mark.xfail(reason=reason, strict=True))
    for tool, faults in FAULTS.items() for name, (_, reason) in faults.items()
])  # fmt: skip
def test_numbers_equal_those_by_hand_on_fault(tool, name):
    seed, _ = FAULTS[tool][name]
    assert name in inspected(seed)[0].answer.constructs
    assert list_differences(tool, [seed]) == ([], 1)


def mark_faults(tool):
    """Return the parameter, expected to fail while the tool has faults."""
    return pytest.param(tool, marks=pytest.mark.xfail(FAULTS[tool] != {}, reason="the faults above", strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("tool", [mark_faults(tool) for tool in COMPARISONS])
def test_numbers_equal_those_by_hand_on_many_models(tool):
    seeds = [seed for seed in range(600) if tool != "decompose" or seed % 2 == 0]
    differences, count = list_differences(tool, seeds)
    assert differences == []
    assert count >= 150
