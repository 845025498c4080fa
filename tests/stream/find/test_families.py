"""Tests of `inspect` on transformer families: it proves each row."""

from itertools import combinations

import pytest
from torch import Tensor

from addnorm import inspect, verify
from support import families, rare_families
from support.answers import ANY
from support.judge import judge
from support.pairwise import some

pytest.importorskip("transformers")

FAMILIES = families.families() | {f"more: {name}": family for name, family in rare_families.families().items()}


def find_features(family):
    """Return the pairs of expected facts of a family, and the remarks on its code."""
    features = {("remark", family.code)} if family.code else set()
    for stream in family.streams:
        facts = {
            "wiring": stream.wiring, "norm": stream.norm, "kinds": tuple(sorted({site.kind for site in stream.sites})),
            "embedding norm": stream.embedding_norm, "final norm": stream.final_norm, "shared": bool(stream.shared),
            "rows": any(site.row is not ANY for site in stream.sites), "streams": len(family.streams),
        }  # fmt: skip
        features |= {*combinations(facts.items(), 2)}
        features |= {("remark", stream.remark)} if stream.remark else set()
    return features


def select_families():
    """Return few families that have every feature; the others run under `-m slow`."""
    features = {name: find_features(family) for name, family in FAMILIES.items()}
    selected, missing = [], set().union(*features.values())
    while missing:
        selected.append(max(features, key=lambda name: len(features[name] & missing)))
        missing -= features[selected[-1]]
    return selected


ENDS = (
    "the final norm",
    "the norm of the embedding",
    "an earlier state",
)  # what a named wiring may lack, as a remark says


@pytest.mark.parametrize("name", some(FAMILIES, select_families()))
def test_inspect_finds_wiring_of_family(name):
    family = FAMILIES[name]
    model, args, kwargs = family.build()
    inspection = inspect(model, *args, **kwargs)
    verdict = judge(inspection, family.answer)
    differences = verdict.wrong + verdict.missing + verdict.reasons
    if len(inspection.streams) == 1 and (wiring := inspection.streams[0].wiring) is not None:
        found = verify(inspection, wiring=wiring).deviations
        differences += [str(one) for one in found if one.term not in ENDS]
    assert not differences, "\n".join([family.name, family.code, *differences])


CASTING = (
    "bert", "llama", "gemma2", "gemma3", "t5", "cohere", "qwen3", "olmo2", "glm4", "granite", "swinv2", "dinov2", "more: mamba",
)  # fmt: skip


@pytest.mark.parametrize("name", some(CASTING, ("bert", "gemma3", "t5", "cohere", "swinv2", "more: mamba")))
def test_inspect_finds_wiring_in_bfloat16(name):
    model, args, kwargs = FAMILIES[name].build()
    kwargs = {key: x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in kwargs.items()}
    inspection = inspect(model.bfloat16(), *args, **kwargs)
    verdict = judge(inspection, FAMILIES[name].answer)
    differences = verdict.wrong + verdict.missing + verdict.reasons
    assert not [text for text in differences if "option" not in text], differences  # constants are rounded
