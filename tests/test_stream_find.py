"""`inspect` on families of models, on traps, on torch's own modules and on ours: each row, proven, or a reason."""

import pytest

import families
import families_more
import traps
from addnorm.stream.find import inspect
from judge_streams import differences

pytest.importorskip("transformers")

FAMILIES = families.families() | {f"more: {name}": one for name, one in families_more.families().items()}


def judge(family):
    model, args, kwargs = family.build()
    found = inspect(model, *args, **kwargs)
    wrong = differences(found, family.expected)
    assert not wrong, "\n".join([family.name, family.remark, *(want.remark for want in family.expected), *wrong])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_families_wirings_are_found(name):
    judge(FAMILIES[name])


@pytest.mark.parametrize("name", traps.traps())
def test_traps_do_not_mislead(name):
    judge(traps.traps()[name])
