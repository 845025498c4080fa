"""Models of transformers: the families of the default and slow tests, whose streams were read in its modelling code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from support import families, rare_families
from support.families import Family
from zoo import answer
from zoo.answer import Model, Package

VERSION = "5.23.0"


def streams(family: Family) -> tuple[answer.Stream, ...]:
    """Return the expected streams in the form of the zoo."""
    return tuple(
        answer.Stream(s.wiring, s.letters, s.norm, s.final_norm, s.embedding_norm, () if s.wiring else tuple(s.rows[k] for k in sorted(s.rows)))
        for s in family.expected
    )  # fmt: skip


def take(inputs: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the inputs of a family."""
    return inputs()


MODELS = tuple(
    Model(
        family.name,
        family.make,
        partial(take, family.inputs),
        streams(family),
        f"tests/support/families.py or rare_families.py, read in the modelling code of transformers {VERSION}. {family.remark}",
    )
    for family in {**families.families(), **rare_families.families()}.values()
    if not family.name.startswith("torch ")
)

PACKAGE = Package("transformers", (f"transformers=={VERSION}",), MODELS, installed=True)
