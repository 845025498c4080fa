"""`inspect` on families of models, on traps, on torch's own modules and on ours: each row, proven, or a reason."""

import pytest
import torch
from torch import Tensor

from addnorm import inspect
from support import families, families_more, traps
from support.judge_streams import differences

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


CASTING = [
    "bert",
    "llama",
    "gemma2",
    "gemma3",
    "t5",
    "cohere",
    "qwen3",
    "olmo2",
    "glm4",
    "granite",
    "swinv2",
    "dinov2",
    "more: mamba",
]


@pytest.mark.parametrize("name", CASTING)
def test_wirings_are_found_in_bfloat16_where_norms_cast(name):
    model, args, kwargs = FAMILIES[name].build()
    kwargs = {key: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in kwargs.items()}
    found = inspect(model.bfloat16(), *args, **kwargs)
    expected = FAMILIES[name].expected
    wrong = differences(found, expected, closure=8 * torch.finfo(torch.bfloat16).eps)
    assert not [one for one in wrong if "option" not in one], wrong  # constants are rounded


@pytest.mark.parametrize("name", CASTING)
def test_wirings_are_found_in_float64_where_norms_cast(name):
    model, args, kwargs = FAMILIES[name].build()
    found = inspect(model, *args, float64=True, **kwargs)
    assert not differences(found, FAMILIES[name].expected)
    if all(norm.dtype == torch.float64 for stream in found.streams for norm in stream.norms()) and "mamba" not in name:
        assert found.closure <= 1e-10
