"""Constructs with gates and conditions, with several states, with skips, and with mistakes: rows describe few of them."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from addnorm import Row
from support.answers import Site
from support.random_models.constructs import SKIP, construct
from support.random_models.graphs import POST, PRE, Graph, flatten, through
from support.random_models.layouts import Layout
from support.random_models.rows import Plan

SANDWICH = Plan(norm_in=True, norm_branch=True)


def _undescribed(kit, step, reason, plan=PRE, **modules):
    """Build a model whose sublayers run `step(model, k, part, x)`; no row expresses them."""
    return kit.loop(kit.layers(plan=plan), step, facts={"reason": reason}, last=kit.norm(), **modules)


# --- gates ----------------------------------------------------------------------------------------------------------------


@construct("highway gate")
def highway(kit):
    how = kit.rng.choice(("t y + (1 - t) x", "x + t (y - x)", "lerp", "(1 - t) x + t y, two gates"))

    def step(model, k, part, x):
        y = part.branch(x)
        t = torch.sigmoid(model.gates[k](x if k % 2 else part.norm_in(x)))
        match how:
            case "x + t (y - x)":
                return x + t * (y - x)
            case "lerp":
                return torch.lerp(x, y, t)
            case "t y + (1 - t) x":
                return t * y + (1 - t) * x
        return torch.sigmoid(model.others[k](x)) * x + t * y

    gates, others = kit.linears(), kit.linears()
    return _undescribed(kit, step, "the stream is multiplied by a gate of the data", gates=gates, others=others)


@construct("gated recurrent unit")
def recurrent_gate(kit):
    is_written = kit.rng.random() < 0.5

    def step(model, k, part, x):
        y = part.branch(x)
        if not is_written:
            return model.cells[k](y.flatten(0, 1), x.flatten(0, 1)).view_as(x)
        r, z = torch.sigmoid(model.r[k](y) + model.u[k](x)), torch.sigmoid(model.z[k](y) + model.v[k](x) - 2)
        h = torch.tanh(model.w[k](y) + model.g[k](r * x))
        return (1 - z) * x + z * h

    modules = {name: kit.linears() for name in ("r", "u", "z", "v", "w", "g")} if is_written else {
        "cells": nn.ModuleList(nn.GRUCell(kit.d, kit.d) for _ in range(6))}  # fmt: skip
    return _undescribed(kit, step, "a recurrent cell adds", **modules)


@construct("gate of the stream on the write")
def write_gate(kit):
    """Build x + sigmoid(W x) f(N(x)): the write depends on the stream both with and without its norm."""

    def step(model, k, part, x):
        return x + torch.sigmoid(model.gates[k](x)) * part.branch(x)

    return _undescribed(kit, step, "the sublayer reads the stream with and without its norm", gates=kit.linears())


@construct("condition: shift and scale")
def adaptive_norm(kit):
    return _conditioned(kit, 2)


@construct("condition: shift, scale and gate")
def adaptive_norm_zero(kit):
    return _conditioned(kit, 3)


def _conditioned(kit, count):
    """Build adaLN: a condition changes what sublayers read, and what they write; both are parts of the sublayer."""
    layers, last = kit.parts()
    maps = nn.ModuleList(nn.Linear(5, kit.d * count) for _ in flatten(layers))

    def step(model, k, part, x, c):
        shift, scale, *gate = F.silu(model.maps[k](c))[:, None].chunk(count, -1)
        y = part.f(part.norm_in(x) * (1 + scale) + shift)
        return x + (gate[0] * y if gate else y)

    stream = kit.stream(kit.sites(layers, path=""), final=last)
    inputs = [kit.input(), kit.noise(kit.sizes.batch, 5)]
    return kit.loop(layers, step, inputs=inputs, stream=stream, last=last, maps=maps)


@construct("condition: gate of a sandwich")
def gated_sandwich(kit):
    """Build x + tanh(g(c)) N(f(N(x))) (Lumina): the second norm is no part of the sublayer."""

    def step(model, k, part, x, c):
        return x + torch.tanh(model.maps[k](c)).unsqueeze(1) * part.branch(x)

    maps, condition = kit.linears(inputs=5), kit.noise(kit.sizes.batch, 5)
    layers, last = kit.layers(plan=SANDWICH), kit.norm()
    facts = {"reason": "a gate of a condition multiplies the normed write", "words": ("gate", "condition")}
    stream = kit.stream(kit.sites(layers, row=None), "sandwich")
    return kit.loop(layers, step, inputs=[kit.input(), condition], stream=stream, facts=facts, last=last, maps=maps)


# --- several states -------------------------------------------------------------------------------------------------------


@construct("hyper-connections")
def hyper_connections(kit):
    n, is_dynamic = kit.rng.choice((2, 3)), kit.rng.random() < 0.5
    how = kit.rng.choice(("matmul", "einsum", "list"))

    def run(model, x):
        streams = x.unsqueeze(-2).expand(*x.shape[:-1], n, kit.d)
        for k, part in enumerate(flatten(model.layers)):
            mix = model.mix[k] + (torch.tanh(streams @ model.dynamic[k].weight[:n].T) if is_dynamic else 0.0)
            y = part.branch((model.read[k][:, None] * streams).sum(-2))
            if how == "matmul":
                streams = mix @ streams + model.inject[k][:, None] * y.unsqueeze(-2)
            elif how == "einsum":
                mixed = torch.einsum("...ij,...jd->...id", mix.expand(*x.shape[:-1], n, n), streams)
                streams = mixed + torch.einsum("i,...d->...id", model.inject[k], y)
            else:
                rows = [sum(mix[..., i, j, None] * streams[..., j, :] for j in range(n)) for i in range(n)]
                streams = torch.stack([row + model.inject[k][i] * y for i, row in enumerate(rows)], -2)
        return model.last(streams.sum(-2))

    layers, last = kit.parts()
    count = len(flatten(layers))
    mix, read, inject = (
        nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in range(count)) for shape in ((n, n), (n,), (n,))
    )
    model = Graph(run, layers=layers, last=last, mix=mix, read=read, inject=inject, dynamic=kit.linears(count))
    return kit.build(model, [kit.input()], reason="a matrix mixes several states")


@construct("reversible pair")
def reversible(kit):
    layers, last = kit.parts()
    how = kit.rng.choice(("two inputs", "sum", "cat"))

    def run(model, x, *other):
        a, b = x, other[0] if other else x
        joined = torch.cat((a, b), -1)
        for f, g in model.layers:
            a, b = joined.chunk(2, -1) if how == "cat" else (a, b)
            a = a + f.branch(b)
            b = b + g.branch(a)
            joined = torch.cat((a, b), -1) if how == "cat" else joined
        return model.last((a + b) / 2)

    inputs = [kit.input(), kit.input()] if how == "two inputs" else [kit.input()]
    return kit.build(Graph(run, layers=layers, last=last), inputs, reason="two streams write to each other in turn")


@construct("dense connections")
def dense(kit):
    """Build sublayers that read the weighted sum of all earlier states (DenseFormer)."""
    layers, last = kit.parts()
    count = len(flatten(layers)) + 1
    weights = nn.ParameterList(nn.Parameter(torch.zeros(count)) for _ in range(count))

    def run(model, x):
        states = [x]
        for k, part in enumerate(flatten(model.layers)):
            states.append(part.run(x))
            x = sum(model.weights[k][j] * state for j, state in enumerate(states))
        return model.last(x)

    model = Graph(run, layers=layers, last=last, weights=weights)
    return kit.build(model, [kit.input()], reason="states are mixed over depth")


# --- skips ----------------------------------------------------------------------------------------------------------------


@construct("long skip")
def long_skip(kit):
    layers, last = kit.layers(num_layers=3), kit.norm()

    def run(model, x):
        states = []
        for k, layer in enumerate(model.layers):
            x = x + states[1] if k == 2 else x
            states.append(x)
            x = through(layer, x)
        return model.last(x)

    sites = kit.sites(layers)
    sites.insert(4, SKIP)
    stream = kit.stream(sites, final=last, num_layers=3)
    return kit.build(Graph(run, layers=layers, last=last), [kit.input()], stream)


@construct("x_0 added again")
def first_state_again(kit):
    layers, last = kit.parts()
    scales = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(2 * len(layers)))

    def change(model, n, x, first):
        return model.scales[2 * n] * x + model.scales[2 * n + 1] * first if n else x

    facts = {
        "reason": "between layers x_0 is added to a multiple of the stream",
        "words": ("skip", "factor", "earlier state"),
    }
    stream = kit.stream(kit.sites(layers), final=last)
    return kit.loop(
        layers, lambda m, k, part, x, _: part.run(x), begin=lambda m, x: (x, x), change=change, stream=stream, facts=facts,
        last=last, scales=scales,
    )  # fmt: skip


@construct("skip by concatenation")
def concatenated_skip(kit):
    """Build x = W cat(x, earlier state) in the middle (U-ViT): a new stream begins there."""
    one, two, last, join = kit.layers(num_layers=2), kit.layers(num_layers=2), kit.norm(), nn.Linear(2 * kit.d, kit.d)

    def run(model, x):
        first = through(model.one[0], x)
        x = model.join(torch.cat((through(model.one[1], first), first), -1))
        return model.last(through(flatten(model.two), x))

    parts = ("one", "pre_ln", ""), ("two", "pre_ln", "last")
    return kit.several(run, *parts, inputs=[kit.input()], one=one, two=two, join=join, last=last)


@construct("function of the stream between layers")
def activation_between(kit):
    how = kit.rng.choice((torch.relu, torch.tanh, lambda t: t.clamp(-1, 1), lambda t: t.square(), lambda t: t + 0.5))

    def step(model, k, part, x):
        x = part.run(x)
        return how(x) if k == 1 else x

    return _undescribed(kit, step, "a function changes the stream between two layers")


# --- mistakes and models without a stream ---------------------------------------------------------------------------------


@construct("norms in a row")
def norms_in_a_row(kit):
    more = nn.ModuleList(kit.norm() for _ in range(6))
    return _undescribed(kit, lambda m, k, part, x: m.more[k](part.run(x)), "two norms follow each add", POST, more=more)


@construct("residual counted twice")
def counted_twice(kit):
    return _undescribed(
        kit, lambda m, k, part, x: x + part.norm_out(x + part.f(x)), "the branch contains the stream", POST
    )


@construct("residual of the norm, raw read")
def beside_the_norm(kit):
    return _undescribed(kit, lambda m, k, part, x: part.norm_in(x) + part.f(x), "the norm is on the residual only")


@construct("residual of the norm")
def from_the_norm(kit):
    """Build z = N(x), x' = z + f(z): post-LN from z_0 on, whose last norm is the final one."""
    layers, last = kit.parts()

    def step(model, k, part, x):
        z = part.norm_in(x)
        return z + part.f(z)

    first, *norms = [site.norm_in for site in kit.sites(layers)] + [last.answer("last")]
    sites = [
        replace(site, row=Row(norm_out=True), norm_in=None, norm_out=norm)
        for site, norm in zip(kit.sites(layers), norms, strict=True)
    ]
    return kit.loop(layers, step, stream=kit.stream(sites, "post_ln", embedding_norm=first), last=last)


