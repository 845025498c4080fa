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


CHANGES = {  # of global variables
    "NUMBER": lambda _: globals().update(NUMBER=NUMBER + 1),
    "NESTED": lambda _: NESTED["calls"][0]["first"].append(1),
    "TENSORS": lambda _: TENSORS["t"].add_(1),
    "ARRAY": lambda _: ARRAY.put(1, ARRAY[1] + 1),
    "NUMPY_GENERATOR": lambda _: NUMPY_GENERATOR.random(),
    "LOCAL": lambda _: vars(LOCAL).update(calls=len(vars(LOCAL)), last=object()),
    "VARIABLE": lambda _: VARIABLE.set(VARIABLE.get() + 1),
    "OBJECT": lambda _: setattr(OBJECT, "last", object()),
    "Registry": lambda _: Registry.calls.append(1),
    "ADDED": lambda _: globals().update(ADDED=[1]),
}
UNRESTORED = {name: (hold_nothing, change) for name, change in CHANGES.items()} | {
    "the place of a count": (lambda file: itertools.count(), next),
    "the place of a generator": (lambda file: (k for k in range(99)), next),
    "the place of a TextIOWrapper": (lambda file: file, lambda file: file.write("called")),
    "the ContextVar calls, which had no value": (
        lambda file: contextvars.ContextVar("calls"), lambda variable: variable.set(1),
    ),
}  # fmt: skip
