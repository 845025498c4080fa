"""Modules that keep state between calls, each in another way.

`make_model(names)` composes a model of them. Its output depends on every state, so that a state which a tool changes gives other bits.
"""

import functools
import random
import threading
import weakref
from array import array
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy
import torch
from torch import nn

__all__ = ["STATES", "make_model", "seed_all"]

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


class TensorAndFlag(State):
    def setup(self):
        self.t, self.is_ready = torch.zeros(9, D), False

    def value(self, x):
        if not self.is_ready:
            self.t[: x.shape[1]], self.is_ready = table(x), True
        return self.t[: x.shape[1]]


class ReplacedBuffer(State):
    def setup(self):
        self.register_buffer("t", None)

    def value(self, x):
        self.t = table(x) if self.t is None else self.t + 1
        return self.t


class NewAttribute(State):
    def value(self, x):
        if not hasattr(self, "t"):
            self.t = table(x) * x.mean()
        self.t *= 2
        return self.t


class DeletedAttribute(State):
    def setup(self):
        self.first = 3.0

    def value(self, x):
        value = getattr(self, "first", 1.0)
        vars(self).pop("first", None)
        return value


class TensorInDict(State):
    def setup(self):
        self.cache = {"t": torch.zeros(9, D), "n": 0}

    def value(self, x):
        if x.shape[1] > self.cache["n"]:
            self.cache["t"][: x.shape[1]] = table(x)
            self.cache["n"] = x.shape[1]
        return self.cache["t"][: x.shape[1]]


class ViewOfBuffer(State):
    def setup(self):
        self.register_buffer("t", torch.zeros(2, D))
        self.row = self.t[1]

    def value(self, x):
        self.row += 1
        return self.t.sum(0)


class CachedProperty(State):
    @functools.cached_property
    def t(self):
        return torch.zeros(D)

    def value(self, x):
        self.t.add_(1)
        return self.t


@functools.lru_cache
def counter(name):
    return [0]


class CachedFunction(Fresh):
    def setup(self):
        counter.cache_clear()

    def grow(self):
        counter("calls")[0] += 1

    def count(self):
        return counter("calls")[0]


class CachedMethod(Fresh):
    @functools.cache  # noqa: B019
    def cell(self):
        return [0]

    def grow(self):
        self.cell()[0] += 1

    def count(self):
        return self.cell()[0]


# Counters in containers and objects.


class Number(Fresh):
    n = 0

    def grow(self):
        self.n += 1

    def count(self):
        return self.n


class NestedContainers(Fresh):
    def setup(self):
        self.nested = ({"a": [{1: ([],)}]},)

    def grow(self):
        self.nested[0]["a"][0][1][0].append(1)

    def count(self):
        return len(self.nested[0]["a"][0][1][0])


class SetOfNumbers(Fresh):
    def setup(self):
        self.numbers = {1}

    def grow(self):
        self.numbers.add(len(self.numbers) + 1)

    def count(self):
        return sum(self.numbers)


class Deque(Fresh):
    def setup(self):
        self.last = deque([1, 2, 3], maxlen=3)

    def grow(self):
        self.last.append(self.last[-1] + 1)

    def count(self):
        return sum(self.last)


class OrderOfDict(Fresh):
    def setup(self):
        self.order = OrderedDict.fromkeys((1, 2, 3))

    def grow(self):
        self.order.move_to_end(next(iter(self.order)))

    def count(self):
        return next(iter(self.order))


class Object(Fresh):
    def setup(self):
        self.other = SimpleNamespace(inner=type("Holder", (), {})())
        self.other.inner.n = 0

    def grow(self):
        self.other.inner.n += 1

    def count(self):
        return self.other.inner.n


class Slots(Fresh):
    @dataclass(slots=True)
    class Holder:
        n: int = 0
        calls: list = field(default_factory=list)

    def setup(self):
        self.holder = self.Holder()

    def grow(self):
        self.holder.n += 1
        self.holder.calls.append(1)

    def count(self):
        return self.holder.n + len(self.holder.calls)