@construct("no residual connection")
def no_residual(kit):
    is_normed = kit.rng.random() < 0.5

    def step(model, k, part, x):
        return part.branch(x) if is_normed else part.f(x)

    return kit.loop(kit.layers(), step, facts={"reason": "nothing is added", "has_adds": False}, last=kit.norm())


@construct("norm inside the sublayer")
def inner_norm(kit):
    """Build pre-LN whose feed-forward has a norm before its last product (NormFormer)."""
    layers, last = kit.parts()
    for layer in layers:
        f = layer[1].f
        if hasattr(f, "down"):
            f.down = nn.Sequential(nn.LayerNorm(f.down.in_features), f.down)
    return kit.loop(layers, by_hand=True, last=last)


@construct("norms over more than the features")
def other_norms(kit):
    """Build x + g f(G(x)) with GroupNorm(1), an instance norm or a batch norm, which are no norms of tokens."""
    make = kit.rng.choice((
        lambda: nn.GroupNorm(1, kit.d), lambda: nn.InstanceNorm1d(kit.d, affine=True), lambda: nn.BatchNorm1d(kit.d)
    ))  # fmt: skip
    norms = nn.ModuleList(make() for _ in range(4))
    convs = nn.ModuleList(nn.Conv1d(kit.d, kit.d, 3, padding=1) for _ in range(4))

    def run(model, x):
        for norm, conv in zip(model.norms, model.convs, strict=True):
            x = x + conv(torch.relu(norm(x)))
        return x

    sites = [Site("", "other", Row()) for _ in convs]
    stream = kit.stream(sites, None, "its norms are over more than the features of a token", per_layer=1)
    x = Layout("channels", kit.sizes).apply(kit.input())
    return kit.build(Graph(run, norms=norms, convs=convs), [x], stream)


@construct("training: dropout")
def training(kit):
    """Build pre-LN in training mode with dropout or stochastic depth."""
    layers, last = kit.parts()
    how = kit.rng.choice(("dropout", "stochastic depth"))

    def step(model, k, part, x):
        y = part.branch(x)
        if how == "dropout":
            return x + F.dropout(y, 0.2, training=True)
        return x + y * torch.empty(len(x), 1, 1).bernoulli_(0.7).div_(0.7)

    return kit.loop(layers, step, last=last)
