"""Modules that keep state in tensors, modules and generators of random numbers, each in another way."""

import random
from types import SimpleNamespace

import numpy
import torch
from torch import nn

from support.stateful_models import STATES, D, State


class Learned(State):
    def setup(self):
        self.w = nn.Parameter(torch.ones(D))


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


class Gradient(Learned):
    def value(self, x):
        if self.w.grad is None:
            self.w.grad = torch.zeros_like(self.w)
        self.w.grad += 1
        return self.w.grad.clone()


class RequiresGrad(Learned):
    def value(self, x):
        before = self.w.requires_grad
        self.w.requires_grad_(not before)
        return 1.0 + before


class Graph(Learned):  # a buffer that keeps the graph of what was written into it
    def setup(self):
        super().setup()
        self.register_buffer("t", torch.zeros(D))

    def value(self, x):
        self.t.copy_(self.t.detach() + self.w)
        return self.t.detach() + self.t.is_leaf


class ReplacedData(Learned):
    def value(self, x):
        self.w.data = self.w.data + 1
        return self.w


class WrittenByNumpy(State):
    def setup(self):
        self.register_buffer("t", torch.zeros(D))
        self.other = torch.zeros(D)

    def value(self, x):
        for t in (self.t, self.other):
            t.numpy()[:] += 1
        return self.t + self.other


class Shape(State):
    def setup(self):
        self.t = torch.arange(float(2 * D)).view(2, D)

    def value(self, x):
        self.t.t_()
        return self.t.reshape(-1)[:D]


class AttributeOfTensor(Learned):
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


class Hook(State):
    def setup(self):
        self.inner = nn.Identity()

    def value(self, x):
        y = self.inner(x)
        self.inner.register_forward_hook(lambda module, args, y: y + 1)
        return y


class LazyInList(State):
    def setup(self):
        self.hidden = [nn.LazyLinear(D)]

    def value(self, x):
        return self.hidden[0](x)


class RemovedParametrization(State):
    def setup(self):
        self.f = nn.utils.parametrizations.orthogonal(nn.Linear(D, D))

    def value(self, x):
        if nn.utils.parametrize.is_parametrized(self.f):
            nn.utils.parametrize.remove_parametrizations(self.f, "weight")
            return self.f(x)
        return self.f(x) + 1.0


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


del STATES["Learned"]
