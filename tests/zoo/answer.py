"""Form of the answers: a package with its models, and what the residual streams of each are."""

import importlib
from dataclasses import dataclass

from addnorm import Learned, Row
from support.answers import ANY, CONFORMER_ROWS, HALF, IN, Answer, stream
from support.families import Model, ids, noise, vectors

__all__ = [
    "ANY",
    "BARE",
    "CONFORMER_ROWS",
    "HALF",
    "IN",
    "NUMBER",
    "VECTOR",
    "Model",
    "Package",
    "image",
    "make",
    "model",
    "refuse",
    "stream",
    "tokens",
    "vectors",
]

VECTOR = Learned(1.0, per_feature=True)
NUMBER = Learned(1.0)
BARE = Row()


@dataclass(frozen=True)
class Package:
    """A package in its pinned version, with its models.

    Args:
        name: name in the package index.
        requirements: everything that is installed for it beside torch and numpy, pinned; installed without dependencies.
        models: the models, by what `inspect` must say of them.
        remove: paths in its environment that are deleted: libraries that need CUDA, which the models do not.
        stubs: modules that it imports and the models do not use; empty modules take their place.
        installed: the project's own environment has it.
    """

    name: str
    requirements: tuple[str, ...]
    models: tuple[Model, ...]
    remove: tuple[str, ...] = ()
    stubs: tuple[str, ...] = ()
    installed: bool = False
    remark: str = ""


def refuse(name, make, inputs, why, code):
    """Return a model that no rows describe."""
    return Model(name, make, inputs, Answer((), why, has_adds=False), code)


def model(
    name,
    make,
    inputs,
    *streams,
    code,
    also=(),
):
    """Return a model with these streams, or with other ones that the code admits as well."""
    return Model(name, make, inputs, Answer(streams, also=also), code)


def tokens():
    """Return the ids of two sequences."""
    return (ids(),)


def image(size=16):
    """Return two square images."""
    return (noise(2, 3, size, size),)


def make(path, *args, **options):
    """Return a function that imports a class and makes an object of it: `make("timm.models.cait:Cait", depth=2)`."""
    module, _, name = path.partition(":")
    return lambda: getattr(importlib.import_module(module), name)(*args, **options)
