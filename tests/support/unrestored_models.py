"""Modules that keep state where no tool restores it: in global variables, iterators and files.

`UNRESTORED` has each class with the name of what it changes, as a warning states it.
"""

import contextvars
import itertools
import threading

import numpy
import torch
from torch import nn

__all__ = ["UNRESTORED", "Unrestored"]


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
    """Module whose call changes `state`."""

    def __init__(self, file):
        super().__init__()
        self.f = nn.Linear(4, 4)
        self.setup(file)

    def setup(self, file):
        pass

    def forward(self, x):
        self.change()
        return x + self.f(x)


class Number(Unrestored):
    def change(self):
        global NUMBER  # noqa: PLW0603
        NUMBER += 1


class Nested(Unrestored):
    def change(self):
        NESTED["calls"][0]["first"].append(1)


class TensorInDict(Unrestored):
    def change(self):
        TENSORS["t"].add_(1)


class Array(Unrestored):
    def change(self):
        ARRAY[1] += 1


class NumpyGenerator(Unrestored):
    def change(self):
        NUMPY_GENERATOR.random()


class ThreadLocal(Unrestored):
    def change(self):
        LOCAL.calls = getattr(LOCAL, "calls", 0) + 1


class Context(Unrestored):
    def change(self):
        VARIABLE.set(VARIABLE.get() + 1)


class Attribute(Unrestored):
    def change(self):
        OBJECT.last = object()


class ClassAttribute(Unrestored):
    def change(self):
        Registry.calls.append(1)


class NewVariable(Unrestored):
    def change(self):
        globals()["ADDED"] = [1]

    def setup(self, file):
        globals().pop("ADDED", None)


class Count(Unrestored):
    def setup(self, file):
        self.numbers = itertools.count()

    def change(self):
        next(self.numbers)


class Generator(Unrestored):
    def setup(self, file):
        self.numbers = (k for k in range(99))

    def change(self):
        next(self.numbers)


class ListIterator(Unrestored):
    def setup(self, file):
        self.numbers = iter([*range(99)])

    def change(self):
        next(self.numbers)


class File(Unrestored):
    def setup(self, file):
        self.file = file

    def change(self):
        self.file.write("called")


class NewContext(Unrestored):
    def setup(self, file):
        self.variable = contextvars.ContextVar("calls")

    def change(self):
        self.variable.set(1)


UNRESTORED = {
    Number: "NUMBER", Nested: "NESTED", TensorInDict: "TENSORS", Array: "ARRAY", NumpyGenerator: "NUMPY_GENERATOR",
    ThreadLocal: "LOCAL", Context: "VARIABLE", Attribute: "OBJECT", ClassAttribute: "Registry", NewVariable: "ADDED",
    Count: "the place of a count", Generator: "the place of a generator", ListIterator: "the place of a list_iterator",
    File: "the place of a TextIOWrapper", NewContext: "the ContextVar calls, which had no value",
}  # fmt: skip
