"""Constructs with gates and conditions, with several states, with skips, and with mistakes: rows describe few of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from addnorm import Row
from support.random_models.answers import RandomModel, SiteAnswer, Trace
from support.random_models.constructs import construct, through, trace_steps
from support.random_models.graphs import POST, PRE, Graph, Kit, flatten
from support.random_models.layouts import make_layout
from support.random_models.rows import Plan
from support.random_models.steps import Step

BARE, SANDWICH = Plan(), Plan(norm_in=True, norm_branch=True)


def _looped(
    kit: Kit, step: Callable[..., Tensor], reason: str, plan: Plan = PRE, letters: str = "af", **more: Any
) -> RandomModel:
    """Build a model whose sublayers run `step(model, k, part, x, *inputs)`; no row expresses them."""
    layers, last = kit.layers(letters, plan), kit.norm()

    def run(model: Any, x: Tensor, *inputs: Tensor) -> Tensor:
        for k, part in enumerate(flatten(model.layers)):
            x = step(model, k, part, x, *inputs)
        return model.last(x)

    inputs, words = more.pop("inputs", []), more.pop("words", ())
    streams = more.pop("streams", lambda sites: [])(kit.sites(layers, row=None))
    model = Graph(run, layers=layers, last=last, **more)
    return kit.build(model, [kit.input(), *inputs], *streams, reason=reason, words=words)


def _linears(kit: Kit, n: int) -> nn.ModuleList:
    return nn.ModuleList(kit.linear() for _ in range(n))


# --- gates ----------------------------------------------------------------------------------------------------------------


@construct("highway gate")
def highway(kit: Kit) -> RandomModel:
    how = kit.rng.choice(("t y + (1 - t) x", "x + t (y - x)", "lerp", "(1 - t) x + t y, two gates"))

    def step(model: Any, k: int, part: Step, x: Tensor) -> Tensor:
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

    return _looped(
        kit, step, "the stream is multiplied by a gate of the data", gates=_linears(kit, 6), others=_linears(kit, 6)
    )


@construct("gated recurrent unit")
def recurrent_gate(kit: Kit) -> RandomModel:
    is_written = kit.rng.random() < 0.5

    def step(model: Any, k: int, part: Step, x: Tensor) -> Tensor:
        y = part.branch(x)
        if not is_written:
            return model.cells[k](y.flatten(0, 1), x.flatten(0, 1)).view_as(x)
        r, z = torch.sigmoid(model.r[k](y) + model.u[k](x)), torch.sigmoid(model.z[k](y) + model.v[k](x) - 2)
        h = torch.tanh(model.w[k](y) + model.g[k](r * x))
        return (1 - z) * x + z * h

    modules = {name: _linears(kit, 6) for name in ("r", "u", "z", "v", "w", "g")} if is_written else {
        "cells": nn.ModuleList(nn.GRUCell(kit.d, kit.d) for _ in range(6))}  # fmt: skip
    return _looped(kit, step, "a recurrent cell adds", **modules)


@construct("gate of the stream on the write")
def write_gate(kit: Kit) -> RandomModel:
    """Build x + sigmoid(W x) f(N(x)): the write depends on the stream both with and without its norm."""

    def step(model: Any, k: int, part: Step, x: Tensor) -> Tensor:
        return x + torch.sigmoid(model.gates[k](x)) * part.branch(x)

    return _looped(kit, step, "the sublayer reads the stream with and without its norm", gates=_linears(kit, 6))


@construct("condition: shift and scale")
def adaptive_norm(kit: Kit) -> RandomModel:
    return _conditioned(kit, has_gate=False)


@construct("condition: shift, scale and gate")
def adaptive_norm_zero(kit: Kit) -> RandomModel:
    return _conditioned(kit, has_gate=True)


def _conditioned(kit: Kit, has_gate: bool) -> RandomModel:
    """Build adaLN: a condition changes what sublayers read, and what they write; both are parts of the sublayer."""
    layers, last = kit.layers(), kit.norm()
    width = kit.d * (3 if has_gate else 2)
    maps = nn.ModuleList(nn.Linear(5, width) for _ in flatten(layers))

    def run(model: Any, x: Tensor, c: Tensor) -> Tensor:
        for part, linear in zip(flatten(model.layers), model.maps, strict=True):
            shift, scale, *gate = torch.nn.functional.silu(linear(c))[:, None].chunk(width // kit.d, -1)
            y = part.f(part.norm_in(x) * (1 + scale) + shift)
            x = x + (gate[0] * y if gate else y)
        return model.last(x)

    sites = [replace(site, path=site.path.removesuffix(".f")) for site in kit.sites(layers)]
    sites = [replace(site, path="") for site in sites]
    stream = kit.stream(sites, "pre_ln", final=last)
    return kit.build(
        Graph(run, layers=layers, last=last, maps=maps), [kit.input(), kit.noise(kit.sizes.batch, 5)], stream
    )


@construct("condition: gate of a sandwich")
def gated_sandwich(kit: Kit) -> RandomModel:
    """Build x + tanh(g(c)) N(f(N(x))) (Lumina): the second norm is no part of the sublayer."""

    def step(model: Any, k: int, part: Step, x: Tensor, c: Tensor) -> Tensor:
        return x + torch.tanh(model.maps[k](c)).unsqueeze(1) * part.branch(x)

    maps = nn.ModuleList(nn.Linear(5, kit.d) for _ in range(6))
    return _looped(
        kit, step, "a gate of a condition multiplies the normed write", SANDWICH, maps=maps, words=("gate", "condition"),
        inputs=[kit.noise(kit.sizes.batch, 5)], streams=lambda sites: [kit.stream(sites, "sandwich")],
    )  # fmt: skip


# --- several states -------------------------------------------------------------------------------------------------------


@construct("hyper-connections")
def hyper_connections(kit: Kit) -> RandomModel:
    n, is_dynamic = kit.rng.choice((2, 3)), kit.rng.random() < 0.5
    how = kit.rng.choice(("matmul", "einsum", "list"))

    def run(model: Any, x: Tensor) -> Tensor:
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

    layers, last = kit.layers(), kit.norm()
    count = len(flatten(layers))
    mix = nn.ParameterList(nn.Parameter(torch.zeros(n, n)) for _ in range(count))
    vectors = [nn.ParameterList(nn.Parameter(torch.zeros(n)) for _ in range(count)) for _ in range(2)]
    model = Graph(
        run, layers=layers, last=last, mix=mix, read=vectors[0], inject=vectors[1], dynamic=_linears(kit, count)
    )
    return kit.build(model, [kit.input()], reason="a matrix mixes several states")


@construct("reversible pair")
def reversible(kit: Kit) -> RandomModel:
    layers, last = kit.layers(), kit.norm()
    how = kit.rng.choice(("two inputs", "sum", "cat"))

    def run(model: Any, x: Tensor, *other: Tensor) -> Tensor:
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
def dense(kit: Kit) -> RandomModel:
    """Build sublayers that read the weighted sum of all earlier states (DenseFormer)."""
    layers, last = kit.layers(), kit.norm()
    count = len(flatten(layers)) + 1
    weights = nn.ParameterList(nn.Parameter(torch.zeros(count)) for _ in range(count))

    def run(model: Any, x: Tensor) -> Tensor:
        states = [x]
        for k, part in enumerate(flatten(model.layers)):
            states.append(part.run(x))
            x = sum(model.weights[k][j] * state for j, state in enumerate(states))
        return model.last(x)

    return kit.build(
        Graph(run, layers=layers, last=last, weights=weights), [kit.input()], reason="states are mixed over depth"
    )


# --- skips ----------------------------------------------------------------------------------------------------------------


@construct("long skip")
def long_skip(kit: Kit) -> RandomModel:
    layers, last = kit.layers(num_layers=3), kit.norm()

    def run(model: Any, x: Tensor) -> Tensor:
        states = []
        for k, layer in enumerate(model.layers):
            x = x + states[1] if k == 2 else x
            states.append(x)
            x = through([*layer], x)
        return model.last(x)

    sites = kit.sites(layers)
    sites.insert(4, SiteAnswer("", "", None, role="skip"))
    stream = replace(kit.stream(sites, "pre_ln", final=last), num_layers=3)
    return kit.build(Graph(run, layers=layers, last=last), [kit.input()], stream)


@construct("x_0 added again")
def first_state_again(kit: Kit) -> RandomModel:
    layers, last = kit.layers(), kit.norm()
    scales = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(2 * len(layers)))

    def run(model: Any, x: Tensor) -> Tensor:
        first = x
        for k, layer in enumerate(model.layers):
            x = model.scales[2 * k] * x + model.scales[2 * k + 1] * first if k else x
            x = through([*layer], x)
        return model.last(x)

    reason = "between layers x_0 is added to a multiple of the stream"
    words = ("skip", "factor", "earlier state")
    stream = kit.stream(kit.sites(layers), "pre_ln", final=last)
    return kit.build(
        Graph(run, layers=layers, last=last, scales=scales), [kit.input()], stream, reason=reason, words=words
    )


@construct("skip by concatenation")
def concatenated_skip(kit: Kit) -> RandomModel:
    """Build x = W cat(x, earlier state) in the middle (U-ViT): a new stream begins there."""
    one, two, last, join = kit.layers(num_layers=2), kit.layers(num_layers=2), kit.norm(), nn.Linear(2 * kit.d, kit.d)

    def run(model: Any, x: Tensor) -> Tensor:
        first = through([*model.one[0]], x)
        x = model.join(torch.cat((through([*model.one[1]], first), first), -1))
        return model.last(through(flatten(model.two), x))

    streams = (kit.stream(kit.sites(one, "one"), "pre_ln"), kit.stream(kit.sites(two, "two"), "pre_ln", final=last))
    return kit.build(Graph(run, one=one, two=two, join=join, last=last), [kit.input()], *streams)


@construct("function of the stream between layers")
def activation_between(kit: Kit) -> RandomModel:
    how = kit.rng.choice((torch.relu, torch.tanh, lambda t: t.clamp(-1, 1), lambda t: t.square(), lambda t: t + 0.5))

    def step(model: Any, k: int, part: Step, x: Tensor) -> Tensor:
        x = part.run(x)
        return how(x) if k == 1 else x

    return _looped(kit, step, "a function changes the stream between two layers")


# --- mistakes and models without a stream ---------------------------------------------------------------------------------


@construct("norms in a row")
def norms_in_a_row(kit: Kit) -> RandomModel:
    more = nn.ModuleList(kit.norm() for _ in range(6))
    return _looped(kit, lambda m, k, part, x: m.more[k](part.run(x)), "two norms follow each add", POST, more=more)


@construct("residual counted twice")
def counted_twice(kit: Kit) -> RandomModel:
    return _looped(kit, lambda m, k, part, x: x + part.norm_out(x + part.f(x)), "the branch contains the stream", POST)


@construct("residual of the norm, raw read")
def beside_the_norm(kit: Kit) -> RandomModel:
    return _looped(kit, lambda m, k, part, x: part.norm_in(x) + part.f(x), "the norm is on the residual only")


@construct("residual of the norm")
def from_the_norm(kit: Kit) -> RandomModel:
    """Build z = N(x), x' = z + f(z): post-LN from z_0 on, whose last norm is the final one."""
    layers, last = kit.layers(), kit.norm()

    def run(model: Any, x: Tensor) -> Tensor:
        for part in flatten(model.layers):
            z = part.norm_in(x)
            x = z + part.f(z)
        return model.last(x)

    sites = kit.sites(layers)
    norms = [site.norm_in for site in sites[1:]] + [None]
    sites = [replace(site, row=Row(norm_out=True), norm_in=None, norm_out=norm)
             for site, norm in zip(sites, norms, strict=True)]  # fmt: skip
    first = kit.sites(layers)[0].norm_in
    stream = kit.stream(sites, "post_ln", embedding_norm=first)
    end = kit.stream([], None, final=last).final_norm
    stream = replace(stream, sites=(*stream.sites[:-1], replace(stream.sites[-1], norm_out=end)))
    return kit.build(Graph(run, layers=layers, last=last), [kit.input()], stream)


