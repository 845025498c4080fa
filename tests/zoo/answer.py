"""Form of the answers: a package with its models, and what the residual streams of each are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from addnorm import Learned, Row
from support.answers import ANY, Answer, Stream, stream
from support.families import Model

__all__ = ["ANY", "BARE", "IN", "NUMBER", "VECTOR", "Model", "Package", "model", "refuse", "stream"]

VECTOR = Learned(1.0, per_feature=True)
NUMBER = Learned(1.0)
IN = Row(norm_in=True)
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


def refuse(name: str, make: Callable[[], nn.Module], inputs: Callable[[], Any], why: str, code: str) -> Model:
    """Return a model that no rows describe."""
    return Model(name, make, inputs, Answer((), why, has_adds=False), code)


def model(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Callable[[], Any],
    *streams: Stream,
    code: str,
    also: tuple[Stream, ...] = (),
) -> Model:
    """Return a model with these streams, or with other ones that the code admits as well."""
    return Model(name, make, inputs, Answer(streams, also=also), code)
