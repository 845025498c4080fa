"""Form of an answer: a model of another package, and what its residual streams are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from addnorm import Learned, Row

KINDS = {"a": "attention", "c": "cross-attention", "f": "feed-forward", "o": "other"}  # "?": any kind
VECTOR = Learned(1.0, per_feature=True)
NUMBER = Learned(1.0)
IN = Row(norm_in=True)
BARE = Row()


@dataclass(frozen=True)
class Stream:
    """Facts of one residual stream.

    Args:
        wiring: its name in `addnorm.wirings`, or several where the code admits more than one, joined by "|"; None if it has none.
        letters: kinds of the sublayers in the order of depth, as letters of `KINDS`; "?" where the code admits several.
        norm: kind of the norms, or several joined by "|"; None for a stream without norms.
        final_norm: whether x_L is normalized; None where only a pooled or selected part of it is, or where it depends on the reader.
        embedding_norm: whether x_0 is the output of a norm; None where it depends on the reader.
        rows: rows of the sublayers, repeated to their number; required where no wiring is named, since they state why.
    """

    wiring: str | None
    letters: str
    norm: str | None = "layer"
    final_norm: bool | None = True
    embedding_norm: bool | None = False
    rows: tuple[Row, ...] = ()

    @property
    def names(self) -> tuple[str | None, ...]:
        """The names that are right."""
        return (None,) if self.wiring is None else tuple(None if n == "none" else n for n in self.wiring.split("|"))

    def expected_rows(self) -> tuple[Row, ...]:
        """Return one row for each sublayer, or nothing if the wiring says it."""
        return tuple(self.rows[k % len(self.rows)] for k in range(len(self.letters))) if self.rows else ()


@dataclass(frozen=True)
class Model:
    """A small model of a package with random weights, and its answer.

    Args:
        name: unique name in its package.
        make: builds the model; it imports the package.
        inputs: positional arguments, or keyword arguments in a dict.
        streams: its streams, in any order; empty if `refuse` is set.
        code: lines of the package's code from which the answer was read.
        refuse: why no set of rows describes the model. Then no wiring may be named and `inspect` must not close in silence.
        also: a second answer that the code admits as well.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...] | dict[str, Any]]
    streams: tuple[Stream, ...]
    code: str
    refuse: str = ""
    also: tuple[Stream, ...] = ()


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
    return Model(name, make, inputs, (), code, refuse=why)


def model(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Callable[[], Any],
    *streams: Stream,
    code: str,
    also: tuple[Stream, ...] = (),
) -> Model:
    """Return a model with these streams."""
    return Model(name, make, inputs, streams, code, also=also)
