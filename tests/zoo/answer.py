"""Form of the answers: a package with its models, and what the residual streams of each are."""

import importlib
from dataclasses import dataclass
from functools import partial

from addnorm import Learned, Row
from support.answers import ANY, CONFORMER_ROWS, HALF, IN, Answer, stream  # noqa: F401 (the answers import them from here)
from support.families import Model, ids, noise, vectors  # noqa: F401 (likewise)

VECTOR = Learned(1.0, per_feature=True)
NUMBER = Learned(1.0)
BARE = Row()


@dataclass(frozen=True)
class Package:
    """A package in its pinned version, with its models.

    Args:
        requirements: everything that is installed for it beside torch and numpy, pinned, itself first; installed without dependencies.
        models: the models, by what `inspect` must say of them.
        remove: paths in its environment that are deleted: libraries that need CUDA, which the models do not.
        stubs: modules that it imports and the models do not use; empty modules take their place.
        installed: the project's own environment has it.
    """

    requirements: tuple[str, ...]
    models: tuple[Model, ...]
    remove: tuple[str, ...] = ()
    stubs: tuple[str, ...] = ()
    installed: bool = False

    @property
    def name(self):
        """The name in the package index."""
        return self.requirements[0].partition("==")[0]


def model(name, make, inputs, *answer, also=(), why="", args=(), **options):
    """Return a model with its answer.

    Args:
        name: name of the model in its package.
        make: function that makes it, or the path of its class: "timm.models.cait:Cait".
        inputs: see `Model`.
        answer: its streams, and the code in which they were read.
        also: other streams that the code admits as well.
        why: why no rows describe the model, if none do.
        args, options: arguments of `make`.
    """
    *streams, code = answer
    make = partial(create, make) if isinstance(make, str) else make
    return Model(
        name, partial(make, *args, **options), inputs, Answer(tuple(streams), why, also=also, has_adds=not why), code
    )


def group(make, inputs, **sizes):
    """Return a function like `model` for models that share these arguments; `of` ends the path of a class."""

    def one_of(name, *answer, of="", inputs=inputs, **options):
        return model(name, make + of if of else make, inputs, *answer, **sizes | options)

    return one_of


def create(path, *args, **options):
    """Return an object of the class with that path."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(*args, **options)


def tokens():
    """Return the ids of two sequences."""
    return (ids(),)


def image(size=16):
    """Return two square images."""
    return (noise(2, 3, size, size),)
