"""Models of transformers: the families of the default and slow tests, whose streams were read in its modelling code."""

from dataclasses import replace

from support import families, rare_families
from zoo.answer import Package

VERSION = "5.23.0"

MODELS = tuple(
    replace(
        family,
        code=f"tests/support/families.py or rare_families.py, read in the modelling code of transformers {VERSION}. {family.code}",
    )
    for family in {**families.families(), **rare_families.families()}.values()
    if not family.name.startswith("torch ")
)

PACKAGE = Package((f"transformers=={VERSION}",), MODELS, installed=True)