@construct("no residual connection")
def no_residual(kit: Kit) -> RandomModel:
    is_normed = kit.rng.random() < 0.5

    def step(model: Any, k: int, part: Step, x: Tensor) -> Tensor:
        return part.branch(x) if is_normed else part.f(x)

    result = _looped(kit, step, "nothing is added")
    result.answer = replace(result.answer, has_adds=False)
    return result


@construct("norm inside the sublayer")
def inner_norm(kit: Kit) -> RandomModel:
    """Build pre-LN whose feed-forward has a norm before its last product (NormFormer)."""
    layers, last = kit.layers(), kit.norm()
    for layer in layers:
        f = layer[1].f
        if hasattr(f, "down"):
            f.down = nn.Sequential(nn.LayerNorm(f.down.in_features), f.down)

    def run(model: Any, x: Tensor) -> Tensor:
        return model.last(through(flatten(model.layers), x))

    def trace(model: Any, x: Tensor, without: int | None = None) -> Trace:
        sites, end = trace_steps(flatten(model.layers), x, without)
        return Trace(x, sites, model.last.by_hand(end))

    stream = kit.stream(kit.sites(layers), "pre_ln", final=last)
    return kit.build(Graph(run, layers=layers, last=last), [kit.input()], stream, trace=trace)


@construct("norms over more than the features")
def other_norms(kit: Kit) -> RandomModel:
    """Build x + g f(G(x)) with GroupNorm(1), an instance norm or a batch norm, which are no norms of tokens."""
    channels = make_layout("channels", kit.sizes)
    makes = (
        lambda: nn.GroupNorm(1, kit.d),
        lambda: nn.InstanceNorm1d(kit.d, affine=True),
        lambda: nn.BatchNorm1d(kit.d),
    )
    make = kit.rng.choice(makes)
    norms = nn.ModuleList(make() for _ in range(4))
    convs = nn.ModuleList(nn.Conv1d(kit.d, kit.d, 3, padding=1) for _ in range(4))

    def run(model: Any, x: Tensor) -> Tensor:
        for norm, conv in zip(model.norms, model.convs, strict=True):
            x = x + conv(torch.relu(norm(x)))
        return x

    sites = [SiteAnswer("", "other", Row()) for _ in convs]
    stream = kit.stream(sites, None, "its norms are over more than the features of a token", per_layer=1)
    return kit.build(Graph(run, norms=norms, convs=convs), [channels.apply(kit.input())], stream)


@construct("training: dropout")
def training(kit: Kit) -> RandomModel:
    """Build pre-LN in training mode with dropout or stochastic depth."""
    layers, last = kit.layers(), kit.norm()
    how = kit.rng.choice(("dropout", "stochastic depth"))

    def run(model: Any, x: Tensor) -> Tensor:
        for part in flatten(model.layers):
            y = part.branch(x)
            if how == "dropout":
                y = torch.nn.functional.dropout(y, 0.2, training=True)
            else:
                y = y * torch.empty(len(x), 1, 1).bernoulli_(0.7).div_(0.7)
            x = x + y
        return model.last(x)

    stream = kit.stream(kit.sites(layers), "pre_ln", final=last)
    return kit.build(Graph(run, layers=layers, last=last), [kit.input()], stream)
