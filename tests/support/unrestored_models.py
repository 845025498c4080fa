"""Modules that keep state where no tool restores it: in global variables, iterators and files.

`UNRESTORED` has for each the name of what it changes, as a warning states it: the object that the module holds, and the change.
"""

import contextvars
import itertools
import threading

import numpy
import torch
from torch import nn


class Registry:
    """Class that no module refers to, with state of its own."""

    calls = []  # noqa: RUF012


NUMBER = 0
NESTED = {"calls": [{"first": []}]}
TENSORS = {"t": torch.zeros(())}
ARRAY = numpy.zeros(2)
NUMPY_GENERATOR = numpy.random.default_rng(0)
LOCAL = threading.local()
VARIABLE = contextvars.ContextVar("VARIABLE", default=0)
OBJECT = Registry()


class Unrestored(nn.Module):
    """Module whose call changes what it holds, or a global variable."""

    def __init__(self, name, file):
        super().__init__()
        self.f = nn.Linear(4, 4)
        make, self.change = UNRESTORED[name]
        self.held = make(file)

    def forward(self, x):
        self.change(self.held)
        return x + self.f(x)


def hold_nothing(file):
    globals().pop("ADDED", None)


UNRESTORED = {
    "NUMBER": (hold_nothing, lambda _: globals().update(NUMBER=NUMBER + 1)),
    "NESTED": (hold_nothing, lambda _: NESTED["calls"][0]["first"].append(1)),
    "TENSORS": (hold_nothing, lambda _: TENSORS["t"].add_(1)),
    "ARRAY": (hold_nothing, lambda _: ARRAY.put(1, ARRAY[1] + 1)),
    "NUMPY_GENERATOR": (hold_nothing, lambda _: NUMPY_GENERATOR.random()),
    "LOCAL": (hold_nothing, lambda _: vars(LOCAL).update(calls=len(vars(LOCAL)), last=object())),
    "VARIABLE": (hold_nothing, lambda _: VARIABLE.set(VARIABLE.get() + 1)),
    "OBJECT": (hold_nothing, lambda _: setattr(OBJECT, "last", object())),
    "Registry": (hold_nothing, lambda _: Registry.calls.append(1)),
    "ADDED": (hold_nothing, lambda _: globals().update(ADDED=[1])),
    "the place of a count": (lambda file: itertools.count(), next),
    "the place of a generator": (lambda file: (k for k in range(99)), next),
    "the place of a list_iterator": (lambda file: iter([*range(99)]), next),
    "the place of a TextIOWrapper": (lambda file: file, lambda file: file.write("called")),
    "the ContextVar calls, which had no value": (
        lambda file: contextvars.ContextVar("calls"), lambda variable: variable.set(1),
    ),
}  # fmt: skip