class ObjectInTuple(Fresh):
    Pair = namedtuple("Pair", "a b")

    def setup(self):
        self.pair = self.Pair(1, SimpleNamespace(n=0))

    def grow(self):
        self.pair.b.n += 1

    def count(self):
        return self.pair.b.n


class NumpyArray(Fresh):
    def setup(self):
        self.numbers = numpy.zeros(2)

    def grow(self):
        self.numbers[1] += 1

    def count(self):
        return self.numbers.sum()


class Bytes(Fresh):
    def setup(self):
        self.bytes, self.array = bytearray(2), array("i", [0])

    def grow(self):
        self.bytes[1] += 1
        self.array.append(1)

    def count(self):
        return self.bytes[1] + len(self.array)


class ThreadLocal(Fresh):
    def setup(self):
        self.local = threading.local()

    def grow(self):
        self.local.n = self.count() + 1

    def count(self):
        return getattr(self.local, "n", 0)


KEPT = []  # objects that a model knows by weak references


class WeakReference(Fresh):
    class Holder:
        n = 0

    def setup(self):
        KEPT[:] = [self.Holder()]
        self.reference = weakref.ref(KEPT[0])

    def grow(self):
        self.reference().n += 1

    def count(self):
        return self.reference().n


class WeakKeys(Fresh):
    def setup(self):
        self.key = nn.Identity()
        self.by_module = weakref.WeakKeyDictionary()

    def grow(self):
        self.by_module[self.key] = self.count() + 1

    def count(self):
        return self.by_module.get(self.key, 0)


# Classes and functions.


class ClassAttribute(Fresh):
    n = 0

    def setup(self):
        type(self).n = 0

    def grow(self):
        type(self).n += 1

    def count(self):
        return self.n


class ContainerOfClass(Fresh):
    cache = []  # noqa: RUF012

    def setup(self):
        self.cache.clear()

    def grow(self):
        self.cache.append(1)

    def count(self):
        return len(self.cache)


class DefaultArgument(Fresh):
    def setup(self):
        self.grow.__defaults__[0].clear()

    def grow(self, cache=[]):  # noqa: B006
        cache.append(1)

    def count(self):
        return len(self.grow.__defaults__[0])


class FunctionAttribute(Fresh):
    def setup(self):
        vars(type(self).grow).pop("n", None)

    def grow(self):
        type(self).grow.n = self.count() + 1

    def count(self):
        return getattr(type(self).grow, "n", 0)


class Closure(Fresh):
    def setup(self):
        n = 0

        def grow():
            nonlocal n
            n += 1

        self.grow, self.count = grow, lambda: n


class Partial(Fresh):
    def setup(self):
        self.grow = functools.partial(lambda seen, key: seen.update({len(seen): key}), {}, key=1)

    def count(self):
        return len(self.grow.args[0])


class ReplacedMethod(State):
    def value(self, x):
        self.value = self.later
        return 1.0

    def later(self, x):
        return 2.0


class ReplacedClass(State):
    def value(self, x):
        self.__class__ = OtherClass
        return 1.0


class OtherClass(ReplacedClass):
    def value(self, x):
        return 2.0


del STATES["Fresh"], STATES["OtherClass"]


# Tensors.


class WrittenParameter(State):
    def setup(self):
        self.w = nn.Parameter(torch.zeros(D))
        self.register_buffer("is_ready", torch.tensor(0))

    def value(self, x):
        if not self.is_ready:
            with torch.no_grad():
                self.w.copy_(x.mean((0, 1)))
            self.is_ready.fill_(1)
        return self.w


class Gradient(State):
    def setup(self):
        self.w = nn.Parameter(torch.ones(D))

    def value(self, x):
        if self.w.grad is None:
            self.w.grad = torch.zeros_like(self.w)
        self.w.grad += 1
        return self.w.grad.clone()


class RequiresGrad(State):
    def setup(self):
        self.w = nn.Parameter(torch.ones(D))

    def value(self, x):
        before = self.w.requires_grad
        self.w.requires_grad_(not before)
        return 1.0 + before


