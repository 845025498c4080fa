"""Modules that keep state between calls, each in another way; stateful_functions.py and stateful_tensors.py have more.

`make_model(names)` composes a model of them. Its output depends on every state, so that a state which a tool changes gives other bits.
"""

import contextvars
import functools
import queue
import random
import threading
import weakref
from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy
import torch
from torch import nn

D = 4
STATES = {}


class State(nn.Module):
    """Module with state: `setup` makes it, `value` reads and changes it and returns a number, or a tensor `(D,)` or `(T, D)`."""

    def __init_subclass__(cls):
        STATES[cls.__name__] = cls

    def __init__(self):
        super().__init__()
        self.setup()

    def setup(self):
        pass

    def forward(self, x):
        return x + 0.1 * self.value(x)


def table(x):
    return torch.arange(x.shape[1]).float()[:, None] * torch.arange(1, D + 1) / D


class Fresh(State):  # a counter of calls in this form: `grow` adds one, `count` reads
    def value(self, x):
        self.grow()
        return float(self.count())


# Caches that are filled in the first call.


class BufferAndNumber(State):
    def setup(self):
        self.register_buffer("t", torch.zeros(9, D))
        self.length = 0

    def value(self, x):
        n = x.shape[1]
        if n > self.length:
            self.t[:n] = table(x)
            self.length = n
        return self.t[:n]


class NewAttribute(State):
    def value(self, x):
        if not hasattr(self, "t"):
            self.t = table(x) * x.mean()
        self.t *= 2
        return self.t


class ViewOfBuffer(State):
    def setup(self):
        self.register_buffer("t", torch.zeros(2, D))
        self.row = self.t[1]

    def value(self, x):
        self.row += 1
        return self.t.sum(0)


# Counters in containers and objects.


class Held(Fresh):
    """Counter in an object that the module holds.

    Args:
        make: makes the object.
        add, read: functions of the object.
    """

    def __init__(self, make, add, read):
        super().__init__()
        self.held, self.add, self.read = make(), add, read

    def grow(self):
        self.add(self.held)

    def count(self):
        return self.read(self.held)


def count_calls(item):
    return getattr(item, "n", 0)


def add_call(item):
    item.n = count_calls(item) + 1


@dataclass(slots=True)
class Slots:
    n: int = 0
    calls: list = field(default_factory=list)


def make_variable():
    variable = contextvars.ContextVar("calls")
    variable.set(0)
    return variable


class Holder:
    """An object of a class."""


KEPT = []  # objects that a model knows by weak references


def make_reference():
    KEPT[:] = [Holder()]
    return weakref.ref(KEPT[0])


HELD = {
    "NestedContainers": (
        lambda: ({"a": [{1: ([],)}]},), lambda t: t[0]["a"][0][1][0].append(1), lambda t: len(t[0]["a"][0][1][0])
    ),
    "SetOfNumbers": (lambda: {1}, lambda numbers: numbers.add(len(numbers) + 1), sum),
    "Deque": (lambda: deque([1, 2, 3], maxlen=3), lambda last: last.append(last[-1] + 1), sum),
    "OrderOfDict": (
        lambda: OrderedDict.fromkeys((1, 2, 3)), lambda order: order.move_to_end(next(iter(order))), lambda order: next(iter(order))
    ),
    "Object": (
        lambda: SimpleNamespace(inner=Holder()), lambda other: add_call(other.inner), lambda other: count_calls(other.inner)
    ),
    "NumpyArray": (lambda: numpy.zeros(2), lambda numbers: numbers.put(1, numbers[1] + 1), numpy.sum),
    "ResizedArray": (lambda: numpy.zeros(2), lambda numbers: numbers.resize(len(numbers) + 1, refcheck=False), len),
    "ReshapedArray": (
        lambda: numpy.arange(6.0), lambda numbers: setattr(numbers, "shape", (2, 3) if numbers.ndim == 1 else (6,)), numpy.ndim
    ),
    "Slots": (Slots, lambda slots: add_call(slots) or slots.calls.append(1), lambda slots: slots.n + len(slots.calls)),
    "Context": (make_variable, lambda variable: variable.set(variable.get() + 1), lambda variable: variable.get()),
    "Bytes": (lambda: bytearray(2), lambda numbers: numbers.__setitem__(1, numbers[1] + 1), sum),
    "Array": (lambda: array("i", [0]), lambda numbers: numbers.append(1), len),
    "WeakReference": (make_reference, lambda reference: add_call(reference()), lambda reference: count_calls(reference())),
    "WeakKeys": (
        lambda: (nn.Identity(), weakref.WeakKeyDictionary()), lambda held: held[1].update({held[0]: held[1].get(held[0], 0) + 1}),
        lambda held: held[1].get(held[0], 0),
    ),
    "Queue": (queue.Queue, lambda calls: calls.put(1), queue.Queue.qsize),
    "ThreadLocal": (threading.local, add_call, count_calls),
}  # fmt: skip
STATES |= {name: functools.partial(Held, *functions) for name, functions in HELD.items()}
del STATES["Held"]
del STATES["Fresh"]


class Block(nn.Module):
    """Pre-LN sublayer with state."""

    def __init__(self, state):
        super().__init__()
        self.norm, self.state, self.f = nn.LayerNorm(D), state, nn.Linear(D, D)

    def forward(self, x):
        return x + self.f(torch.tanh(self.state(self.norm(x))))


def make_model(*names):
    """Return a model of modules with these states, always the same for the same names, and seed the global random generators."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(STATES[name]()) for name in names), nn.LayerNorm(D)).eval()
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)  # noqa: NPY002
    return model
