"""Small models for the tests of the proof, and changed copies of them."""

import copy
import math
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import addnorm
from addnorm.fusion.proof import prove
from support.random_models.graphs import Graph
from support.stream_steps import noise
from support.wrong_gradient import ChangedGradient

X = noise(2, 5, 16, seed=1)


def prove_call(model, after=None, x=X):
    """Return the proof that a model and another callable, or the model again, are equal on one input."""
    return prove(model, model, model if after is None else after, (x,), {})


def make_layer(dropout=0.0):
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, layer_norm_eps=1e-12)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return made


def with_library_norms(model):
    """Return the model with norms that round differently."""

    def after(*args, **kwargs):
        ours = lambda x, shape, weight=None, bias=None, eps=1e-5: addnorm.layer_norm(x, weight, bias, eps=eps)  # noqa: E731
        with mock.patch.object(F, "layer_norm", ours):
            return model(*args, **kwargs)

    return after


def change_copy(model, change):
    """Return a changed copy of the model that uses the model's parameters."""
    twin = copy.deepcopy(model)
    change(twin)
    return lambda *args, **kwargs: functional_call(twin, dict(model.named_parameters()), args, kwargs)


def change_gradient(model, name, change):
    """Return the model with one of its gradients changed."""
    return lambda *args: functional_call(
        model, {n: ChangedGradient.apply(p, change) if n == name else p for n, p in model.named_parameters()}, args
    )


def find_difference(differences, name):
    return next(difference for difference in differences if difference.name == name)


class Function(Graph):
    """Model from a function, with a parameter `w`."""

    def __init__(self, function, *shape, **buffers):
        super().__init__(function)
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, math.prod(shape)).view(shape))
        for name, value in buffers.items():
            self.register_buffer(name, value)


FAULTS = {
    "another eps": lambda m: change_copy(m, lambda t: setattr(t.norm1, "eps", 1e-5)),
    "another activation": lambda m: change_copy(m, lambda t: setattr(t, "activation", F.silu)),
    "another gradient of a weight": lambda m: change_gradient(m, "norm1.weight", lambda g: g * 1.001),
    "another gradient of a matrix": lambda m: change_gradient(m, "linear1.weight", lambda g: g * 1.001),
    "one element of a gradient": lambda m: change_gradient(m, "linear1.bias", lambda g: g + 1e-3 * F.one_hot(torch.tensor(3), 32)),
    "no gradient": lambda m: change_gradient(m, "norm1.bias", lambda g: None),
    "a gradient of zeros": lambda m: change_gradient(m, "norm1.bias", torch.zeros_like),
    "not a number": lambda m: lambda x: m(x).index_fill(-1, torch.tensor(3), math.nan),
    "infinity": lambda m: lambda x: m(x).index_fill(-1, torch.tensor(3), math.inf),
    "another dtype": lambda m: lambda x: m(x).double(),
    "another shape": lambda m: lambda x: m(x)[:1],
    "another structure": lambda m: lambda x: (m(x),),
    "one more": lambda m: lambda x: {"output": m(x), "more": x},
    "none": lambda m: lambda x: None,
    "a graph cut off": lambda m: lambda x: m(x).detach(),
    "only without gradients": lambda m: lambda x: m(x) * (1.0 if torch.is_grad_enabled() else 1.001),
    "only with gradients": lambda m: lambda x: m(x) * (1.001 if torch.is_grad_enabled() else 1.0),
}  # fmt: skip