class Graph(State):  # a buffer that keeps the graph of what was written into it
    def setup(self):
        self.w = nn.Parameter(torch.ones(D))
        self.register_buffer("t", torch.zeros(D))

    def value(self, x):
        self.t.copy_(self.t.detach() + self.w)
        return self.t.detach() + self.t.is_leaf


class ReplacedData(State):
    def setup(self):
        self.w = nn.Parameter(torch.ones(D))

    def value(self, x):
        self.w.data = self.w.data + 1
        return self.w


class Shape(State):
    def setup(self):
        self.t = torch.arange(float(2 * D)).view(2, D)

    def value(self, x):
        self.t.t_()
        return self.t.reshape(-1)[:D]


class AttributeOfTensor(State):
    def setup(self):
        self.w = nn.Parameter(torch.ones(D))

    def value(self, x):
        self.w.calls = getattr(self.w, "calls", 0) + 1
        return self.w * self.w.calls


class SharedTensor(State):
    def setup(self):
        self.first, self.list = torch.zeros(D), []
        self.second, self.other = SimpleNamespace(t=self.first, list=self.list), nn.Identity()
        self.other.t = self.first.detach()

    def value(self, x):
        self.second.t += 1
        self.list.append(1)
        self.first = self.first if len(self.second.list) < 2 else self.first.clone()
        return self.first + self.other.t + len(self.second.list)


class Sparse(State):
    def setup(self):
        self.register_buffer("t", torch.eye(D).to_sparse())

    def value(self, x):
        self.t.mul_(2)
        return self.t.to_dense().sum(0)


# Modules.


class Registered(State):
    def value(self, x):
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(2 * torch.ones(D))
            self.register_buffer("offset", torch.ones(D))
            self.inner = nn.Linear(D, D)
            return self.scale
        return self.inner(self.scale + self.offset)


class ParameterList(Fresh):
    def setup(self):
        self.weights = nn.ParameterList([torch.ones(D)])

    def grow(self):
        self.weights.append(torch.ones(D))

    def count(self):
        return len(self.weights)


class Hook(State):
    def setup(self):
        self.inner = nn.Identity()

    def value(self, x):
        y = self.inner(x)
        self.inner.register_forward_hook(lambda module, args, y: y + 1)
        return y


class TrainingFlag(State):
    def value(self, x):
        self.train(not self.training)
        return 1.0 + self.training


class LazyInList(State):
    def setup(self):
        self.hidden = [nn.LazyLinear(D)]

    def value(self, x):
        return self.hidden[0](x)


class RunningStatistics(State):
    def setup(self):
        self.norm = nn.BatchNorm1d(D)

    def value(self, x):
        self.norm.train()
        self.norm(x.flatten(0, 1))
        return self.norm.eval()(x.flatten(0, 1)).view_as(x)


class SpectralNorm(State):
    def setup(self):
        self.f = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)).train()

    def value(self, x):
        return self.f.train()(x)


# Random numbers.


class Generator(State):
    def setup(self):
        self.generator = torch.Generator().manual_seed(1)

    def value(self, x):
        return torch.rand(D, generator=self.generator) + torch.rand(D)


class PythonGenerators(State):
    def setup(self):
        self.generator = random.Random(1)

    def value(self, x):
        return self.generator.random() + random.random() + self.generator.gauss(0, 1)


class NumpyGenerators(State):
    def setup(self):
        self.generator, self.state = numpy.random.default_rng(1), numpy.random.RandomState(1)

    def value(self, x):
        return float(self.generator.random() + self.state.normal() + numpy.random.rand())  # noqa: NPY002


class Block(nn.Module):
    """Pre-LN sublayer with state."""

    def __init__(self, state):
        super().__init__()
        self.norm, self.state, self.f = nn.LayerNorm(D), state, nn.Linear(D, D)

    def forward(self, x):
        return x + self.f(torch.tanh(self.state(self.norm(x))))


def make_model(*names):
    """Return a model of modules with these states, always the same for the same names."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(STATES[name]()) for name in names), nn.LayerNorm(D)).eval()


def seed_all():
    """Seed the global random generators."""
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)  # noqa: NPY002
